"""The placement environment (Gymnasium) and its batched form."""
