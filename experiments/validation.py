"""Predicted against measured: many plans run in interleaved order, row by row."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd
from rich.table import Table as RichTable

from autoshard.files import write_atomically
from autoshard.objective import StepCost
from autoshard.plan import ShardingPlan
from autoshard.report.statistics import kendall_tau
from autoshard.runtime.launch import run_plans
from autoshard.runtime.results import PlanRun, RunOptions
from experiments.progress import progress_bar

#: The objective's terms as columns: compute terms are the slowest rank's.
TERMS = ("fwd_compute_ms", "bwd_compute_ms", "fwd_comms_ms", "bwd_comms_ms")


@dataclass(frozen=True, kw_only=True)
class ValidationConfig:
    """How plans are run."""

    passes: int = 3
    """How often each plan is run, far apart."""
    num_steps: int = 15
    """Timed steps per run."""
    warmup_steps: int = 3
    seed: int = 0
    timeout_s: float = 60.0
    """Limit of every collective."""


@dataclass(frozen=True, kw_only=True)
class NamedPlan:
    """A plan to run, and what is expected of it."""

    name: str
    sharder: str
    plan: ShardingPlan
    predicted: StepCost


def validate_plans(
    plans: Sequence[NamedPlan], config: ValidationConfig, out_dir: Path
) -> pd.DataFrame:
    """Run plans, interleaved among those of equal world size, and write `validation.parquet`.

    Raises:
        AutoshardError: a plan cannot be run, or a rank failed.
    """
    options = RunOptions(
        num_steps=config.num_steps,
        warmup_steps=config.warmup_steps,
        seed=config.seed,
        timeout_s=config.timeout_s,
    )
    rows: list[dict[str, object]] = []
    total = len(plans) * config.passes
    with progress_bar("running plans") as report:
        for world_size in sorted({plan.plan.topology.world_size for plan in plans}):
            group = [plan for plan in plans if plan.plan.topology.world_size == world_size]

            def finished(run: PlanRun, group: list[NamedPlan] = group) -> None:
                rows.append(_row(group[run.plan_index], run))
                report(len(rows), total, group[run.plan_index].name)

            report(len(rows), total, f"starting {world_size} ranks")
            run_plans(
                [named.plan for named in group],
                options=options,
                passes=config.passes,
                finished=finished,
            )
    frame = pd.DataFrame(rows)
    write_atomically(
        out_dir / "validation.parquet", lambda path: frame.to_parquet(path, index=False)
    )
    return frame


def _row(named: NamedPlan, run: PlanRun) -> dict[str, object]:
    measured, predicted = run.result.cost, named.predicted
    row: dict[str, object] = {
        "plan": named.name,
        "sharder": named.sharder,
        "world_size": named.plan.topology.world_size,
        "num_tables": len(named.plan.tables),
        "run_pass": run.pass_index,
        "source": predicted.source.value,
        "predicted_ms": predicted.step_ms,
        "measured_ms": measured.step_ms,
        "extrapolated": predicted.extrapolated,
        "oversubscribed": measured.oversubscribed,
    }
    for kind, cost in (("predicted", predicted), ("measured", measured)):
        for term in TERMS:
            value = getattr(cost, term)
            row[f"{kind}_{term}"] = max(value) if isinstance(value, tuple) else value
    return row


def per_plan(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per plan: the median over its passes, and their spread (max − min)."""
    grouped = frame.groupby(["plan", "sharder"], sort=False)
    result = grouped.median(numeric_only=True).reset_index()
    measured = grouped["measured_ms"]
    result["measured_spread_ms"] = (measured.max() - measured.min()).to_numpy()
    return result


def validation_summary(frame: pd.DataFrame) -> RichTable:
    """Predicted and measured step time per plan, with errors and Kendall's tau below."""
    plans = per_plan(frame)
    table = RichTable(title="Predicted against measured step time (median over passes)")
    table.add_column("plan", no_wrap=True)
    for column in ("predicted\nms", "measured\nms", "spread\nms", "error"):
        table.add_column(column, justify="right")
    for row in plans.to_dict("records"):
        predicted, measured = float(row["predicted_ms"]), float(row["measured_ms"])
        table.add_row(
            str(row["plan"]),
            f"{predicted:.2f}",
            f"{measured:.2f}",
            f"{row['measured_spread_ms']:.2f}",
            f"{predicted / measured - 1:+.1%}",
        )
    absolute = (plans["predicted_ms"] - plans["measured_ms"]).abs()
    relative = absolute / plans["measured_ms"]
    caption = (
        f"median absolute error {absolute.median():.2f} ms ({relative.median():.1%}), "
        f"largest {absolute.max():.2f} ms ({relative.max():.1%})"
    )
    if len(plans) > 2:
        tau = kendall_tau(plans["predicted_ms"], plans["measured_ms"])
        caption += f"; Kendall's tau {tau.value:.2f} [{tau.low:.2f}, {tau.high:.2f}]"
    table.caption = caption
    return table
