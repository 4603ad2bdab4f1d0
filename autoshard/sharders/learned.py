"""The sharder `ppo`: rollouts of a trained policy, one slice after the other.

Shapes: N=rollouts side by side, R=ranks.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InfeasibleError, InputError
from autoshard.observation import observe
from autoshard.placement import PlacementState, PlacementTask, prepare_task
from autoshard.policies import Policy, Scorer, load_policy
from autoshard.problem import ShardingProblem
from autoshard.protocols import Assignment, CostModel, SearchBudget
from autoshard.sharders.dead_end import dead_end_error
from autoshard.sharders.registry import register_sharder


@dataclass(frozen=True, kw_only=True)
class Rollout:
    """One pass of a policy over a task's slices."""

    ranks: tuple[int, ...]
    """A rank for each slice that was placed, in placement order."""
    objective_ms: float | None
    """None if a slice found no rank."""

    @property
    def is_complete(self) -> bool:
        """Whether every slice was placed."""
        return self.objective_ms is not None


def roll_out(
    tasks: Sequence[PlacementTask],
    cost_model: CostModel,
    policy: Scorer,
    *,
    sampled_N: NDArray[np.bool_] | None = None,
    seed: int = 0,
    deadline_s: float | None = None,
) -> list[Rollout]:
    """Let a policy place N tasks in lockstep.

    Args:
        tasks: N tasks prepared with `cost_model`; the same one may stand there often.
        cost_model: costs every step.
        policy: scores the ranks.
        sampled_N: which rollouts draw from the policy's distribution instead of taking its
            best rank, bool [N]; none by default.
        seed: decides the draws.
        deadline_s: on the clock of `time.monotonic`; whatever is not complete by then stays so.

    Returns:
        A rollout for each task.
    """
    num = len(tasks)
    sampled_N = np.zeros(num, dtype=bool) if sampled_N is None else sampled_N
    generator = np.random.default_rng(seed)
    state = PlacementState(tasks, cost_model)
    rows = np.arange(num)
    objective_N = state.objective_ms_N()
    while deadline_s is None or time.monotonic() < deadline_s:
        candidates = state.candidates()
        observation = observe(state, candidates)
        active_N: NDArray[np.bool_] = np.any(observation.legal_NR, axis=1)
        if not active_N.any():
            break
        logits_NR = policy.logits_NR(observation).astype(np.float64)
        if sampled_N.any():
            # The largest of logits plus Gumbel noise is a draw from their softmax.
            noise_NR = generator.gumbel(size=logits_NR.shape)
            logits_NR = logits_NR + noise_NR * sampled_N[:, None]
        rank_N = np.argmax(np.where(observation.legal_NR, logits_NR, -np.inf), axis=1)
        chosen_ms_N = candidates.objective_ms_NR[rows, rank_N]
        objective_N = np.where(active_N, chosen_ms_N, objective_N)
        state.place(rank_N, active_N, candidates)
    return [
        Rollout(ranks=tuple(ranks), objective_ms=float(objective) if done else None)
        for ranks, objective, done in zip(state.ranks, objective_N, state.done_N, strict=True)
    ]


def rollouts(
    task: PlacementTask,
    cost_model: CostModel,
    policy: Scorer,
    num: int,
    seed: int,
    *,
    deadline_s: float | None = None,
) -> list[Rollout]:
    """Place one task several times: first by the policy's best ranks, then by draws.

    Args:
        task: prepared with `cost_model`.
        cost_model: costs every step.
        policy: scores the ranks.
        num: rollouts, >= 1.
        seed: decides the draws; equal seeds give equal rollouts.
        deadline_s: as in `roll_out`.

    Returns:
        The complete ones, best first.

    Raises:
        InfeasibleError: every rollout ran into a dead end; says where the first one did.
    """
    if num < 1:
        raise InputError("the number of rollouts is not usable", got=num, allowed="integers >= 1")
    all_of_them = roll_out(
        [task] * num,
        cost_model,
        policy,
        sampled_N=np.arange(num) > 0,
        seed=seed,
        deadline_s=deadline_s,
    )
    complete = [rollout for rollout in all_of_them if rollout.objective_ms is not None]
    if not complete:
        first = all_of_them[0].ranks
        raise dead_end_error("ppo", task, len(first), first)
    return sorted(complete, key=lambda rollout: rollout.objective_ms or 0.0)


@register_sharder("ppo")
class PolicySharder:
    """A trained policy, by its best ranks or the best of several rollouts."""

    name = "ppo"

    def __init__(self, policy: Policy | str = "default", num_rollouts: int = 1) -> None:
        """Choose the policy.

        Args:
            policy: a loaded policy, or the name or path of one.
            num_rollouts: 1 is the policy's best ranks alone; each further rollout is drawn.
        """
        self._policy = load_policy(policy) if isinstance(policy, str) else policy
        self._num_rollouts = num_rollouts

    def assign(
        self, problem: ShardingProblem, cost_model: CostModel, *, seed: int, budget: SearchBudget
    ) -> Assignment:
        """See `autoshard.protocols.Sharder`."""
        limit_s = budget.time_limit_s
        deadline_s = None if limit_s is None else time.monotonic() + limit_s
        task = prepare_task(problem, cost_model)
        per_rollout = max(task.num_slices * task.world_size, 1)
        affordable = max(budget.num_evaluations // per_rollout, 1)
        wanted = min(self._num_rollouts, affordable)
        found: list[Rollout] = []
        cut_short = False
        if wanted > 1:
            with contextlib.suppress(InfeasibleError):
                found = rollouts(
                    task, cost_model, self._policy, wanted, seed, deadline_s=deadline_s
                )
            cut_short = deadline_s is not None and time.monotonic() >= deadline_s
        if not found:
            # One rollout is finished whatever the budget: without it there is no answer.
            found = rollouts(task, cost_model, self._policy, 1, seed)
        return task.assignment(
            found[0].ranks, num_evaluations=wanted * per_rollout, cut_short=cut_short
        )
