"""Placement episodes in lockstep: rewards, endings and their infos, for one task or many.

`PlacementEnv` (Gymnasium) is this with one episode, `BatchedPlacementEnv` (Stable-Baselines3)
with N; the rules of an episode stand only here.

Shapes: N=episodes, R=max_ranks, K=rank features, G=global features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from gymnasium import spaces
from numpy.typing import NDArray

from autoshard.checks import is_finite_number
from autoshard.errors import InfeasibleError, InputError, quoted
from autoshard.observation import (
    FEATURE_LIMIT,
    NUM_GLOBAL_FEATURES,
    NUM_RANK_FEATURES,
    Observation,
    observe,
    reference_ms,
)
from autoshard.placement import Candidates, PlacementState, PlacementTask
from autoshard.placement_costs import placement_objective_ms
from autoshard.protocols import CostModel
from autoshard.sharders.cost_greedy import place_by_cost
from autoshard.sharders.packing import pack_by_memory

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]

#: More ranks than this make the padded observation unwieldy.
MAX_MAX_RANKS = 65_536


class RewardKind(Enum):
    """When the reward is paid; the sum over an episode is the same."""

    TERMINAL = "terminal"
    """All at the last step."""
    INCREMENTAL = "incremental"
    """At each step, what the step added to the objective."""


@dataclass(frozen=True, kw_only=True)
class EnvConfig:
    """The sizes and the reward of a placement environment."""

    max_ranks: int = 8
    """Actions, and ranks in an observation; tasks with fewer ranks are padded."""
    max_tables: int = 2048
    """The most tables that a task may have."""
    reward: RewardKind = RewardKind.TERMINAL
    failure_penalty: float = 10.0
    """The return of an episode that ends without a plan is −failure_penalty × reward_scale.

    The cost of a plan is cut off there too, so that no plan is worth less than none.
    """
    reward_scale: float = 1.0
    """Multiplies every reward."""

    def __post_init__(self) -> None:
        for name, high in (("max_ranks", MAX_MAX_RANKS), ("max_tables", 2**31)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= high:
                raise InputError(
                    f"{name} is not usable", got=quoted(value), allowed=f"integers in 1..{high}"
                )
        if not isinstance(self.reward, RewardKind):
            raise InputError(
                "reward is not known",
                got=quoted(self.reward),
                allowed=", ".join(f"RewardKind.{kind.name}" for kind in RewardKind),
            )
        for name in ("failure_penalty", "reward_scale"):
            value = getattr(self, name)
            if not is_finite_number(value) or value <= 0:
                raise InputError(
                    f"{name} is not usable", got=quoted(value), allowed="a finite number > 0"
                )


def observation_space(config: EnvConfig) -> spaces.Dict:
    """The space of one observation.

    `ranks` is float32 [R · K], row by row (`.reshape(max_ranks, NUM_RANK_FEATURES)` gives the
    matrix; Stable-Baselines3 accepts flat boxes only), `globals` float32 [G], `action_mask`
    int8 [R].
    """
    limit = FEATURE_LIMIT
    ranks = config.max_ranks
    return spaces.Dict(
        {
            "ranks": spaces.Box(-limit, limit, (ranks * NUM_RANK_FEATURES,), np.float32),
            "globals": spaces.Box(-limit, limit, (NUM_GLOBAL_FEATURES,), np.float32),
            "action_mask": spaces.MultiBinary(ranks),
        }
    )


def action_space(config: EnvConfig) -> spaces.Discrete:
    """The rank that the current slice goes to."""
    return spaces.Discrete(config.max_ranks)


@dataclass(frozen=True, kw_only=True, eq=False)
class StepResult:
    """What one step of N episodes brought."""

    reward_N: FloatArray
    ended_N: BoolArray
    infos: list[dict[str, Any]]
    """Empty while an episode goes on; see `Episodes.step`."""


class Episodes:
    """N placement episodes in lockstep. Start every ended one before the next step."""

    def __init__(
        self, tasks: Sequence[PlacementTask], cost_model: CostModel, config: EnvConfig
    ) -> None:
        """Start one episode for each task.

        Args:
            tasks: prepared with `cost_model`.
            cost_model: costs every step.
            config: sizes and reward.

        Raises:
            InputError: a task exceeds the sizes or has nothing to place.
        """
        self._config, self._cost_model = config, cost_model
        self._references: WeakKeyDictionary[PlacementTask, float] = WeakKeyDictionary()
        for task in tasks:
            self._check(task)
        self.state = PlacementState(tasks, cost_model, config.max_ranks)
        num = len(tasks)
        self.reference_ms_N: FloatArray = np.array([self._reference_ms(task) for task in tasks])
        self.ended_N: BoolArray = np.zeros(num, dtype=bool)
        #: What has been paid for so far: the cost relative to the reference, cut off.
        self._paid_N: FloatArray = np.zeros(num)
        self._candidates: Candidates
        self.observation: Observation
        self.observe()

    def start(self, index: int, task: PlacementTask) -> None:
        """Start an episode in place of the `index`-th one; `observe()` must follow.

        Raises:
            InputError: the task exceeds the sizes or has nothing to place.
        """
        self._check(task)
        self.state.reset(index, task)
        self.reference_ms_N[index] = self._reference_ms(task)
        self._paid_N[index] = 0.0
        self.ended_N[index] = False

    def observe(self) -> None:
        """Cost the next step and describe it; an ended episode is described by zeros."""
        self._candidates = self.state.candidates()
        seen = observe(self.state, self._candidates)
        if self.ended_N.any():
            seen.ranks_NRK[self.ended_N] = 0.0
            seen.globals_NG[self.ended_N] = 0.0
            seen.legal_NR[self.ended_N] = False
        self.observation = seen

    def step(self, action_N: NDArray[np.int64]) -> StepResult:
        """Place each episode's current slice; `observe()` must follow.

        Args:
            action_N: a rank for each episode, int64 [N].

        Returns:
            Rewards, endings and infos. The info of an ended episode says
            `illegal_action` (the rank has no room, holds another slice of the table or does
            not exist), `infeasible` (the next slice, or already the first, fits nowhere) and
            `reference_ms`; where a plan was completed also `objective_ms` and `assignment`.
        """
        state, config = self.state, self._config
        num = len(state)
        rows = np.arange(num)
        in_range_N = (action_N >= 0) & (action_N < config.max_ranks)
        rank_N = np.where(in_range_N, action_N, 0)
        legal_NR = self.observation.legal_NR
        stuck_N = ~legal_NR.any(axis=1)
        placed_N = legal_NR[rows, rank_N] & in_range_N
        objective_N = self._candidates.objective_ms_NR[rows, rank_N]
        state.place(rank_N, placed_N, self._candidates)
        complete_N = placed_N & state.done_N
        infeasible_N = stuck_N | (placed_N & ~complete_N & ~state.legal_NR().any(axis=1))
        illegal_N = ~placed_N & ~stuck_N
        failed_N = infeasible_N | illegal_N
        cost_N = np.where(
            failed_N,
            config.failure_penalty,
            np.minimum(
                np.where(placed_N, objective_N, 0.0) / self.reference_ms_N, config.failure_penalty
            ),
        )
        self.ended_N = complete_N | failed_N
        if config.reward is RewardKind.INCREMENTAL:
            reward_N = self._paid_N - cost_N
            self._paid_N = cost_N
        else:
            reward_N = np.where(self.ended_N, -cost_N, 0.0)
        infos: list[dict[str, Any]] = [{} for _ in range(num)]
        for index in np.flatnonzero(self.ended_N):
            info = infos[index]
            info["illegal_action"] = bool(illegal_N[index])
            info["infeasible"] = bool(infeasible_N[index])
            info["reference_ms"] = float(self.reference_ms_N[index])
            if complete_N[index]:
                info["objective_ms"] = float(objective_N[index])
                info["assignment"] = state.tasks[index].assignment(state.ranks[index])
        return StepResult(
            reward_N=reward_N * config.reward_scale, ended_N=self.ended_N.copy(), infos=infos
        )

    def _check(self, task: PlacementTask) -> None:
        if not isinstance(task, PlacementTask):
            raise InputError(
                "a task is not a PlacementTask",
                got=type(task).__name__,
                remedy="make one with autoshard.placement.prepare_task",
            )
        if task.num_slices == 0:
            raise InputError(
                "a task has nothing to place",
                got=f"{len(task.replicas)} replica(s) and no other slice",
                remedy="give the task source tables that are not all data_parallel",
            )
        if task.world_size > self._config.max_ranks:
            raise InputError(
                "a task has more ranks than the environment",
                got=task.world_size,
                allowed=f"max_ranks {self._config.max_ranks}",
                remedy="raise max_ranks",
            )
        if len(task.problem.tables) > self._config.max_tables:
            raise InputError(
                "a task has more tables than the environment",
                got=len(task.problem.tables),
                allowed=f"max_tables {self._config.max_tables}",
                remedy="raise max_tables",
            )

    def _reference_ms(self, task: PlacementTask) -> float:
        """What costs are divided by: the objective of the cost-aware greedy.

        Unlike a lower bound it is near what plans cost whatever the cost model, so rewards
        are of one size. Where the greedy finds no room: of packing by memory, or the even
        share of the compute if that fails too.
        """
        if task not in self._references:
            self._references[task] = self._yardstick_ms(task)
        return self._references[task]

    def _yardstick_ms(self, task: PlacementTask) -> float:
        ranks: tuple[int, ...] | None
        try:
            ranks = place_by_cost(task, self._cost_model)
        except InfeasibleError:
            ranks = pack_by_memory(task, seed=0)
        if ranks is None:
            return reference_ms(task)
        return max(placement_objective_ms(task, self._cost_model, ranks), reference_ms(task) * 1e-6)
