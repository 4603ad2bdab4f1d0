"""Self-contained HTML reports with pictures."""
