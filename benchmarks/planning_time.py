"""How long every sharder takes to plan, from few tables on few ranks to thousands on hundreds.

    OMP_NUM_THREADS=1 python -m benchmarks.planning_time
    OMP_NUM_THREADS=1 python -m benchmarks.planning_time --sizes 40x2,400x32 --sharders cost_greedy

Timed is `Sharder.assign`: slicing, encoding, placing and, for `autoshard`, searching. Loading
a policy and writing the plan are not. Every rank has room for `--memory-slack` times an equal
share of the tables. Sharders take turns within a repeat, so that a machine that slows down
slows all of them. Printed are medians over the repeats, with the spread, and how far each
plan's predicted step time is above the lower bound.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import platform
import statistics
import time
from collections.abc import Sequence

from rich.console import Console
from rich.table import Table as TextTable

from autoshard.cli.options import load_model
from autoshard.costing import lower_bound_ms, predict_step
from autoshard.errors import InfeasibleError
from autoshard.problem import ShardingProblem, TrainingConfig
from autoshard.protocols import Assignment, CostModel, SearchBudget
from autoshard.sharders.registry import make_sharder, sharder_names
from autoshard.shards import ShardSlice, fixed_rank_bytes, shard_load
from autoshard.topology import Topology
from autoshard.workloads.registry import make_workload

SIZES = "40x2,80x8,400x32,1935x96,2000x256"
BATCH_SIZE = 512


def make_problem(num_tables: int, world_size: int, slack: float, seed: int) -> ShardingProblem:
    """Production-like tables on ranks with `slack` times the room of an equal share.

    No rank has less room than the largest table, so that none is split.
    """
    tables = make_workload("production", num_tables=num_tables, seed=seed)
    training = TrainingConfig(batch_size=BATCH_SIZE)
    needs = [
        shard_load(ShardSlice.whole(table), training, world_size).memory_bytes for table in tables
    ]
    roomless = ShardingProblem(
        tables=tables, topology=Topology.uniform(world_size, 0), training=training
    )
    room = max(int(slack * sum(needs) / world_size), max(needs))
    hbm_bytes = room + sum(fixed_rank_bytes(roomless).values())
    return dataclasses.replace(roomless, topology=Topology.uniform(world_size, hbm_bytes))


def step_ms(problem: ShardingProblem, assignment: Assignment, cost_model: CostModel) -> float:
    """The predicted step time of an assignment."""
    held: list[list[ShardSlice]] = [[] for _ in range(problem.topology.world_size)]
    for slice_, rank in zip(assignment.slices, assignment.ranks, strict=True):
        held[rank].append(slice_)
    return predict_step(problem, held, cost_model).step_ms


def time_size(
    problem: ShardingProblem,
    names: Sequence[str],
    cost_model: CostModel,
    budget: SearchBudget,
    num_repeats: int,
) -> tuple[dict[str, list[float]], dict[str, str]]:
    """Seconds of every repeat, and what each sharder's plan is worth, by sharder."""
    sharders = {name: make_sharder(name) for name in names}
    seconds: dict[str, list[float]] = {name: [] for name in names}
    quality: dict[str, str] = {}
    for repeat in range(num_repeats):
        for name, sharder in sharders.items():
            started = time.perf_counter()
            try:
                assignment = sharder.assign(problem, cost_model, seed=repeat, budget=budget)
            except InfeasibleError:
                quality[name] = "found no room"
                continue
            seconds[name].append(time.perf_counter() - started)
            bound_ms = lower_bound_ms(problem, assignment.slices, cost_model)
            if repeat == 0 and bound_ms is not None:
                above = step_ms(problem, assignment, cost_model) / bound_ms - 1
                quality[name] = f"{above:.2%}"
            if assignment.cut_short:
                quality[name] = f"{quality.get(name, '')} (cut short)"
    return seconds, quality


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", default=SIZES, help="TABLESxRANKS, comma-separated")
    parser.add_argument("--sharders", default=None, help="names, comma-separated; all by default")
    parser.add_argument("--cost-model", default="analytic", help="a name or a folder")
    parser.add_argument("--evaluations", type=int, default=SearchBudget().num_evaluations)
    parser.add_argument("--time-limit", type=float, default=None, help="seconds for each plan")
    parser.add_argument("--memory-slack", type=float, default=3.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    cost_model = load_model(arguments.cost_model)
    names = arguments.sharders.split(",") if arguments.sharders else sharder_names()
    budget = SearchBudget(num_evaluations=arguments.evaluations, time_limit_s=arguments.time_limit)
    console = Console()
    table = TextTable(
        title=f"Planning time, cost model {cost_model.name}, {arguments.evaluations:,} evaluations",
        caption=f"{arguments.repeats} repeats on {platform.processor() or platform.machine()}, "
        f"{os.cpu_count()} cores, Python {platform.python_version()}",
    )
    for column in ("tables × ranks", "sharder", "median s", "min s", "max s", "above bound"):
        table.add_column(column, justify="left" if column == "sharder" else "right", no_wrap=True)
    for size in arguments.sizes.split(","):
        num_tables, world_size = map(int, size.split("x"))
        problem = make_problem(num_tables, world_size, arguments.memory_slack, arguments.seed)
        with console.status(f"{num_tables} tables on {world_size} ranks"):
            seconds, quality = time_size(problem, names, cost_model, budget, arguments.repeats)
        for name, values in seconds.items():
            numbers = (statistics.median(values), min(values), max(values)) if values else ()
            shown = [f"{number:.3f}" for number in numbers] or ["–"] * 3
            table.add_row(f"{num_tables} × {world_size}", name, *shown, quality.get(name, "–"))
        table.add_section()
    console.print(table)


if __name__ == "__main__":
    main()
