"""How long a cost model takes for many candidate plans, and for moving one table.

    python -m benchmarks.costing_speed
    python -m benchmarks.costing_speed --model outputs/cost_net/model --out costing.json

Timed are `autoshard.plan_batch.cost_assignments` on `--plans` random placements, all as one batch,
and `autoshard.placement_costs.PlacementCosts.move`, one table at a time. Preparing the task
(describing and encoding its tables) is done once per task and stands apart. Models take turns
within a repeat, so that a machine that slows down slows all of them. Printed are medians over the
repeats, with the fastest and the slowest.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.progress import track
from rich.table import Table as TextTable

from autoshard.cost_models.exported import load_cost_model
from autoshard.errors import AutoshardError, InputError
from autoshard.files import write_atomically
from autoshard.placement import PlacementTask, prepare_task
from autoshard.placement_costs import PlacementCosts
from autoshard.plan_batch import cost_assignments
from autoshard.problem import ShardingProblem
from autoshard.protocols import CostModel
from benchmarks.planning_time import make_problem

#: Beside the one that is given.
MODELS = ("analytic", "simulated:a100-80gb")
#: What 1,000 plans of 80 tables on 8 ranks may take, with a trained model.
BAR_MS = 100.0
_MEMORY_SLACK = 3.0
_PLANS_OF_BAR = 1000


@dataclass(kw_only=True)
class ModelTimes:
    """What one cost model took, in seconds, per repeat."""

    prepare_s: list[float] = field(default_factory=list)
    batch_s: list[float] = field(default_factory=list)
    moves_s: list[float] = field(default_factory=list)

    def figures(self, num_plans: int, num_moves: int) -> dict[str, list[float]]:
        """Median, least and most: ms per task, ms per 1,000 plans, moves per second."""
        rates = [num_moves / seconds for seconds in self.moves_s]
        return {
            "prepare_ms": _spread([1e3 * s for s in self.prepare_s]),
            "ms_per_1000_plans": _spread([1e6 * s / num_plans for s in self.batch_s]),
            "moves_per_second": _spread(rates),
        }


def _spread(values: Sequence[float]) -> list[float]:
    return [float(np.median(values)), min(values), max(values)]


def load_models(given: str, console: Console) -> dict[str, CostModel]:
    """The models that load; of one that does not, a line is printed."""
    models: dict[str, CostModel] = {}
    for name in dict.fromkeys([*MODELS, given]):
        try:
            models[name] = load_cost_model(name)
        except AutoshardError as error:
            console.print(f"{name} is left out: {error}", highlight=False)
    return models


def time_models(
    models: dict[str, CostModel],
    problem: ShardingProblem,
    *,
    num_plans: int,
    num_moves: int,
    num_repeats: int,
    seed: int,
) -> dict[str, ModelTimes]:
    """Time every model, by turns; the first turn of each only warms up."""
    times = {name: ModelTimes() for name in models}
    for repeat in track(range(-1, num_repeats), "costing", console=Console(stderr=True)):
        generator = np.random.default_rng([seed, repeat + 1])
        for name, model in models.items():
            started = time.perf_counter()
            task = prepare_task(problem, model)
            prepare_s = time.perf_counter() - started
            ranks_NS = generator.integers(0, task.world_size, (num_plans, task.num_slices))
            started = time.perf_counter()
            cost_assignments(task, model, ranks_NS)
            batch_s = time.perf_counter() - started
            moves_s = _time_moves(task, model, num_moves, generator)
            if repeat >= 0:
                times[name].prepare_s.append(prepare_s)
                times[name].batch_s.append(batch_s)
                times[name].moves_s.append(moves_s)
    return times


def _time_moves(
    task: PlacementTask, model: CostModel, num_moves: int, generator: np.random.Generator
) -> float:
    """Seconds of moves to another rank each."""
    ranks_S = generator.integers(0, task.world_size, task.num_slices)
    costs = PlacementCosts(task, model, ranks_S.tolist())
    moved = generator.integers(0, task.num_slices, num_moves).tolist()
    steps = generator.integers(1, task.world_size, num_moves).tolist()
    started = time.perf_counter()
    for slice_index, step in zip(moved, steps, strict=True):
        costs.move(slice_index, (int(costs.rank_S[slice_index]) + step) % task.world_size)
    return time.perf_counter() - started


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print; 2 for bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="default", help="a trained model: a name or a folder")
    parser.add_argument("--tables", type=int, default=80)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--plans", type=int, default=_PLANS_OF_BAR)
    parser.add_argument("--moves", type=int, default=500)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--threads", type=int, default=2, help="of torch and its libraries")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the figures")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except AutoshardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    least = {"tables": 1, "ranks": 2, "plans": 1, "moves": 1, "repeats": 1, "threads": 1, "seed": 0}
    for name, low in least.items():
        if getattr(options, name) < low:
            raise InputError(
                f"--{name} is not usable", got=getattr(options, name), allowed=f"{low} or more"
            )
    import torch

    torch.set_num_threads(options.threads)
    console = Console(width=None if sys.stdout.isatty() else 112)
    models = load_models(options.model, console)
    problem = make_problem(options.tables, options.ranks, _MEMORY_SLACK, options.seed)
    times = time_models(
        models,
        problem,
        num_plans=options.plans,
        num_moves=options.moves,
        num_repeats=options.repeats,
        seed=options.seed,
    )
    figures = {name: t.figures(options.plans, options.moves) for name, t in times.items()}
    console.print(_table(figures, options))
    if (options.tables, options.ranks) == (80, 8):
        for name in models:
            median_ms, _, most_ms = figures[name]["ms_per_1000_plans"]
            says = "holds" if median_ms <= BAR_MS else "is missed"
            console.print(
                f"{name}: the bar of {BAR_MS:.0f} ms {says} at {median_ms:.1f} ms "
                f"(at most {most_ms:.1f} ms)",
                highlight=False,
            )
    if options.out is not None:
        text = json.dumps(
            {
                "unit": "median, least and most over the repeats",
                "tables": options.tables,
                "ranks": options.ranks,
                "plans": options.plans,
                "moves": options.moves,
                "repeats": options.repeats,
                "threads": options.threads,
                "bar_ms": BAR_MS,
                "cpu": platform.processor() or platform.machine(),
                "torch": torch.__version__,
                "models": figures,
            },
            indent=2,
        )
        write_atomically(options.out, lambda path: _write(path, text))
    return 0


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")


def _table(figures: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> TextTable:
    table = TextTable(
        title=f"Costing plans of {options.tables} tables on {options.ranks} ranks",
        caption=f"{options.repeats} repeats, {options.threads} threads, {os.cpu_count()} cores; "
        "median (least – most)",
    )
    table.add_column("cost model")
    for column in ("preparing a task, ms", "1,000 plans, ms", "moves per second"):
        table.add_column(column, justify="right")
    for name, row in figures.items():
        shown = [
            f"{median:,.{digits}f} ({low:,.{digits}f} – {high:,.{digits}f})"
            for (median, low, high), digits in zip(row.values(), (1, 1, 0), strict=True)
        ]
        table.add_row(name, *shown)
    return table


if __name__ == "__main__":
    sys.exit(main())
