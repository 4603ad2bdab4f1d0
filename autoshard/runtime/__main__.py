"""`torchrun --nproc-per-node W -m autoshard.runtime plan.json --steps N`.

torchrun starts the processes and gives each its rank by environment variables; rank 0
prints the result as JSON. On one machine, `autoshard run` needs no torchrun.
"""

from __future__ import annotations

import argparse
import json
import os
import sys

import torch

from autoshard.errors import AutoshardError, InputError, PlanError
from autoshard.plan import load_plan
from autoshard.runtime.collectives import (
    DEFAULT_TIMEOUT_S,
    close_process_group,
    open_process_group,
)
from autoshard.runtime.group import available_cores
from autoshard.runtime.launch import check_plan
from autoshard.runtime.results import RunOptions
from autoshard.runtime.worker import RankProcess, execute_plan, torch_device


def main(arguments: list[str] | None = None) -> int:
    """Run this rank's part; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="torchrun … -m autoshard.runtime", description="Run a plan under torchrun."
    )
    parser.add_argument("plan", help="plan.json")
    parser.add_argument("--steps", type=int, default=20, help="timed steps")
    parser.add_argument("--warmup-steps", type=int, default=3, help="steps before them")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--timeout", type=float, default=DEFAULT_TIMEOUT_S, help="seconds")
    parser.add_argument("--ids-mode", default="fatal", help="fatal, warning or ignore")
    given = parser.parse_args(arguments)
    try:
        options = RunOptions(
            num_steps=given.steps,
            warmup_steps=given.warmup_steps,
            seed=given.seed,
            device=given.device,
            timeout_s=given.timeout,
            ids_mode=given.ids_mode,
        )
        _run(given.plan, options)
    except AutoshardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    finally:
        close_process_group()
    return 0


def _run(path: str, options: RunOptions) -> None:
    plan = load_plan(path)
    check_plan(plan, options)
    rank, world_size, local_rank, local_world_size = (
        _from_environment(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    )
    if world_size != plan.topology.world_size:
        raise PlanError(
            "the plan is for another number of ranks",
            got=f"{world_size} processes",
            allowed=f"{plan.topology.world_size}, the plan's world_size",
            remedy="give torchrun that number of processes, or plan for this one",
        )
    torch.set_num_threads(1)
    collectives = open_process_group(
        rank,
        world_size,
        init_method="env://",
        device=torch_device(options.device, local_rank),
        timeout_s=options.timeout_s,
    )
    oversubscribed = any(
        collectives.gather_objects("cores", local_world_size > len(available_cores()))
    )
    process = RankProcess(collectives, oversubscribed, lambda line: None)
    result = execute_plan(process, plan, options)
    if rank == 0:
        print(json.dumps(result.to_json()))


def _from_environment(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdigit():
        raise InputError(
            f"the environment variable {name} is not set by a launcher",
            got=value or None,
            remedy="start with torchrun, or use autoshard run",
        )
    return int(value)


if __name__ == "__main__":
    sys.exit(main())
