"""Adapts an exported cost model to another machine, from about a hundred measured shard sets.

`data` reads rows, `tunable` opens a model's programs for training, `scaling`, `fine_tuning` and
`exchanges` adapt parts of it, `adapting` chooses among them by cross-validation, and `artifact`
writes what comes out as a cost model of its own.
"""
