"""How good a policy is: its best-rank rollouts against the cost-aware greedy, on fixed tasks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from agents.networks import PolicyNetwork
from autoshard.errors import InfeasibleError, InputError
from autoshard.observation import Observation
from autoshard.placement import PlacementTask
from autoshard.placement_costs import placement_objective_ms
from autoshard.protocols import CostModel
from autoshard.sharders.cost_greedy import place_by_cost
from autoshard.sharders.learned import roll_out

#: What a task that only the greedy solves counts for in the score of a policy.
FAILURE_RATIO = 2.0


class NetworkScorer:
    """A network in training, seen as a `autoshard.policies.Scorer`."""

    def __init__(self, network: PolicyNetwork) -> None:
        self._network = network

    def logits_NR(self, observation: Observation) -> NDArray[np.float32]:
        """Logits, float32 [N, R]."""
        with torch.inference_mode():
            logits = self._network(
                torch.from_numpy(observation.ranks_NRK),
                torch.from_numpy(observation.globals_NG),
                torch.from_numpy(observation.legal_NR),
            )
        return logits.numpy()


@dataclass(frozen=True, kw_only=True)
class ValidationResult:
    """A policy beside the cost-aware greedy."""

    objective_ratio: float
    """Geometric mean of policy / greedy over the tasks that both solve; 1 if there are none."""
    worst_ratio: float
    """The largest such ratio; 1 if there are none."""
    share_better: float
    """Share of these tasks where the policy is better by more than rounding."""
    num_compared: int
    num_failed: int
    """Tasks that only the greedy solves."""
    num_rescued: int
    """Tasks that only the policy solves."""

    @property
    def score(self) -> float:
        """What the best policy is chosen by, lower is better: failures count as ratio 2."""
        counted = max(self.num_compared + self.num_failed + self.num_rescued, 1)
        total = self.num_compared * math.log(self.objective_ratio)
        total += (self.num_failed - self.num_rescued) * math.log(FAILURE_RATIO)
        return total / counted

    def to_json(self) -> dict[str, Any]:
        """The result as a plain dictionary."""
        return asdict(self)


class Validation:
    """Fixed tasks with the greedy's objectives, worked out once."""

    def __init__(self, tasks: Sequence[PlacementTask], cost_model: CostModel) -> None:
        """Run the greedy on every task.

        Raises:
            InputError: there are no tasks.
        """
        if not tasks:
            raise InputError("validation needs at least one task", got=0)
        self.tasks, self._cost_model = tuple(tasks), cost_model
        self.greedy_ms_N = np.array([self._greedy_ms(task) for task in self.tasks])

    def _greedy_ms(self, task: PlacementTask) -> float:
        """The greedy's objective; NaN where it runs into a dead end."""
        try:
            ranks = place_by_cost(task, self._cost_model)
        except InfeasibleError:
            return math.nan
        return placement_objective_ms(task, self._cost_model, ranks)

    def evaluate(self, network: PolicyNetwork) -> ValidationResult:
        """Roll the network's best ranks out on all tasks in lockstep."""
        rollouts = roll_out(self.tasks, self._cost_model, NetworkScorer(network))
        policy_ms_N = np.array(
            [math.nan if r.objective_ms is None else r.objective_ms for r in rollouts]
        )
        solved_N, greedy_solved_N = ~np.isnan(policy_ms_N), ~np.isnan(self.greedy_ms_N)
        both_N = solved_N & greedy_solved_N
        ratio = policy_ms_N[both_N] / self.greedy_ms_N[both_N]
        return ValidationResult(
            objective_ratio=float(np.exp(np.log(ratio).mean())) if len(ratio) else 1.0,
            worst_ratio=float(ratio.max(initial=0.0)) or 1.0,
            share_better=float((ratio < 1 - 1e-9).mean()) if len(ratio) else 0.0,
            num_compared=int(both_N.sum()),
            num_failed=int((greedy_solved_N & ~solved_N).sum()),
            num_rescued=int((solved_N & ~greedy_solved_N).sum()),
        )
