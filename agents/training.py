"""Training a placement policy with `MaskablePPO` on the batched environment.

A run is a sequence of segments of `updates_per_segment` updates. Each segment starts fresh
episodes and all random numbers come from the seed and the segment's or update's number, so a
run that was killed and resumed from the checkpoint at a segment's end is the same run.
"""

from __future__ import annotations

import contextlib
import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.callbacks import BaseCallback
from stable_baselines3.common.logger import Logger

from agents.checkpoints import (
    CHECKPOINT_FILE,
    Checkpoint,
    load_checkpoint,
    load_optimizer,
    save_checkpoint,
)
from agents.networks import PlacementPolicy, PolicyNetwork
from agents.validation import Validation, ValidationResult
from autoshard.errors import InputError, quoted
from autoshard.files import make_folder, write_text
from autoshard.placement import PlacementTask
from autoshard.protocols import CostModel
from envs.batched_env import BatchedPlacementEnv
from envs.episodes import EnvConfig, RewardKind
from envs.task_source import TaskSource

METRICS_FILE = "metrics.jsonl"


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
            value = getattr(self, field.name)
            if field.type == "int":
                low = 0 if field.name in ("seed", "num_updates") else 1
                if isinstance(value, bool) or not isinstance(value, int) or value < low:
                    raise InputError(
                        f"{field.name} is not usable",
                        got=quoted(value),
                        allowed=f"integers >= {low}",
                    )
            elif field.type == "float" and (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not math.isfinite(value)
                or value < 0
            ):
                raise InputError(
                    f"{field.name} is not usable", got=quoted(value), allowed="a finite number >= 0"
                )
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


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """What a run left."""

    network: PolicyNetwork
    """The best by validation."""
    untrained: ValidationResult
    """The network before training."""
    best: ValidationResult
    num_updates: int
    """Updates made when the best was found."""
    num_placements: int
    """Placements of the whole run."""
    seconds: float
    """Training time over all resumed parts, without validation."""


def train_agent(
    config: AgentConfig,
    tasks: TaskSource,
    cost_model: CostModel,
    out_dir: str | Path,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    *,
    validation_tasks: Sequence[PlacementTask],
) -> TrainingResult:
    """Train a policy, or go on with a run that was cut off.

    Args:
        config: how.
        tasks: where training episodes come from, prepared with `cost_model`.
        cost_model: gives the reward.
        out_dir: gets `agent.json`, `metrics.jsonl` (one line per update) and the checkpoint;
            if it has a checkpoint of this very config and cost model, the run goes on there.
        on_progress: called with each metrics line.
        validation_tasks: fixed tasks, unseen in training, that choose the best policy.

    Returns:
        The best policy by validation, and how it did.

    Raises:
        InputError: `out_dir` holds a run of another config or cost model.
        ArtifactError: its checkpoint is damaged.
    """
    out_dir = make_folder(out_dir)
    identity = {"config": config.to_json(), "cost_model": cost_model.fingerprint}
    found = _find_checkpoint(out_dir, identity)
    write_text(out_dir / "agent.json", json.dumps(identity, indent=2) + "\n")
    with _own_random_state(config.num_threads):
        run = _Run(config, tasks, cost_model, out_dir, Validation(validation_tasks, cost_model))
        run.begin(identity, found)
        while run.update < config.num_updates:
            run.segment(on_progress)
        return run.result()


def _find_checkpoint(out_dir: Path, identity: dict[str, Any]) -> Checkpoint | None:
    path = out_dir / CHECKPOINT_FILE
    if not path.exists():
        return None
    checkpoint = load_checkpoint(path)
    theirs = checkpoint.facts["identity"]
    if theirs != identity:
        ours = identity["config"]
        changed = [key for key in ours if theirs["config"].get(key) != ours[key]]
        raise InputError(
            f"{out_dir} holds a run of another configuration",
            got=f"different: {', '.join(changed) or 'cost model'}",
            remedy="train in a new folder, or delete this one",
        )
    return checkpoint


