"""Measured truth: kernel and collective timings with their spread and fingerprint."""
