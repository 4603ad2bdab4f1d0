"""Plan with every sharder through Hydra: `python -m experiments.plan tables=my_tables.csv`.

Writes one `<sharder>.json` per sharder into the output folder and prints the comparison.
`autoshard plan` is the same for people without Hydra.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from autoshard.cost_models.exported import load_cost_model
from autoshard.errors import InputError
from autoshard.planning import compare_sharders
from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.protocols import SearchBudget
from autoshard.report.tables import comparison_rows, comparison_table
from autoshard.sharders.registry import sharder_names
from autoshard.table_io import read_tables
from autoshard.topology import GIB, Topology
from autoshard.workloads.registry import make_workload
from experiments.common import run_experiment
from experiments.metrics import MetricsLog
from experiments.progress import progress_bar


@dataclass(frozen=True, kw_only=True)
class PlanConfig:
    """What to plan."""

    tables: str | None
    """A table list; or None to take `workload`."""
    workload: dict[str, Any]
    """`name` of a registered workload, and its options."""
    world_size: int
    local_world_size: int
    """Ranks per node; 0 for all on one node."""
    hbm_gib: float
    """Memory of each rank, GiB."""
    reserve_fraction: float
    """Share of the memory that plans may not use."""
    batch_size: int
    """Samples per rank."""
    optimizer: Optimizer
    sharders: tuple[str, ...]
    """Names; empty for all."""
    cost_model: str
    policy: str
    seed: int
    max_evaluations: int
    time_limit_s: float | None


def problem_of(config: PlanConfig) -> ShardingProblem:
    """The problem that a configuration describes.

    Raises:
        InputError: the table list or a value is not usable.
    """
    if config.tables is not None:
        tables = read_tables(config.tables)
    else:
        options: Mapping[str, Any] = dict(config.workload)
        tables = make_workload(
            str(options.get("name", "")), **{k: v for k, v in options.items() if k != "name"}
        )
    if not 0 <= config.reserve_fraction < 1:
        raise InputError(
            "reserve_fraction is not usable", got=config.reserve_fraction, allowed="0 <= x < 1"
        )
    if not 0 <= config.hbm_gib < 2**30:
        raise InputError("hbm_gib is not usable", got=config.hbm_gib, allowed="GiB, >= 0")
    hbm_bytes = int(config.hbm_gib * GIB)
    return ShardingProblem(
        tables=tables,
        topology=Topology.uniform(
            config.world_size,
            hbm_bytes,
            local_world_size=config.local_world_size,
            reserved_bytes=int(hbm_bytes * config.reserve_fraction),
        ),
        training=TrainingConfig(batch_size=config.batch_size, optimizer=config.optimizer),
    )


def run(config: PlanConfig, out_dir: Path, metrics: MetricsLog) -> None:
    """Plan, write and compare.

    Raises:
        AutoshardError: bad input, or no sharder found a plan.
    """
    problem = problem_of(config)
    names = config.sharders or sharder_names()
    with progress_bar("planning") as report:
        seen: list[str] = []

        def started(name: str) -> None:
            report(len(seen), len(names), name)
            seen.append(name)

        results = compare_sharders(
            problem,
            cost_model=load_cost_model(config.cost_model),
            sharders=names,
            seed=config.seed,
            budget=SearchBudget(
                num_evaluations=config.max_evaluations, time_limit_s=config.time_limit_s
            ),
            policy=config.policy,
            on_progress=started,
        )
    for index, result in enumerate(results):
        if result.plan is not None:
            result.plan.save(out_dir / f"{result.sharder}.json")
        cost = result.plan.cost if result.plan is not None else None
        metrics.log(
            index,
            sharder=result.sharder,
            infeasible=result.plan is None,
            predicted_step_ms=None if cost is None else cost.step.step_ms,
            planning_time_s=result.planning_time_s,
        )
    errors = [result.error for result in results if result.error is not None]
    if len(errors) == len(results):
        raise errors[-1]
    Console().print(comparison_table(comparison_rows(results)))
    Console().print(f"plans: {out_dir}")


if __name__ == "__main__":
    run_experiment("plan", PlanConfig, run)
