"""Table lists, id streams and batches: published presets, generators and readers."""
