"""`autoshard run`: execute a plan on this machine and set the promise beside the delivery."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.cli.console import note, progress_bar, say, show_json, show_table
from autoshard.cli.options import (
    JsonOption,
    PlanArgument,
    SeedOption,
    integer_option,
    seconds_option,
)

if TYPE_CHECKING:
    from autoshard.plan import ShardingPlan
    from autoshard.runtime.results import RunOptions, RunResult

DEFAULT_TIMEOUT_S = 120.0


def run_command(
    plan: PlanArgument,
    steps: Annotated[int, integer_option("Timed steps.", low=1)] = 20,
    warmup: Annotated[int, integer_option("Steps before them.", low=0)] = 3,
    seed: SeedOption = 0,
    timeout_s: Annotated[
        float,
        seconds_option("How long one collective may take."),
    ] = DEFAULT_TIMEOUT_S,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    ids_mode: Annotated[
        str,
        typer.Option(
            help="Ids out of range: fatal stops every rank, warning makes them 0 and counts "
            "them, ignore makes them 0."
        ),
    ] = "fatal",
    json_output: JsonOption = False,
) -> None:
    """Run a plan with one process per rank and print measured beside predicted times.

    For example:

      autoshard run plan.json --steps 20
      autoshard run plan.json --steps 100 --warmup 10 --seed 1 --json

    Batches are drawn from the plan's own id distributions. Needs FBGEMM.
    """
    from autoshard.plan import load_plan
    from autoshard.runtime.capabilities import parse_device
    from autoshard.runtime.ids import parse_ids_mode
    from autoshard.runtime.results import RunOptions

    loaded = load_plan(plan)
    options = RunOptions(
        num_steps=steps,
        warmup_steps=warmup,
        seed=seed,
        device=parse_device(device),
        timeout_s=timeout_s,
        ids_mode=parse_ids_mode(ids_mode),
    )
    result = _run(loaded, options)
    if json_output:
        show_json(
            {
                "measured": result.to_json(),
                "predicted": None if loaded.cost is None else loaded.cost.to_json(),
            }
        )
    else:
        _show(loaded, result)


def _run(plan: ShardingPlan, options: RunOptions) -> RunResult:
    from autoshard.runtime.launch import run_plan

    total = options.num_steps + options.warmup_steps
    with progress_bar(f"running {plan.topology.world_size} ranks", total) as bar:

        def on_progress(rank: int, line: str) -> None:
            step = re.fullmatch(r"step (\d+) of \d+", line)
            if rank == 0 and step:
                bar.update(bar.task_ids[0], completed=int(step[1]))

        return run_plan(plan, options=options, progress=on_progress)


def _show(plan: ShardingPlan, result: RunResult) -> None:
    from autoshard.cli.views import MAX_RANKS, show_terms

    columns = [("this run", result.cost)]
    if plan.cost is not None:
        columns.insert(0, ("the plan says", plan.cost.step))
    show_terms(*columns)
    headings = [("rank", True), ("fwd_compute ms", True), ("bwd_compute ms", True)]
    headings += [("waiting ms", True), ("allocated MiB", True)]
    ranks = zip(
        result.cost.fwd_compute_ms,
        result.cost.bwd_compute_ms,
        result.timings.wait_ms(),
        result.allocated_bytes,
        strict=True,
    )
    rows = [
        [str(rank), f"{fwd:.3f}", f"{bwd:.3f}", f"{wait:.3f}", f"{allocated / 2**20:,.2f}"]
        for rank, (fwd, bwd, wait, allocated) in enumerate(ranks)
    ]
    caption = f"{MAX_RANKS} of {len(rows)} ranks; --json lists all"
    show_table(
        "Ranks (measured, medians over steps)",
        headings,
        rows[:MAX_RANKS],
        caption=caption if len(rows) > MAX_RANKS else None,
    )
    timings = result.timings
    say(
        f"{timings.num_steps} steps of {timings.wall_ms:.3f} ms wall time each (median), "
        f"of which {timings.other_ms:.3f} ms are not the tables' (data, dense layers)"
    )
    say(f"Loss: {result.losses[0]:.6f} in the first step, {result.losses[-1]:.6f} in the last")
    if timings.oversubscribed:
        note("note: more ranks than cores (oversubscribed); times say little about a real run")
    if result.stopped_early:
        note(f"note: a rank ran out of batches; unused by rank: {result.unused_batches}")
    if any(result.num_out_of_range):
        note(f"note: ids out of range by rank: {result.num_out_of_range}")
