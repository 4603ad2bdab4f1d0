"""The sharder `autoshard`: the best of every start, then local search on the cost model.

Starts are the learned policy's rollouts, the cost-aware greedy, the papers' heuristics and a
random placement; if none of them finds room, packing by memory. The result is never worse than
any start.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

from autoshard.costing import lower_bound_ms
from autoshard.errors import InfeasibleError
from autoshard.placement import PlacementTask, prepare_task
from autoshard.placement_costs import placement_objective_ms
from autoshard.policies import Policy, load_policy
from autoshard.problem import ShardingProblem
from autoshard.protocols import Assignment, CostModel, SearchBudget
from autoshard.sharders.cost_greedy import place_by_cost
from autoshard.sharders.heuristics import HEURISTIC_COSTS, place_by_heuristic, place_randomly
from autoshard.sharders.learned import rollouts
from autoshard.sharders.local_search import local_search
from autoshard.sharders.meter import Meter
from autoshard.sharders.packing import pack_by_memory
from autoshard.sharders.registry import register_sharder

NUM_ROLLOUTS = 4


@register_sharder("autoshard")
class AutoshardSharder:
    """Policy and greedy starts, then local search. See the module."""

    name = "autoshard"

    def __init__(self, policy: Policy | str | None = "default", num_rollouts: int = NUM_ROLLOUTS):
        """Choose the policy.

        Args:
            policy: a loaded policy, a name or path of one, or None to start without one.
            num_rollouts: the policy's argmax rollout and this many less one sampled ones.
        """
        self._policy = load_policy(policy) if isinstance(policy, str) else policy
        self._num_rollouts = num_rollouts

    def assign(
        self, problem: ShardingProblem, cost_model: CostModel, *, seed: int, budget: SearchBudget
    ) -> Assignment:
        """See `autoshard.protocols.Sharder`."""
        meter = Meter(budget)
        task = prepare_task(problem, cost_model)
        best = self._best_start(task, cost_model, seed, meter)
        bound_ms = lower_bound_ms(problem, task.slices + task.replicas, cost_model)
        best, _ = local_search(task, cost_model, best, meter=meter, seed=seed, target_ms=bound_ms)
        return task.assignment(
            best, num_evaluations=meter.num_evaluations, cut_short=meter.cut_short
        )

    def _best_start(
        self, task: PlacementTask, cost_model: CostModel, seed: int, meter: Meter
    ) -> tuple[int, ...]:
        best: tuple[int, ...] | None = None
        best_ms = float("inf")
        dead_end: InfeasibleError | None = None
        for start in self._starts(task, cost_model, seed, meter):
            # However short the time, one start is tried.
            if best is not None and not meter.may_go_on():
                break
            try:
                placements = start()
            except InfeasibleError as error:
                dead_end = dead_end or error
                continue
            for ranks in placements:
                objective_ms = placement_objective_ms(task, cost_model, ranks)
                meter.spend(1)
                if objective_ms < best_ms:
                    best, best_ms = ranks, objective_ms
        if best is None:
            best = pack_by_memory(task, seed)
            if best is None:
                assert dead_end is not None  # every start either places or says why not
                raise InfeasibleError(
                    f"no start and no packing by memory found room; first: {dead_end}"
                ) from dead_end
        return best

    def _starts(
        self, task: PlacementTask, cost_model: CostModel, seed: int, meter: Meter
    ) -> Iterator[Callable[[], list[tuple[int, ...]]]]:
        yield partial(_one, place_by_cost, task, cost_model)
        policy = self._policy
        if policy is not None:
            yield lambda: [
                tuple(rollout.ranks)
                for rollout in rollouts(
                    task,
                    cost_model,
                    policy,
                    self._num_rollouts,
                    seed,
                    deadline_s=meter.deadline_s,
                )
            ]
        for name in HEURISTIC_COSTS:
            yield partial(_one, place_by_heuristic, name, task)
        yield partial(_one, place_randomly, task, seed)


def _one(place: Callable[..., tuple[int, ...]], *arguments: object) -> list[tuple[int, ...]]:
    return [place(*arguments)]
