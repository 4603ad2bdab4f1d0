"""Where episodes get their tasks: random draws from a pool of tables, or a given list."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np

from autoshard.errors import InfeasibleError, InputError
from autoshard.placement import PlacementTask, prepare_task
from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.protocols import CostModel
from autoshard.shards import ShardSlice, fixed_rank_bytes, shard_load
from autoshard.tables import Table, check_tables
from autoshard.topology import Topology

#: A draw that fits in no way is redrawn at most this often.
MAX_REDRAWS = 50


class TaskSource(Protocol):
    """Anything that hands out tasks."""

    def sample(self, generator: np.random.Generator) -> PlacementTask:
        """Draw a task; all randomness must come from `generator`."""


class FixedTaskSource:
    """Hands out given tasks, each equally likely."""

    def __init__(self, tasks: Sequence[PlacementTask]) -> None:
        """Keep the tasks.

        Raises:
            InputError: there are none.
        """
        if not tasks:
            raise InputError("a task source needs at least one task", got=0)
        self.tasks = tuple(tasks)

    def sample(self, generator: np.random.Generator) -> PlacementTask:
        """Draw one of them."""
        return self.tasks[int(generator.integers(len(self.tasks)))]


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


class RandomTaskSource:
    """Draws tasks from a pool of tables, afresh or from a fixed set that is prepared once."""

    def __init__(
        self,
        tables: Sequence[Table],
        cost_model: CostModel,
        distribution: TaskDistribution | None = None,
        *,
        num_tasks: int | None = None,
        seed: int = 0,
    ) -> None:
        """Set up; tasks are prepared when they are first drawn.

        Args:
            tables: the pool, with distinct names.
            cost_model: encodes and orders the slices.
            distribution: what tasks look like.
            num_tasks: draw from this many tasks only, each prepared once (encoding takes
                milliseconds); a new task for every draw if None.
            seed: decides the fixed set; unused if `num_tasks` is None.

        Raises:
            InputError: the pool has fewer tables than a task may have.
        """
        self.tables = check_tables(tables)
        self.distribution = distribution or TaskDistribution()
        if self.distribution.num_tables[1] > len(self.tables):
            raise InputError(
                "the pool has fewer tables than a task may have",
                got=len(self.tables),
                allowed=f"at least {self.distribution.num_tables[1]}",
            )
        if num_tasks is not None and num_tasks < 1:
            raise InputError("num_tasks is not usable", got=num_tasks, allowed="integers >= 1")
        self._cost_model = cost_model
        self._num_tasks, self._seed = num_tasks, seed
        self._prepared: dict[int, PlacementTask] = {}

    def sample(self, generator: np.random.Generator) -> PlacementTask:
        """Draw a task.

        Raises:
            InfeasibleError: no draw in a row of `MAX_REDRAWS` fits.
        """
        if self._num_tasks is None:
            return self._draw(generator)
        return self.task(int(generator.integers(self._num_tasks)))

    def task(self, index: int) -> PlacementTask:
        """The `index`-th task of this seed, whatever was drawn before."""
        if index not in self._prepared:
            self._prepared[index] = self._draw(np.random.default_rng([self._seed, index]))
        return self._prepared[index]

    def _draw(self, generator: np.random.Generator) -> PlacementTask:
        failure: InfeasibleError | None = None
        for _ in range(MAX_REDRAWS):
            problem = self._draw_problem(generator)
            try:
                return prepare_task(problem, self._cost_model)
            except InfeasibleError as error:
                failure = error
        raise InfeasibleError(
            f"{MAX_REDRAWS} random tasks in a row fit in no way; the last: {failure}",
            remedy="raise memory_slack or draw from smaller tables",
        )

    def _draw_problem(self, generator: np.random.Generator) -> ShardingProblem:
        wanted = self.distribution
        low, high = wanted.num_tables
        num_tables = int(generator.integers(low, high + 1))
        world_size = int(generator.choice(wanted.world_sizes))
        training = TrainingConfig(
            batch_size=int(generator.choice(wanted.batch_sizes)), optimizer=wanted.optimizer
        )
        slack = float(np.exp(generator.uniform(*np.log(wanted.memory_slack))))
        picked = generator.choice(len(self.tables), size=num_tables, replace=False)
        tables = tuple(self.tables[index] for index in picked)
        if wanted.embedding_dims:
            dims = generator.choice(wanted.embedding_dims, size=num_tables)
            tables = tuple(
                replace(table, embedding_dim=int(dim))
                for table, dim in zip(tables, dims, strict=True)
            )
        shards_bytes = sum(
            shard_load(ShardSlice.whole(table), training, world_size).memory_bytes
            for table in tables
        )
        roomy = ShardingProblem(
            tables=tables, topology=Topology.uniform(world_size, 0), training=training
        )
        room = int(slack * shards_bytes / world_size) + sum(fixed_rank_bytes(roomy).values())
        return replace(roomy, topology=Topology.uniform(world_size, room))
