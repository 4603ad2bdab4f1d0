"""Placements per second of the environment, single and batched, on one core.

    OMP_NUM_THREADS=1 python -m benchmarks.environment_throughput

Actions are random legal ones, so that the environment is timed and not an agent. Single and
batched runs alternate; each row has the median over repetitions and their spread.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import numpy as np
from rich.console import Console
from rich.table import Table

from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.tasks import TaskDistribution
from autoshard.workloads.registry import make_workload
from envs.batched_env import BatchedPlacementEnv
from envs.episodes import EnvConfig
from envs.placement_env import PlacementEnv
from envs.task_source import RandomTaskSource


def random_legal(masks_NR: np.ndarray, generator: np.random.Generator) -> np.ndarray:
    """A random legal rank for each episode."""
    return (generator.random(masks_NR.shape) * masks_NR).argmax(axis=1)


def time_single(env: PlacementEnv, num_steps: int, generator: np.random.Generator) -> float:
    """Placements per second of one environment."""
    env.reset(seed=0)
    started = time.perf_counter()
    for _ in range(num_steps):
        action = int(random_legal(env.action_masks()[None], generator)[0])
        _, _, ended, _, _ = env.step(action)
        if ended:
            env.reset()
    return num_steps / (time.perf_counter() - started)


def time_batched(env: BatchedPlacementEnv, num_steps: int, generator: np.random.Generator) -> float:
    """Placements per second of N episodes in lockstep."""
    env.seed(0)
    env.reset()
    started = time.perf_counter()
    for _ in range(num_steps):
        env.step(random_legal(env.action_masks(), generator))
    return num_steps * env.num_envs / (time.perf_counter() - started)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--num-envs", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--repetitions", type=int, default=5)
    arguments = parser.parse_args()
    cost_model = AnalyticCostModel()
    tasks = RandomTaskSource(
        make_workload("production", num_tables=400, seed=0, max_num_embeddings=1_000_000),
        cost_model,
        TaskDistribution(num_tables=(40, 80), world_sizes=(arguments.ranks,)),
        num_tasks=128,
    )
    for index in range(128):
        tasks.task(index)
    config = EnvConfig(max_ranks=arguments.ranks)
    single = PlacementEnv(tasks, cost_model, config)
    rows: dict[str, Callable[[np.random.Generator], float]] = {
        "PlacementEnv": lambda generator: time_single(single, 1000, generator)
    }
    for num_envs in arguments.num_envs:
        batched = BatchedPlacementEnv(tasks, cost_model, num_envs, config)
        rows[f"BatchedPlacementEnv, {num_envs} episodes"] = lambda generator, env=batched: (  # type: ignore[misc]
            time_batched(env, max(10_000 // env.num_envs, 20), generator)
        )
    rates: dict[str, list[float]] = {name: [] for name in rows}
    for repetition in range(arguments.repetitions + 1):
        for name, measure in rows.items():
            rate = measure(np.random.default_rng(repetition))
            if repetition:  # the first pass warms up
                rates[name].append(rate)
    table = Table(title=f"Placements per second, {arguments.ranks} ranks, 40 to 80 tables")
    for column in ("environment", "median", "min", "max", "ratio"):
        table.add_column(column, justify="left" if column == "environment" else "right")
    base = statistics.median(rates["PlacementEnv"])
    for name, values in rates.items():
        median = statistics.median(values)
        table.add_row(
            name,
            f"{median:,.0f}",
            f"{min(values):,.0f}",
            f"{max(values):,.0f}",
            f"{median / base:.1f}×",
        )
    Console().print(table)


if __name__ == "__main__":
    main()
