"""Greedy on the objective itself: each slice goes where the step is cheapest right then."""

from __future__ import annotations

import numpy as np

from autoshard.placement import PlacementState, PlacementTask, prepare_task
from autoshard.problem import ShardingProblem
from autoshard.protocols import Assignment, CostModel, SearchBudget
from autoshard.sharders.dead_end import dead_end_error
from autoshard.sharders.registry import register_sharder


def place_by_cost(task: PlacementTask, cost_model: CostModel) -> tuple[int, ...]:
    """Place slices in descending predicted cost, each on the legal rank with the least objective.

    Many ranks often give the same objective (the slowest rank is elsewhere): among those, the
    rank that is itself cheapest afterwards, then the first.

    Raises:
        InfeasibleError: a slice found no rank with room.
    """
    state = PlacementState([task], cost_model)
    active = np.ones(1, dtype=bool)
    for index in range(task.num_slices):
        legal_R = state.legal_NR()[0]
        if not legal_R.any():
            raise dead_end_error("cost_greedy", task, index, state.ranks[0])
        candidates = state.candidates()
        objective_R = np.where(legal_R, candidates.objective_ms_NR[0], np.inf)
        # Equal up to rounding counts as equal.
        tied_R = objective_R <= objective_R.min() * (1 + 1e-9)
        own_R = np.where(tied_R, candidates.compute_ms_NRP[0].sum(axis=1), np.inf)
        state.place(np.array([int(np.argmin(own_R))]), active, candidates)
    return tuple(state.ranks[0])


@register_sharder("cost_greedy")
class CostGreedySharder:
    """The cost model's objective, minimised one table at a time."""

    name = "cost_greedy"

    def assign(
        self, problem: ShardingProblem, cost_model: CostModel, *, seed: int, budget: SearchBudget
    ) -> Assignment:
        """See `autoshard.protocols.Sharder`."""
        task = prepare_task(problem, cost_model)
        ranks = place_by_cost(task, cost_model)
        return task.assignment(ranks, num_evaluations=task.num_slices * task.world_size)