@contextlib.contextmanager
def _own_random_state(num_threads: int) -> Iterator[None]:
    """Leave the caller's global random state and thread count as they were."""
    numpy_state, threads = np.random.get_state(), torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with torch.random.fork_rng(devices=[]):
            yield
    finally:
        np.random.set_state(numpy_state)
        torch.set_num_threads(threads)


class _Run:
    """The state of one run."""

    def __init__(
        self,
        config: AgentConfig,
        tasks: TaskSource,
        cost_model: CostModel,
        out_dir: Path,
        validation: Validation,
    ) -> None:
        self.config, self.validation, self.out_dir = config, validation, out_dir
        self.env = BatchedPlacementEnv(tasks, cost_model, config.num_envs, config.env)
        self.counter = _EpisodeCounter()
        self.model = MaskablePPO(
            PlacementPolicy,
            self.env,
            learning_rate=self._learning_rate,
            n_steps=config.steps_per_update,
            batch_size=min(config.batch_size, config.num_envs * config.steps_per_update),
            n_epochs=config.num_epochs,
            gamma=1.0,
            gae_lambda=config.gae_lambda,
            clip_range=config.clip_range,
            vf_coef=config.value_weight,
            max_grad_norm=config.max_grad_norm,
            policy_kwargs={
                "hidden_size": config.hidden_size,
                # A plan costs about what the greedy's does: a return of about −reward_scale.
                "first_value": -config.reward_scale,
            },
            seed=config.seed,
            device="cpu",
        )
        self.model.set_logger(Logger(folder=None, output_formats=[]))
        self.counter.init_callback(self.model)
        # What `learn()` would set up; this module has its own loop.
        self.model.ep_info_buffer, self.model.ep_success_buffer = deque(maxlen=1), deque(maxlen=1)
        self.update = 0
        self.seconds = 0.0
        self.identity: dict[str, Any] = {}
        self.untrained: ValidationResult
        self.best: ValidationResult
        self.best_update = 0
        self.best_weights: dict[str, torch.Tensor] = {}

    @property
    def network(self) -> PolicyNetwork:
        policy = self.model.policy
        assert isinstance(policy, PlacementPolicy)
        return policy.policy_network

    def _learning_rate(self, remaining: float) -> float:
        config = self.config
        return config.final_learning_rate + remaining * (
            config.learning_rate - config.final_learning_rate
        )

    def begin(self, identity: dict[str, Any], found: Checkpoint | None) -> None:
        """Start afresh, or from a checkpoint."""
        self.identity = identity
        if found is None:
            self.untrained = self.validation.evaluate(self.network)
            self._keep(self.untrained)
            (self.out_dir / METRICS_FILE).unlink(missing_ok=True)
            first = {"update": 0, "num_placements": 0, "validation": self.untrained.to_json()}
            self._write_metrics(first)
            return
        facts = found.facts
        self.model.policy.load_state_dict(dict(found.policy))
        load_optimizer(self.model.policy.optimizer, found.optimizer)
        self.update, self.seconds = facts["update"], facts["seconds"]
        self.untrained = ValidationResult(**facts["untrained"])
        self.best = ValidationResult(**facts["best"])
        self.best_update, self.best_weights = facts["best_update"], dict(found.best)
        self._cut_metrics()

    def segment(self, on_progress: Callable[[dict[str, Any]], None] | None) -> None:
        """Fresh episodes, some updates, a validation and a checkpoint."""
        config, model = self.config, self.model
        seeds = np.random.SeedSequence([config.seed, self.update])
        self.env.seed(int(seeds.generate_state(1)[0]))
        model._last_obs = self.env.reset()  # type: ignore[assignment]
        model._last_episode_starts = np.ones(config.num_envs, dtype=bool)
        last = min(self.update + config.updates_per_segment, config.num_updates)
        while self.update < last:
            started_s = time.perf_counter()
            metrics = self._one_update()
            self.seconds += time.perf_counter() - started_s
            metrics["seconds"] = round(self.seconds, 3)
            if self.update == last:
                result = self.validation.evaluate(self.network)
                if result.score < self.best.score:
                    self._keep(result)
                metrics["validation"] = result.to_json()
                metrics["best_objective_ratio"] = self.best.objective_ratio
            self._write_metrics(metrics)
            if on_progress is not None:
                on_progress(metrics)
        self._save()

    def _one_update(self) -> dict[str, Any]:
        config, model = self.config, self.model
        word = int(np.random.SeedSequence([config.seed, self.update, 1]).generate_state(1)[0])
        torch.manual_seed(word)
        np.random.seed(word)  # Stable-Baselines3 shuffles with numpy's global generator.
        remaining = 1.0 - self.update / config.num_updates
        model._current_progress_remaining = remaining
        model.ent_coef = config.entropy_bonus * remaining
        self.counter.clear()
        model.collect_rollouts(
            self.env, self.counter, model.rollout_buffer, config.steps_per_update
        )
        model.train()
        self.update += 1
        logged = model.logger.name_to_value
        return {
            "update": self.update,
            "num_placements": self._num_placements,
            **self.counter.to_json(),
            "learning_rate": self._learning_rate(remaining),
            "entropy": -float(logged["train/entropy_loss"]),
            "value_loss": float(logged["train/value_loss"]),
            "explained_variance": float(logged["train/explained_variance"]),
            "approx_kl": float(logged["train/approx_kl"]),
        }

    @property
    def _num_placements(self) -> int:
        return self.update * self.config.num_envs * self.config.steps_per_update

    def _keep(self, result: ValidationResult) -> None:
        self.best, self.best_update = result, self.update
        self.best_weights = {k: v.detach().clone() for k, v in self.network.state_dict().items()}

    def _save(self) -> None:
        save_checkpoint(
            self.out_dir / CHECKPOINT_FILE,
            policy=self.model.policy,
            optimizer=self.model.policy.optimizer,
            best=self.best_weights,
            facts={
                "identity": self.identity,
                "update": self.update,
                "seconds": self.seconds,
                "untrained": self.untrained.to_json(),
                "best": self.best.to_json(),
                "best_update": self.best_update,
            },
        )

    def _write_metrics(self, metrics: dict[str, Any]) -> None:
        # Diagnostics of a degenerate update may be NaN, which JSON does not have.
        plain = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in metrics.items()
        }
        with (self.out_dir / METRICS_FILE).open("a", encoding="utf-8") as stream:
            stream.write(json.dumps(plain) + "\n")

    def _cut_metrics(self) -> None:
        """Drop lines after the checkpoint: those updates are made again."""
        path = self.out_dir / METRICS_FILE
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        kept = []
        for line in lines:
            try:
                if json.loads(line)["update"] <= self.update:
                    kept.append(line)
            except (ValueError, KeyError):
                continue  # cut off in the middle of a line
        write_text(path, "".join(line + "\n" for line in kept))

    def result(self) -> TrainingResult:
        network = PolicyNetwork(self.config.hidden_size)
        network.load_state_dict(self.best_weights)
        return TrainingResult(
            network=network.eval(),
            untrained=self.untrained,
            best=self.best,
            num_updates=self.best_update,
            num_placements=self._num_placements,
            seconds=self.seconds,
        )


class _EpisodeCounter(BaseCallback):
    """Counts how episodes end."""

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        self.costs: list[float] = []
        self.invalid_actions = 0
        self.infeasible = 0

    def _on_step(self) -> bool:
        infos, dones = self.locals["infos"], self.locals["dones"]
        for index in np.flatnonzero(dones):
            info = infos[index]
            self.invalid_actions += info["illegal_action"]
            self.infeasible += info["infeasible"]
            if "objective_ms" in info:
                self.costs.append(info["objective_ms"] / info["reference_ms"])
        return True

    def to_json(self) -> dict[str, Any]:
        """Counts, and the mean cost of complete episodes relative to the greedy's."""
        return {
            "num_complete": len(self.costs),
            "num_infeasible": self.infeasible,
            "invalid_actions": self.invalid_actions,
            "mean_cost": float(np.mean(self.costs)) if self.costs else None,
        }
