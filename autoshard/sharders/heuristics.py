"""The baselines of the papers: random, and greedy balancing of a hand-made table cost.

AutoShard, DreamShard and NeuroShard compare with a greedy that sorts tables by a cost,
largest first, and puts each on the rank with the smallest sum so far that has room:
`size` by bytes, `dim` by embedding_dim, `lookup` by dim × pooling factor, and `size_lookup` by
dim × pooling factor × log10(rows). Ties go to the rank with less memory in use.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from autoshard.placement import PlacementTask, prepare_task
from autoshard.problem import ShardingProblem
from autoshard.protocols import Assignment, CostModel, SearchBudget
from autoshard.sharders.dead_end import dead_end_error
from autoshard.sharders.registry import register_sharder
from autoshard.shards import ShardSlice


def _size(slice_: ShardSlice) -> float:
    return float(slice_.num_rows * slice_.num_cols * slice_.table.data_type.num_bytes)


def _dim(slice_: ShardSlice) -> float:
    return float(slice_.num_cols)


def _lookup(slice_: ShardSlice) -> float:
    return slice_.num_cols * slice_.table.lookups_per_sample * slice_.row_share


def _size_lookup(slice_: ShardSlice) -> float:
    return _lookup(slice_) * math.log10(max(slice_.num_rows, 1))


HEURISTIC_COSTS: dict[str, Callable[[ShardSlice], float]] = {
    "size_greedy": _size,
    "dim_greedy": _dim,
    "lookup_greedy": _lookup,
    "size_lookup_greedy": _size_lookup,
}


def _taken_ranks(task: PlacementTask, ranks: list[int | None], index: int) -> list[int]:
    """Ranks that hold another slice of the same table."""
    if not task.has_siblings:
        return []
    siblings = np.flatnonzero(task.table_S == task.table_S[index])
    return [rank for s in siblings if (rank := ranks[s]) is not None]


def balance_greedily(name: str, task: PlacementTask, costs: list[float]) -> tuple[int, ...]:
    """Balance `costs` (one per slice, [S]) over the ranks within memory.

    Raises:
        InfeasibleError: a slice found no rank with room.
    """
    free = task.capacity_bytes_R.copy()
    load = np.zeros(task.world_size)
    ranks: list[int | None] = [None] * task.num_slices
    order = sorted(
        range(task.num_slices), key=lambda s: (-costs[s], -int(task.memory_bytes_S[s]), s)
    )
    for index in order:
        legal = free >= task.memory_bytes_S[index]
        legal[_taken_ranks(task, ranks, index)] = False
        options = np.flatnonzero(legal)
        if not len(options):
            raise dead_end_error(name, task, index, ranks)
        rank = int(min(options, key=lambda r: (load[r], -free[r], r)))
        ranks[index] = rank
        load[rank] += costs[index]
        free[rank] -= task.memory_bytes_S[index]
    return tuple(rank for rank in ranks if rank is not None)


def place_randomly(task: PlacementTask, seed: int) -> tuple[int, ...]:
    """Give every slice a random rank among those with room, in placement order.

    Raises:
        InfeasibleError: a slice found no rank with room.
    """
    generator = np.random.default_rng(seed)
    free = task.capacity_bytes_R.copy()
    ranks: list[int | None] = [None] * task.num_slices
    for index in range(task.num_slices):
        legal = free >= task.memory_bytes_S[index]
        legal[_taken_ranks(task, ranks, index)] = False
        options = np.flatnonzero(legal)
        if not len(options):
            raise dead_end_error("random", task, index, ranks)
        rank = int(generator.choice(options))
        ranks[index] = rank
        free[rank] -= task.memory_bytes_S[index]
    return tuple(rank for rank in ranks if rank is not None)


@register_sharder("random")
class RandomSharder:
    """A random rank for every slice; the seed decides."""

    name = "random"

    def assign(
        self, problem: ShardingProblem, cost_model: CostModel, *, seed: int, budget: SearchBudget
    ) -> Assignment:
        """See `autoshard.protocols.Sharder`."""
        task = prepare_task(problem, cost_model)
        return task.assignment(place_randomly(task, seed))


class HeuristicSharder:
    """Greedy balancing of one of `HEURISTIC_COSTS`."""

    def __init__(self, name: str) -> None:
        self.name = name

    def assign(
        self, problem: ShardingProblem, cost_model: CostModel, *, seed: int, budget: SearchBudget
    ) -> Assignment:
        """See `autoshard.protocols.Sharder`."""
        task = prepare_task(problem, cost_model)
        return task.assignment(place_by_heuristic(self.name, task))


def place_by_heuristic(name: str, task: PlacementTask) -> tuple[int, ...]:
    """Balance the hand-made cost called `name`.

    Raises:
        InfeasibleError: a slice found no rank with room.
    """
    cost = HEURISTIC_COSTS[name]
    return balance_greedily(name, task, [cost(slice_) for slice_ in task.slices])


def _register(name: str) -> None:
    @register_sharder(name)
    def make() -> HeuristicSharder:
        return HeuristicSharder(name)


for _name in HEURISTIC_COSTS:
    _register(_name)
