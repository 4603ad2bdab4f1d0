"""Compare all sharders on held-out problems: `python -m experiments.evaluate`.

Tables come from the test split of the pool: no measurement and no training task had them.
Problems are drawn by seed and none is dropped. Writes `evaluation.parquet` (predicted, one
row per problem, sharder and training seed) and, for the problems that this machine can run,
`validation.parquet` (predicted beside measured). A killed run goes on where it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import pandas as pd
from rich.console import Console

from autoshard.cost_models.exported import load_cost_model
from autoshard.errors import InfeasibleError
from autoshard.plan import ShardingPlan
from autoshard.planning import POLICY_SHARDERS, make_plan
from autoshard.policies import Policy, load_policy
from autoshard.protocols import CostModel, SearchBudget
from autoshard.sharders.registry import sharder_names
from experiments.common import run_experiment
from experiments.evaluation_summary import summary_table
from experiments.heldout import HeldOutTask, Setting, held_out_tasks
from experiments.metrics import MetricsLog
from experiments.pool import PoolConfig, Split, pool_tables
from experiments.progress import progress_bar
from experiments.rows import RowFile
from experiments.validation import NamedPlan, ValidationConfig, validate_plans, validation_summary


@dataclass(frozen=True, kw_only=True)
class MeasuredConfig:
    """Which plans are run to compare prediction with reality."""

    num_tasks: int
    """Of the settings with `world_size` ranks, so many problems; 0 measures nothing."""
    world_size: int
    sharders: tuple[str, ...]
    """Good and deliberately bad ones."""


@dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """What to compare, and on what."""

    pool: PoolConfig
    settings: tuple[Setting, ...]
    seed: int
    """Decides the problems; training never uses it."""
    cost_model: str
    policies: tuple[str, ...]
    """A policy for each training seed, which it knows."""
    untrained_policies: tuple[str, ...]
    """The same before training; may be empty."""
    sharders: tuple[str, ...]
    """Names; empty for all."""
    max_evaluations: int
    time_limit_s: float | None
    measured: MeasuredConfig
    validation: ValidationConfig


@dataclass(frozen=True, kw_only=True)
class _Contender:
    """One column of the comparison: a sharder, with one policy if it uses any."""

    label: str
    sharder: str
    training_seed: int
    policy: Policy | None


def contenders(config: EvaluateConfig) -> list[_Contender]:
    """Every sharder; those with a policy once for each training seed."""
    trained = [load_policy(path) for path in config.policies]
    untrained = [load_policy(path) for path in config.untrained_policies]
    found: list[_Contender] = []

    def add(label: str, sharder: str, policies: Sequence[Policy]) -> None:
        for policy in policies:
            seed = int(policy.config["training"]["agent"]["seed"])
            found.append(
                _Contender(label=label, sharder=sharder, training_seed=seed, policy=policy)
            )

    for name in config.sharders or sharder_names():
        if name in POLICY_SHARDERS:
            add(name, name, trained)
        else:
            found.append(_Contender(label=name, sharder=name, training_seed=-1, policy=None))
    add("ppo_untrained", "ppo", untrained)
    return found


def run(config: EvaluateConfig, out_dir: Path, metrics: MetricsLog) -> None:
    """Plan everything, summarise, then run some of the plans.

    Raises:
        AutoshardError: an artifact or option is not usable, or a rank failed.
    """
    cost_model = load_cost_model(config.cost_model)
    columns = contenders(config)
    tables = pool_tables(config.pool)[Split.TEST]
    tasks = list(held_out_tasks(tables, config.settings, config.seed))
    identity = {
        "pool": asdict(config.pool),
        "settings": [asdict(setting) for setting in config.settings],
        "seed": config.seed,
        "cost_model": cost_model.fingerprint,
        "max_evaluations": config.max_evaluations,
        "time_limit_s": config.time_limit_s,
    }
    rows = RowFile(out_dir / "evaluation.jsonl", identity)
    with progress_bar("evaluating") as report:
        for done, task in enumerate(tasks):
            report(done, len(tasks), task.name)
            for column in columns:
                policy_mark = "" if column.policy is None else column.policy.fingerprint
                key = f"{task.name}/{column.label}/{column.training_seed}/{policy_mark}"
                if key not in rows:
                    rows.add(key, _row(config, task, column, cost_model))
        report(len(tasks), len(tasks), "done")
    frame = with_best_known(rows.frame())
    frame.to_parquet(out_dir / "evaluation.parquet", index=False)
    console = Console()
    console.print(summary_table(frame))
    for index, (label, group) in enumerate(frame.groupby("sharder", sort=False)):
        metrics.log(
            index,
            sharder=str(label),
            mean_objective_ms=float(group["objective_ms"].mean()),
            num_infeasible=int(group["infeasible"].sum()),
        )
    plans = list(_plans_to_run(config, tasks, columns, cost_model))
    if plans:
        measured = validate_plans(plans, config.validation, out_dir)
        console.print(validation_summary(measured))
    console.print(f"rows: {out_dir}")


def _make(
    config: EvaluateConfig, task: HeldOutTask, column: _Contender, cost_model: CostModel
) -> ShardingPlan:
    return make_plan(
        task.problem,
        sharder=column.sharder,
        cost_model=cost_model,
        seed=config.seed,
        budget=SearchBudget(
            num_evaluations=config.max_evaluations, time_limit_s=config.time_limit_s
        ),
        policy=column.policy if column.policy is not None else "default",
    )


def _row(
    config: EvaluateConfig, task: HeldOutTask, column: _Contender, cost_model: CostModel
) -> dict[str, object]:
    started = time.perf_counter()
    try:
        cost = _make(config, task, column, cost_model).cost
    except InfeasibleError:
        cost = None
    return {
        "task": task.name,
        "setting": task.setting.name,
        "num_tables": task.setting.num_tables,
        "world_size": task.setting.world_size,
        "sharder": column.label,
        "training_seed": column.training_seed,
        "objective_ms": None if cost is None else cost.step.step_ms,
        "infeasible": cost is None,
        "lower_bound_ms": None if cost is None else cost.lower_bound_ms,
        "planning_time_s": time.perf_counter() - started,
        "extrapolated": None if cost is None else cost.step.extrapolated,
        "source": cost_model.source.value,
    }


def with_best_known(frame: pd.DataFrame) -> pd.DataFrame:
    """Add each problem's best objective over all sharders and training seeds."""
    frame = frame.copy()
    frame["objective_ms"] = frame["objective_ms"].astype(float)
    frame["best_known_ms"] = frame.groupby("task")["objective_ms"].transform("min")
    return frame


def _plans_to_run(
    config: EvaluateConfig,
    tasks: list[HeldOutTask],
    columns: list[_Contender],
    cost_model: CostModel,
) -> Iterator[NamedPlan]:
    wanted = config.measured
    fitting = [t for t in tasks if t.setting.world_size == wanted.world_size]
    firsts = {column.label: column for column in reversed(columns)}  # the first training seed
    for task in fitting[: wanted.num_tasks]:
        for label in wanted.sharders:
            if label not in firsts:
                continue
            try:
                plan = _make(config, task, firsts[label], cost_model)
            except InfeasibleError:
                continue
            assert plan.cost is not None
            yield NamedPlan(
                name=f"{task.name}/{label}", sharder=label, plan=plan, predicted=plan.cost.step
            )


if __name__ == "__main__":
    run_experiment("evaluate", EvaluateConfig, run)
