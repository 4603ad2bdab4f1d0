"""Hydra entry points: wiring only."""
