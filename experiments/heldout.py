"""Held-out problems: drawn from tables that nothing was trained on, by seed, unfiltered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.checks import check_integers
from autoshard.errors import InputError
from autoshard.problem import ShardingProblem
from autoshard.tables import Table
from autoshard.tasks import TaskDistribution, draw_problem


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One kind of problem."""

    num_tables: int
    world_size: int
    num_tasks: int
    """How many problems of this kind."""
    batch_size: int = 256
    """Samples per rank."""
    memory_slack: tuple[float, float] = (1.1, 3.0)
    """Room for shards over an equal share of all tables, drawn log-uniformly."""

    def __post_init__(self) -> None:
        check_integers(self, num_tasks=1)

    @property
    def name(self) -> str:
        """Such as `40x2`: tables × ranks."""
        return f"{self.num_tables}x{self.world_size}"


@dataclass(frozen=True, kw_only=True)
class HeldOutTask:
    """A problem with the name that result rows carry."""

    name: str
    setting: Setting
    problem: ShardingProblem


def held_out_tasks(
    pool: Sequence[Table], settings: Sequence[Setting], seed: int
) -> Iterator[HeldOutTask]:
    """Draw every problem of every setting; each depends on the seed and its own numbers only.

    Raises:
        InputError: two settings have the same counts, so that their problems would share names,
            or the pool has fewer tables than a problem needs.
    """
    names = [setting.name for setting in settings]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise InputError(
            "two settings have the same numbers of tables and ranks",
            got=", ".join(twice),
            remedy="give each its own counts, or more num_tasks to one of them",
        )
    for setting in settings:
        distribution = TaskDistribution(
            num_tables=(setting.num_tables, setting.num_tables),
            world_sizes=(setting.world_size,),
            memory_slack=setting.memory_slack,
            batch_sizes=(setting.batch_size,),
        )
        for index in range(setting.num_tasks):
            generator = np.random.default_rng([seed, setting.num_tables, setting.world_size, index])
            problem = draw_problem(pool, distribution, generator)
            yield HeldOutTask(name=f"{setting.name}-{index}", setting=setting, problem=problem)
