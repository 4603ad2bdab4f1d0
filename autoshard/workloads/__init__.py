"""Workloads: table lists with their id streams, published, generated or measured."""
