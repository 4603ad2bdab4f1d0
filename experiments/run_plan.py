"""Run plans on this machine: `python -m experiments.run_plan 'plans=[a.json,b.json]'`.

Plans for the same number of ranks share one group of processes and are interleaved, pass by
pass, in an order of its own each. Writes `validation.parquet`: predicted beside measured.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from autoshard.cost_models.exported import load_cost_model
from autoshard.costing import predict_plan
from autoshard.errors import InputError
from autoshard.plan import ShardingPlan, load_plan
from autoshard.protocols import CostModel
from experiments.common import run_experiment
from experiments.metrics import MetricsLog
from experiments.validation import NamedPlan, ValidationConfig, validate_plans, validation_summary


@dataclass(frozen=True, kw_only=True)
class RunPlanConfig:
    """Which plans to run, and how."""

    plans: tuple[str, ...]
    """Files."""
    cost_model: str | None
    """Predicts plans that carry no cost, and every plan if given; None keeps the plans' own."""
    validation: ValidationConfig


def run(config: RunPlanConfig, out_dir: Path, metrics: MetricsLog) -> None:
    """Run every plan and compare with its prediction.

    Raises:
        AutoshardError: a plan cannot be read or run.
    """
    if not config.plans:
        raise InputError("no plan is given", remedy="plans=[a.json,b.json]")
    model = None if config.cost_model is None else load_cost_model(config.cost_model)
    stems = [Path(path).stem for path in config.plans]
    short = len(set(stems)) == len(stems)
    named = [
        _named(stem if short else path, load_plan(path), model)
        for stem, path in zip(stems, config.plans, strict=True)
    ]
    frame = validate_plans(named, config.validation, out_dir)
    Console().print(validation_summary(frame))
    Console().print(f"rows: {out_dir / 'validation.parquet'}")


def _named(name: str, plan: ShardingPlan, model: CostModel | None) -> NamedPlan:
    step = plan.cost.step if plan.cost is not None else None
    if model is not None:
        step = predict_plan(plan, model)
    elif step is None:
        step = predict_plan(plan, load_cost_model("default"))
    sharder = str(plan.provenance.get("sharder", "by hand"))
    return NamedPlan(name=name, sharder=sharder, plan=plan, predicted=step)


if __name__ == "__main__":
    run_experiment("run_plan", RunPlanConfig, run)
