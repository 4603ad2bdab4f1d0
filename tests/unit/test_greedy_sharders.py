"""The greedy sharders against naive ones that look at every rank with finished-plan costing."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.costing import predict_step
from autoshard.errors import InfeasibleError
from autoshard.placement import PlacementTask, prepare_task
from autoshard.placement_costs import placement_objective_ms
from autoshard.protocols import SearchBudget
from autoshard.sharders.cost_greedy import place_by_cost
from autoshard.sharders.heuristics import HEURISTIC_COSTS, place_by_heuristic
from autoshard.sharders.registry import make_sharder
from autoshard.shards import ShardSlice
from tests.placement_cases import make_problem, random_tables

#: A slow network, so that the objective and the kernels disagree about the best rank.
COST_MODEL = AnalyticCostModel(bytes_per_ms=3e4)


def tight_task(
    seed: int, num_tables: int = 12, world_size: int = 3, slack: float = 1.3
) -> PlacementTask:
    """Ranks with `slack` times an equal share of memory, but room for the largest table."""
    tables = random_tables(num_tables, seed=seed)
    roomy = prepare_task(make_problem(tables, world_size, 2**33), COST_MODEL)
    fixed = 2**33 - int(roomy.capacity_bytes_R[0])
    need = roomy.memory_bytes_S
    room = max(int(slack * need.sum() / world_size), int(need.max()))
    return prepare_task(make_problem(tables, world_size, room + fixed), COST_MODEL)


def greedy_by_hand(task: PlacementTask) -> list[int]:
    """Try each rank with room, cost the whole placement, keep the cheapest."""
    held: list[list[ShardSlice]] = [[] for _ in range(task.world_size)]
    free = task.capacity_bytes_R.tolist()
    ranks = []
    for slice_, need in zip(task.slices, task.memory_bytes_S.tolist(), strict=True):
        options = []
        for rank in range(task.world_size):
            if free[rank] >= need:
                trial = [[*here, slice_] if r == rank else here for r, here in enumerate(held)]
                cost = predict_step(task.problem, trial, COST_MODEL)
                own = cost.fwd_compute_ms[rank] + cost.bwd_compute_ms[rank]
                options.append((cost.step_ms, own, rank))
        least = min(option[0] for option in options)
        tied = [option[1:] for option in options if option[0] <= least * (1 + 1e-9)]
        rank = min(tied, key=lambda option: (round(option[0], 9), option[1]))[1]
        held[rank].append(slice_)
        free[rank] -= need
        ranks.append(rank)
    return ranks


@pytest.mark.parametrize("seed", range(5))
def test_cost_greedy_takes_the_rank_with_the_least_objective(seed: int) -> None:
    task = tight_task(seed, slack=3.0)
    assert list(place_by_cost(task, COST_MODEL)) == greedy_by_hand(task)


COSTS_BY_HAND: dict[str, Callable[[ShardSlice], float]] = {
    "size_greedy": lambda s: s.table.num_embeddings * s.table.embedding_dim,
    "dim_greedy": lambda s: s.table.embedding_dim,
    "lookup_greedy": lambda s: s.table.embedding_dim * s.table.pooling_factor,
    "size_lookup_greedy": lambda s: (
        s.table.embedding_dim * s.table.pooling_factor * math.log10(s.table.num_embeddings)
    ),
}


def test_every_heuristic_is_known_here() -> None:
    assert set(COSTS_BY_HAND) == set(HEURISTIC_COSTS)


@pytest.mark.parametrize("name", COSTS_BY_HAND)
@pytest.mark.parametrize("seed", range(4))
def test_heuristics_put_the_largest_on_the_least_loaded_rank_with_room(
    name: str, seed: int
) -> None:
    task = tight_task(seed)
    cost = COSTS_BY_HAND[name]
    needs = task.memory_bytes_S.tolist()
    free, load = task.capacity_bytes_R.tolist(), [0.0] * task.world_size
    expected: dict[int, int] = {}
    order = sorted(range(task.num_slices), key=lambda s: (-cost(task.slices[s]), -needs[s], s))
    for index in order:
        with_room = [rank for rank in range(task.world_size) if free[rank] >= needs[index]]
        if not with_room:
            with pytest.raises(InfeasibleError, match=task.slices[index].table.name):
                place_by_heuristic(name, task)
            return
        # Ties go to the rank with more memory left, then to the first.
        rank = min(with_room, key=lambda r: (load[r], -free[r]))
        expected[index] = rank
        load[rank] += cost(task.slices[index])
        free[rank] -= needs[index]
    assert place_by_heuristic(name, task) == tuple(expected[s] for s in range(task.num_slices))


def test_autoshard_starts_from_the_best_start() -> None:
    others_won = 0
    for seed in range(8):
        task = tight_task(seed, num_tables=9)
        costs = {}
        for name in ("cost_greedy", *HEURISTIC_COSTS, "random"):
            try:
                placed = make_sharder(name).assign(
                    task.problem, COST_MODEL, seed=seed, budget=SearchBudget()
                )
            except InfeasibleError:
                continue
            ranks = placed.ranks
            costs[name] = placement_objective_ms(task, COST_MODEL, ranks)
        # Enough evaluations for every start, too few for a search.
        budget = SearchBudget(num_evaluations=len(costs))
        best = make_sharder("autoshard", policy=None).assign(
            task.problem, COST_MODEL, seed=seed, budget=budget
        )
        objective_ms = placement_objective_ms(task, COST_MODEL, best.ranks)
        assert objective_ms == pytest.approx(min(costs.values()), rel=1e-12)
        others_won += costs.get("cost_greedy", np.inf) > min(costs.values()) * 1.001
    assert others_won > 0
