"""Train a placement policy: `python -m experiments.train_agent`.

The third stage of the flow: a cost model scores the placement environment, PPO learns in it,
and the best policy by validation is exported. Writes `metrics.jsonl`, `learning_curve.png`,
the checkpoint and `policy/`. Started again with the same `out`, it goes on where it was.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agents.config import AgentConfig
from agents.export import export_policy
from agents.metrics import METRICS_FILE
from agents.training import TrainingResult, train_agent
from autoshard.checks import check_integers
from autoshard.cost_models.exported import load_cost_model
from autoshard.errors import InputError
from autoshard.files import write_atomically
from autoshard.tasks import TaskDistribution
from envs.task_source import RandomTaskSource
from experiments.common import run_experiment
from experiments.metrics import MetricsLog
from experiments.pool import PoolConfig, Split, pool_tables
from experiments.progress import console, progress_bar

POLICY_FOLDER = "policy"
#: Validation tasks are drawn by this seed, whatever seeds the training.
VALIDATION_SEED = 7


@dataclass(frozen=True, kw_only=True)
class TrainAgentConfig:
    """On what, with which cost model, how."""

    pool: PoolConfig
    agent: AgentConfig
    cost_model: str
    """The folder of an exported cost model, the name of a shipped one, or `analytic`."""
    tasks: TaskDistribution
    num_tasks: int | None
    """Training tasks, prepared once; None draws a new one for every episode."""
    num_validation_tasks: int
    """Tasks of tables unseen in training, which choose the best policy."""

    def __post_init__(self) -> None:
        check_integers(self, num_validation_tasks=1)
        if max(self.tasks.world_sizes) > self.agent.max_ranks:
            raise InputError(
                "tasks have more ranks than the agent's environment",
                got=max(self.tasks.world_sizes),
                allowed=f"agent.max_ranks {self.agent.max_ranks}",
                remedy=f"agent.max_ranks={max(self.tasks.world_sizes)}",
            )


def run(config: TrainAgentConfig, out_dir: Path, metrics: MetricsLog) -> TrainingResult:
    """Train, or go on, and export.

    Raises:
        AutoshardError: see `train_agent` and `export_policy`.
    """
    cost_model = load_cost_model(config.cost_model)
    splits = pool_tables(config.pool)
    training = RandomTaskSource(
        splits[Split.TRAIN],
        cost_model,
        config.tasks,
        num_tasks=config.num_tasks,
        seed=config.agent.seed,
    )
    unseen = RandomTaskSource(
        splits[Split.VALIDATION],
        cost_model,
        config.tasks,
        num_tasks=config.num_validation_tasks,
        seed=VALIDATION_SEED,
    )
    with progress_bar("training the policy") as report:
        shown = "not validated yet"

        def on_progress(values: dict[str, Any]) -> None:
            nonlocal shown
            if "best_objective_ratio" in values:
                shown = f"best / cost_greedy {values['best_objective_ratio']:.4f}"
            report(values["update"], config.agent.num_updates, shown)
            metrics.mirror(values["update"], **_flat(values))

        result = train_agent(
            config.agent,
            training,
            cost_model,
            out_dir,
            on_progress,
            validation_tasks=[unseen.task(i) for i in range(config.num_validation_tasks)],
        )
    plot_learning_curve(out_dir / METRICS_FILE, out_dir / "learning_curve.png")
    folder = out_dir / POLICY_FOLDER
    facts = {
        "pool": config.pool.workload,
        "pool_seed": config.pool.seed,
        "num_tables": list(config.tasks.num_tables),
        "world_sizes": list(config.tasks.world_sizes),
        "batch_sizes": list(config.tasks.batch_sizes),
    }
    print_result(result, export_policy(result, config.agent, cost_model, folder, facts=facts))
    console.print(f"policy: {folder}")
    return result


def print_result(result: TrainingResult, fingerprint: str) -> None:
    """Say how good the policy is, and how good it was before."""
    best, untrained = result.best, result.untrained
    console.print(
        f"objective / cost_greedy on {best.num_compared} unseen tasks: "
        f"{best.objective_ratio:.4f} (untrained {untrained.objective_ratio:.4f}); "
        f"better on {best.share_better:.0%}, worst {best.worst_ratio:.4f}; "
        f"failed {best.num_failed}, rescued {best.num_rescued}; fingerprint {fingerprint}"
    )


def plot_learning_curve(metrics_path: Path, path: Path) -> None:
    """Draw objective / cost_greedy on the validation tasks over placements."""
    from matplotlib.figure import Figure

    lines = [json.loads(line) for line in metrics_path.read_text().splitlines()]
    points = [
        (line["num_placements"], line["validation"]["objective_ratio"])
        for line in lines
        if "validation" in line
    ]
    figure = Figure(figsize=(6, 3.5), layout="constrained")
    axes = figure.add_subplot()
    axes.plot(*zip(*points, strict=True), marker=".")
    axes.axhline(1.0, color="grey", linewidth=0.8, label="cost_greedy")
    axes.set_xlabel("placements")
    axes.set_ylabel("objective / cost_greedy\n(predicted, unseen tables)")
    axes.set_yscale("log")
    axes.legend()
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png", dpi=150))


def _flat(values: dict[str, Any]) -> dict[str, Any]:
    """Nested values by names such as `validation/objective_ratio`."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat.update({f"{key}/{inner}": v for inner, v in value.items()})
        else:
            flat[key] = value
    return flat


if __name__ == "__main__":
    run_experiment("train_agent", TrainAgentConfig, run)
