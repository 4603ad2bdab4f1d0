"""How a policy is trained: the options of PPO, of the environment and of the network."""

from __future__ import annotations

from dataclasses import asdict, dataclass, fields
from typing import Any

from autoshard.checks import check_integers, check_numbers
from autoshard.errors import InputError
from envs.episodes import EnvConfig, RewardKind


@dataclass(frozen=True, kw_only=True)
class AgentConfig:
    """How a policy is trained."""

    num_updates: int = 120
    """PPO updates; with 0 the untrained network is what results."""
    updates_per_segment: int = 5
    """Updates between two validations; a checkpoint follows each."""
    num_envs: int = 64
    """Episodes side by side."""
    steps_per_update: int = 128
    """Placements per episode and update."""
    batch_size: int = 2048
    """Placements per gradient step."""
    num_epochs: int = 4
    """Passes over an update's placements."""
    learning_rate: float = 7e-4
    """At the start; falls in proportion to what is left of the run."""
    final_learning_rate: float = 2e-5
    """At the end."""
    entropy_bonus: float = 0.001
    """At the start; falls to 0 in proportion to what is left of the run."""
    gae_lambda: float = 0.98
    """Of generalised advantage estimation; the discount is 1, since episodes are finite."""
    clip_range: float = 0.2
    """PPO's clipping of the probability ratio."""
    value_weight: float = 0.5
    """Weight of the value loss."""
    max_grad_norm: float = 0.5
    """Gradients are clipped to this norm."""
    hidden_size: int = 64
    """Width of every layer."""
    max_ranks: int = 8
    """The most ranks that a training task has; the policy then serves any number."""
    reward: RewardKind = RewardKind.INCREMENTAL
    """When the reward is paid."""
    failure_penalty: float = 2.5
    """Cost of ending without a plan, relative to the greedy's objective."""
    reward_scale: float = 20.0
    """Brings differences of a few percent to the size that a value network learns well."""
    num_threads: int = 1
    """Threads that torch may use."""
    seed: int = 0
    """Decides weights, tasks and actions."""

    def __post_init__(self) -> None:
        for field in fields(self):
            if field.type == "int":
                low = 0 if field.name in ("seed", "num_updates") else 1
                check_integers(self, **{field.name: low})
            elif field.type == "float":
                check_numbers(self, **{field.name: 0.0})
        if self.gae_lambda > 1:
            raise InputError("gae_lambda is not usable", got=self.gae_lambda, allowed="0..1")
        if self.num_envs * self.steps_per_update < 2:
            raise InputError(
                "an update needs at least two placements",
                got=f"num_envs {self.num_envs} × steps_per_update {self.steps_per_update}",
                remedy="raise either",
            )

    @property
    def env(self) -> EnvConfig:
        """The environment's configuration."""
        return EnvConfig(
            max_ranks=self.max_ranks,
            reward=self.reward,
            failure_penalty=self.failure_penalty,
            reward_scale=self.reward_scale,
        )

    def to_json(self) -> dict[str, Any]:
        """The configuration as a plain dictionary."""
        return {**asdict(self), "reward": self.reward.value}
