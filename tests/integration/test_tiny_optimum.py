"""Tiny problems whose best plan is known by trying every plan: `autoshard` must reach it."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache

import pytest

from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.cost_models.exported import load_cost_model
from autoshard.costing import predict_step
from autoshard.errors import ArtifactError
from autoshard.memory import memory_ledger
from autoshard.planning import make_plan
from autoshard.policies import Policy, load_policy
from autoshard.problem import ShardingProblem
from autoshard.protocols import CostModel
from autoshard.shards import ShardSlice
from autoshard.splitting import default_slices, free_capacity_bytes
from autoshard.tables import Table
from tests.placement_cases import make_problem, random_tables


@cache
def shipped_policy() -> Policy:
    try:
        return load_policy("default")
    except ArtifactError as error:
        pytest.skip(f"no usable policy is shipped: {error}")


@cache
def shipped_cost_model() -> CostModel:
    try:
        return load_cost_model("default")
    except ArtifactError as error:
        pytest.skip(f"no usable cost model is shipped: {error}")


def roomy() -> ShardingProblem:
    return make_problem(random_tables(7, seed=11), 3)


def tight() -> ShardingProblem:
    """Equal large tables and small ones: most placements do not fit."""
    tables = [
        Table(name=f"large{i}", num_embeddings=40_000, embedding_dim=16, pooling_factor=1.0 + i)
        for i in range(3)
    ] + [
        Table(name=f"small{i}", num_embeddings=4_000, embedding_dim=16, pooling_factor=20.0 - i)
        for i in range(4)
    ]
    fixed = 2**30 - free_capacity_bytes(make_problem(tables, 3))[0]
    return make_problem(tables, 3, fixed + 4_200_000)


def uneven() -> ShardingProblem:
    tables = random_tables(6, seed=5)
    fixed = 2**30 - free_capacity_bytes(make_problem(tables, 3))[0]
    return make_problem(tables, 3, (fixed + 2**30, fixed + 2_000_000, fixed + 10_000_000))


def split() -> ShardingProblem:
    """One table is wider than any rank."""
    tables = [
        Table(name="wide", num_embeddings=50_000, embedding_dim=64, pooling_factor=8.0),
        *random_tables(4, seed=12),
    ]
    fixed = 2**30 - free_capacity_bytes(make_problem(tables, 3))[0]
    return make_problem(tables, 3, fixed + 12_000_000)


def legal_costs(problem: ShardingProblem, cost_model: CostModel) -> Iterator[float]:
    """The cost of every legal placement of the slices that the splitting rule gives."""
    slices = default_slices(problem)
    ranks_of = range(problem.topology.world_size)
    for ranks in itertools.product(ranks_of, repeat=len(slices)):
        names = {(s.table.name, rank) for s, rank in zip(slices, ranks, strict=True)}
        held: list[list[ShardSlice]] = [[] for _ in ranks_of]
        for slice_, rank in zip(slices, ranks, strict=True):
            held[rank].append(slice_)
        ledgers = memory_ledger(problem, held)
        if len(names) == len(slices) and all(ledger.free_bytes >= 0 for ledger in ledgers):
            yield predict_step(problem, held, cost_model).step_ms


def check(problem: ShardingProblem, cost_model: CostModel) -> int:
    """Plan, compare with the best of all placements, and say how many there were."""
    costs = list(legal_costs(problem, cost_model))
    plan = make_plan(problem, cost_model=cost_model, policy=shipped_policy())
    assert plan.cost is not None
    assert plan.cost.step.step_ms == pytest.approx(min(costs), rel=1e-6)
    assert plan.cost.lower_bound_ms is not None
    assert plan.cost.lower_bound_ms <= min(costs) * (1 + 1e-6)
    assert min(costs) < 0.95 * max(costs)  # it matters where the tables lie
    return len(costs)


@pytest.mark.parametrize(
    ("make", "fewest", "most"),
    [
        (roomy, 3**7, 3**7),
        (tight, 10, 3**7 // 5),
        (uneven, 10, 3**6 // 2),
        (split, 10, 3**6 - 1),
    ],
)
def test_the_optimum_is_reached(
    make: Callable[[], ShardingProblem], fewest: int, most: int
) -> None:
    assert fewest <= check(make(), AnalyticCostModel()) <= most


def test_the_optimum_is_reached_with_the_measured_cost_model() -> None:
    assert check(make_problem(random_tables(5, seed=3), 2), shipped_cost_model()) == 2**5
