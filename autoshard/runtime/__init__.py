"""Sharded training: executes a plan on real ranks and times its phases."""
