"""The pool of tables that experiments share, and its split into seen and unseen tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from autoshard.measure.sampling import Split, split_tables
from autoshard.tables import Table
from autoshard.workloads.registry import make_workload


@dataclass(frozen=True, kw_only=True)
class PoolConfig:
    """`conf/pool/*.yaml`: measuring, training and evaluating must name the same pool."""

    workload: dict[str, Any] = field(default_factory=dict)
    """`name` of a registered workload, and its options."""
    seed: int = 0
    """Decides which table belongs to which split."""
    split_shares: tuple[float, float, float] = (0.6, 0.1, 0.3)
    """Share of tables for training, validation and test."""


def pool_tables(config: PoolConfig) -> dict[Split, tuple[Table, ...]]:
    """The tables of each split; test tables occur in no measurement and no training task.

    Raises:
        InputError: the workload or one of its options is unknown.
    """
    options = dict(config.workload)
    tables = make_workload(str(options.pop("name", "")), **options)
    return split_tables(tables, config.split_shares, seed=config.seed)
