"""How fast the sharded-training runtime is: side by side with others, and with the floor.

`python -m benchmarks.runtime_speed` runs everything; docs/runtime_speed.md says what is
compared and how to read it.
"""
