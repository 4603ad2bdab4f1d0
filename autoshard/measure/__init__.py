"""Measures kernels and collectives on this machine, as training data for cost models.

`sampling` draws what to measure, `kernels` and `collectives` time it, `runner` spreads
it over processes, `store` keeps the rows, `environment` says which machine they hold for.
"""
