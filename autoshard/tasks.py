"""Random sharding problems: training draws from them, held-out evaluation is drawn once by seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autoshard.errors import InputError
from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.shards import ShardSlice, fixed_rank_bytes, shard_load
from autoshard.tables import Table
from autoshard.topology import Topology


@dataclass(frozen=True, kw_only=True)
class TaskDistribution:
    """What random tasks look like."""

    num_tables: tuple[int, int] = (40, 80)
    """Smallest and largest number of tables; both may come."""
    world_sizes: tuple[int, ...] = (2, 4, 8)
    """Numbers of ranks, each equally likely."""
    memory_slack: tuple[float, float] = (1.1, 3.0)
    """Each rank's room for shards over an equal share of all tables; drawn log-uniformly.

    Near 1, few placements fit.
    """
    batch_sizes: tuple[int, ...] = (512,)
    """Samples per rank, each equally likely."""
    optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD
    embedding_dims: tuple[int, ...] = ()
    """If given, every drawn table gets one of these dims at random."""

    def __post_init__(self) -> None:
        low, high = self.num_tables
        if not 1 <= low <= high:
            raise InputError(
                "num_tables is not usable", got=self.num_tables, allowed="1 <= low <= high"
            )
        slack_low, slack_high = self.memory_slack
        if not 0 < slack_low <= slack_high < float("inf"):
            raise InputError(
                "memory_slack is not usable", got=self.memory_slack, allowed="0 < low <= high"
            )
        for name in ("world_sizes", "batch_sizes"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise InputError(
                    f"{name} is not usable", got=getattr(self, name), allowed="integers >= 1"
                )
        if self.embedding_dims and min(self.embedding_dims) < 1:
            raise InputError(
                "embedding_dims is not usable", got=self.embedding_dims, allowed="integers >= 1"
            )


def draw_problem(
    pool: Sequence[Table], distribution: TaskDistribution, generator: np.random.Generator
) -> ShardingProblem:
    """Draw one problem; nothing says that it is feasible.

    Args:
        pool: tables to choose from, without replacement.
        distribution: what problems look like.
        generator: decides everything.

    Raises:
        InputError: the pool has fewer tables than the problem may have.
    """
    if distribution.num_tables[1] > len(pool):
        raise InputError(
            "the pool has fewer tables than a task may have",
            got=len(pool),
            allowed=f"at least {distribution.num_tables[1]}",
        )
    low, high = distribution.num_tables
    num_tables = int(generator.integers(low, high + 1))
    world_size = int(generator.choice(distribution.world_sizes))
    training = TrainingConfig(
        batch_size=int(generator.choice(distribution.batch_sizes)), optimizer=distribution.optimizer
    )
    slack = float(np.exp(generator.uniform(*np.log(distribution.memory_slack))))
    picked = generator.choice(len(pool), size=num_tables, replace=False)
    tables = tuple(pool[index] for index in picked)
    if distribution.embedding_dims:
        dims = generator.choice(distribution.embedding_dims, size=num_tables)
        tables = tuple(
            replace(table, embedding_dim=int(dim)) for table, dim in zip(tables, dims, strict=True)
        )
    shards_bytes = sum(
        shard_load(ShardSlice.whole(table), training, world_size).memory_bytes for table in tables
    )
    roomy = ShardingProblem(
        tables=tables, topology=Topology.uniform(world_size, 0), training=training
    )
    room = int(slack * shards_bytes / world_size) + sum(fixed_rank_bytes(roomy).values())
    return replace(roomy, topology=Topology.uniform(world_size, room))
