"""Writes plans in other formats: one file per format, registered by name."""
