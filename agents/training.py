"""Training a placement policy with `MaskablePPO` on the batched environment.

A run is a sequence of segments of `updates_per_segment` updates. Each segment starts fresh
episodes and all random numbers come from the seed and the segment's or update's number, so a
run that was killed and resumed from the checkpoint at a segment's end is the same run.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sb3_contrib import MaskablePPO
from stable_baselines3.common.logger import Logger

from agents.checkpoints import (
    CHECKPOINT_FILE,
    Checkpoint,
    load_checkpoint,
    load_optimizer,
    save_checkpoint,
)
from agents.config import AgentConfig
from agents.metrics import METRICS_FILE, EpisodeCounter, append_metrics, cut_metrics
from agents.networks import PlacementPolicy, PolicyNetwork
from agents.validation import Validation, ValidationResult
from autoshard.errors import InputError
from autoshard.files import make_folder, write_text
from autoshard.placement import PlacementTask
from autoshard.protocols import CostModel
from envs.batched_env import BatchedPlacementEnv
from envs.task_source import TaskSource


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
        self.metrics_path = out_dir / METRICS_FILE
        self.env = BatchedPlacementEnv(tasks, cost_model, config.num_envs, config.env)
        self.counter = EpisodeCounter()
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
            self.metrics_path.unlink(missing_ok=True)
            first = {"update": 0, "num_placements": 0, "validation": self.untrained.to_json()}
            append_metrics(self.metrics_path, first)
            return
        facts = found.facts
        self.model.policy.load_state_dict(dict(found.policy))
        load_optimizer(self.model.policy.optimizer, found.optimizer)
        self.update, self.seconds = facts["update"], facts["seconds"]
        self.untrained = ValidationResult(**facts["untrained"])
        self.best = ValidationResult(**facts["best"])
        self.best_update, self.best_weights = facts["best_update"], dict(found.best)
        cut_metrics(self.metrics_path, self.update)

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
            append_metrics(self.metrics_path, metrics)
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
