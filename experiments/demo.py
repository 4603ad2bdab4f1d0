"""The whole loop on this machine: `make demo`, or `python -m experiments.demo [FOLDER]`.

Measures kernels and all-to-alls, trains a cost model on the timings and a policy on the cost
model, plans tables that neither ever saw, runs the plans on two ranks, and writes a report.
Every stage is an experiment that you can start by itself; its command is printed first. A
finished stage is not repeated and a cut-off one goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.rule import Rule

from autoshard.errors import AutoshardError, InputError, WorkerError
from autoshard.files import fingerprint, make_folder, write_text
from autoshard.objective import CostSource
from autoshard.plan import load_plan
from autoshard.report.page import load_report_data, write_report
from autoshard.report.tables import ComparisonRow, comparison_table
from autoshard.table_io import write_tables
from experiments.common import CONF_DIR
from experiments.heldout import Setting, held_out_tasks
from experiments.pool import PoolConfig, Split, pool_tables
from experiments.validation import per_plan

ROOT = CONF_DIR.parent
#: The problem that is planned and run: unseen tables on two ranks.
SETTING = Setting(num_tables=40, world_size=2, num_tasks=1)
SEED = 1


@dataclass(frozen=True, kw_only=True)
class Stage:
    """One experiment of the loop."""

    title: str
    folder: str
    """Where it writes, below the demo's folder."""
    arguments: tuple[str, ...]
    """`python -m` …"""
    product: str
    """The file that says it is done, below `folder`."""
    minutes: float
    """About how long it takes on two cores."""


def stages(out: Path) -> list[Stage]:
    """The stages in order."""
    measurements, model = out / "measurements", out / "cost_net"
    agent, plans = out / "agent", out / "plans"
    return [
        Stage(
            title="Measure kernels and all-to-alls",
            folder="measurements",
            arguments=("experiments.measure", "measure_preset=demo", f"out={measurements}"),
            product="collectives.parquet",
            minutes=2.5,
        ),
        Stage(
            title="Train the cost model on the timings",
            folder="cost_net",
            arguments=(
                "experiments.train_cost_net",
                f"measurements=[{measurements}]",
                f"out={model}",
            ),
            product="model/config.json",
            minutes=1.0,
        ),
        Stage(
            title="Train the policy on the cost model",
            folder="agent",
            arguments=(
                "experiments.train_agent",
                "agent=demo",
                f"cost_model={model / 'model'}",
                f"out={agent}",
            ),
            product="policy/config.json",
            minutes=2.0,
        ),
        Stage(
            title="Compare sharders on problems of unseen tables",
            folder="evaluation",
            arguments=(
                "experiments.evaluate",
                f"cost_model={model / 'model'}",
                f"policies=[{agent / 'policy'}]",
                "settings=[{num_tables: 40, world_size: 2, num_tasks: 4},"
                "{num_tables: 80, world_size: 8, num_tasks: 4}]",
                "measured.num_tasks=0",
                f"out={out / 'evaluation'}",
            ),
            product="evaluation.parquet",
            minutes=0.5,
        ),
        Stage(
            title="Plan one of them with every sharder",
            folder="plans",
            arguments=(
                "experiments.plan",
                f"tables={out / 'tables.csv'}",
                f"world_size={SETTING.world_size}",
                f"batch_size={SETTING.batch_size}",
                "hbm_gib=8",
                f"cost_model={model / 'model'}",
                f"policy={agent / 'policy'}",
                f"out={plans}",
            ),
            product="autoshard.json",
            minutes=0.3,
        ),
    ]


def run_stage(stage: Stage, out: Path, number: str, console: Console) -> None:
    """Run one stage unless it is done.

    Raises:
        WorkerError: it failed; its own message stands above.
    """
    command = [sys.executable, "-m", *stage.arguments]
    mark = out / stage.folder / ".done"
    wanted = fingerprint([str(argument) for argument in stage.arguments])
    product = out / stage.folder / stage.product
    console.print(Rule(f"[bold]{number} {stage.title}", align="left"))
    if product.exists() and mark.exists() and mark.read_text() == wanted:
        console.print("[dim]done before")
        return
    console.print(
        f"about {stage.minutes:g} min: python -m {shlex.join(stage.arguments)}",
        style="dim",
        markup=False,  # overrides hold brackets
        highlight=False,
        soft_wrap=True,
    )
    result = subprocess.run(command, cwd=ROOT, check=False)
    if result.returncode in (130, -2):
        raise KeyboardInterrupt
    if result.returncode != 0:
        raise WorkerError(
            f"stage {stage.title!r} failed",
            got=f"exit code {result.returncode}",
            remedy="its message stands above; start the demo again to go on from here",
        )
    write_text(mark, wanted)


def run_plans_stage(out: Path) -> Stage:
    """Run every plan that was found, interleaved."""
    plans = sorted((out / "plans").glob("*.json"))
    if not plans:
        raise InputError(f"{out / 'plans'} holds no plan", remedy="start the demo again")
    return Stage(
        title="Run the plans on two ranks",
        folder="runs",
        arguments=(
            "experiments.run_plan",
            f"plans=[{','.join(str(plan) for plan in plans)}]",
            f"out={out / 'runs'}",
        ),
        product="validation.parquet",
        minutes=1.5,
    )


def comparison(out: Path) -> list[ComparisonRow]:
    """Each sharder's predicted and measured step time, gaps and planning time."""
    import pandas as pd

    measured = per_plan(pd.read_parquet(out / "runs" / "validation.parquet"))
    by_sharder = {row["sharder"]: row for row in measured.to_dict("records")}
    times = {}
    for line in (out / "plans" / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        times[record["sharder"]] = record
    rows = []
    for name, record in times.items():
        path = out / "plans" / f"{name}.json"
        cost = load_plan(path).cost if path.exists() else None
        run = by_sharder.get(name)
        rows.append(
            ComparisonRow(
                sharder=name,
                source=CostSource.PREDICTED if cost is None else cost.step.source,
                predicted_ms=None if cost is None else cost.step.step_ms,
                measured_ms=None if run is None else float(run["measured_ms"]),
                lower_bound_ms=None if cost is None else cost.lower_bound_ms,
                best_known_ms=None if cost is None else cost.best_known_ms,
                planning_time_s=float(record["planning_time_s"]),
                infeasible=bool(record["infeasible"]),
                extrapolated=cost is not None and cost.step.extrapolated,
            )
        )
    return rows


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all stages; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m experiments.demo", description="The whole loop on this machine."
    )
    parser.add_argument("out", nargs="?", type=Path, default=Path("outputs/demo"))
    out = parser.parse_args(arguments).out.resolve()
    console = Console()
    started = time.monotonic()
    try:
        make_folder(out)
        workload = {"name": "laptop", "num_tables": 1000, "seed": 0}
        unseen = pool_tables(PoolConfig(workload=workload))[Split.TEST]
        task = next(held_out_tasks(unseen, [SETTING], SEED))
        write_tables(out / "tables.csv", task.problem.tables)
        todo = stages(out)
        for number, stage in enumerate(todo, 1):
            run_stage(stage, out, f"{number}/{len(todo) + 1}", console)
        run_stage(run_plans_stage(out), out, f"{len(todo) + 1}/{len(todo) + 1}", console)
        report = out / "report.html"
        write_report(report, load_report_data(out))
        console.print(Rule("[bold]Result", align="left"))
        console.print(comparison_table(comparison(out)))
    except AutoshardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted; start the demo again to go on", file=sys.stderr)
        return 130
    console.print(f"took {(time.monotonic() - started) / 60:.1f} min")
    console.print(f"report: {report}", markup=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
