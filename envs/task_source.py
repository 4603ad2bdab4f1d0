"""Where episodes get their tasks: random draws from a pool of tables, or a given list."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from autoshard.errors import InfeasibleError, InputError
from autoshard.placement import PlacementTask, prepare_task
from autoshard.protocols import CostModel
from autoshard.tables import Table, check_tables
from autoshard.tasks import TaskDistribution, draw_problem

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
            problem = draw_problem(self.tables, self.distribution, generator)
            try:
                return prepare_task(problem, self._cost_model)
            except InfeasibleError as error:
                failure = error
        raise InfeasibleError(
            f"{MAX_REDRAWS} random tasks in a row fit in no way; the last: {failure}",
            remedy="raise memory_slack or draw from smaller tables",
        )
