"""Drawn models, plans and batches train as the reference does; failures are shrunk."""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.problem import Optimizer
from autoshard.runtime.group import WorkerGroup
from tests.distributed import runtime_cases
from tests.distributed.equality_checks import check_equal, check_exact
from tests.distributed.model_cases import CPU_OPTIMIZERS, random_case
from tests.distributed.runtime_cases import run_ranks

Groups = dict[int, WorkerGroup]
WORLD_SIZES = (1, 2, 3, 4)

bounded = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=25,
    suppress_health_check=list(HealthCheck),
)
draws = st.randoms(use_true_random=False)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@bounded
@given(rng=draws)
def test_any_model_on_any_plan_agrees(groups: Groups, world_size: int, rng: random.Random) -> None:
    optimizer = rng.choice(CPU_OPTIMIZERS)
    case = random_case(rng, world_size, optimizer, num_steps=rng.randint(1, 3))
    check_equal(case, run_ranks(groups, world_size, runtime_cases.train, case))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@bounded
@given(rng=draws)
def test_any_exact_model_is_equal_to_the_last_bit(
    groups: Groups, world_size: int, rng: random.Random
) -> None:
    case = random_case(rng, world_size, Optimizer.SGD, exact=True, num_steps=rng.randint(1, 3))
    check_exact(case, run_ranks(groups, world_size, runtime_cases.train, case))
