"""Random tasks: seeded, prepared once, redrawn within a limit."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.errors import InfeasibleError, InputError
from autoshard.tasks import TaskDistribution
from envs.task_source import FixedTaskSource, RandomTaskSource
from tests.placement_cases import COST_MODEL, random_tables

SMALL = TaskDistribution(num_tables=(2, 5), world_sizes=(1, 3), batch_sizes=(64,))


def make_source(num_tasks: int | None = None, seed: int = 0) -> RandomTaskSource:
    return RandomTaskSource(random_tables(10), COST_MODEL, SMALL, num_tasks=num_tasks, seed=seed)


def test_tasks_are_as_asked_for_and_all_kinds_come() -> None:
    source, generator = make_source(), np.random.default_rng(0)
    tasks = [source.sample(generator) for _ in range(60)]
    assert {len(task.problem.tables) for task in tasks} == {2, 3, 4, 5}
    assert {task.world_size for task in tasks} == {1, 3}


def test_a_fixed_set_is_prepared_once_and_does_not_depend_on_the_order_of_draws() -> None:
    one, other = make_source(num_tasks=4), make_source(num_tasks=4)
    drawn = {id(one.sample(np.random.default_rng(i))) for i in range(40)}
    assert len(drawn) == 4
    other.task(3)
    names = [[t.name for t in source.task(1).problem.tables] for source in (one, other)]
    assert names[0] == names[1]
    assert one.task(1) is one.task(1)
    assert [t.name for t in make_source(4, seed=1).task(1).problem.tables] != names[0]


def test_tasks_that_fit_in_no_way_are_refused_after_some_draws() -> None:
    tight = TaskDistribution(num_tables=(2, 2), world_sizes=(2,), memory_slack=(0.01, 0.02))
    source = RandomTaskSource(random_tables(4), COST_MODEL, tight)
    with pytest.raises(InfeasibleError, match=r"50 random tasks in a row.*memory_slack"):
        source.sample(np.random.default_rng(0))


def test_too_small_a_pool_and_no_tasks_are_refused() -> None:
    with pytest.raises(InputError, match=r"fewer tables.*got: 4.*at least 5"):
        RandomTaskSource(random_tables(4), COST_MODEL, SMALL)
    with pytest.raises(InputError, match="num_tasks"):
        make_source(num_tasks=0)
    with pytest.raises(InputError, match="at least one task"):
        FixedTaskSource([])
