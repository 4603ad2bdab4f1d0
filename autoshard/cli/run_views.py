"""How a run is shown: its progress while it lasts, and its result."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from autoshard.cli.console import note, printable, progress_bar, say, show_json, show_table

if TYPE_CHECKING:
    from autoshard.cli.run_request import RunRequest
    from autoshard.runtime.results import RunResult
    from autoshard.training.results import TrainingResult

#: More evaluations than this are cut to the first and the last ones.
_MAX_ROWS = 12
_Report = Callable[[int, str], None]


@contextmanager
def run_progress(request: RunRequest) -> Iterator[_Report]:
    """A bar over the steps of a run; takes (rank, line of progress)."""
    options = request.options
    total = options.num_steps + options.warmup_steps
    with progress_bar(f"running {request.plan.topology.world_size} ranks", total) as bar:

        def on_progress(rank: int, line: str) -> None:
            step = re.fullmatch(r"step (\d+) of \d+", line)
            if rank == 0 and step:
                bar.update(bar.task_ids[0], completed=int(step[1]))

        yield on_progress


@contextmanager
def training_progress() -> Iterator[_Report]:
    """A bar over the steps of a training run, with throughput and the time that is left."""
    from autoshard.training.progress import parse_progress

    console = Console(file=sys.stderr, markup=False, highlight=False, emoji=False)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]}", markup=False),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with bar:
        task = bar.add_task("starting", total=None, rate="")

        def on_progress(rank: int, line: str) -> None:
            if rank:
                return
            progress = parse_progress(line)
            if progress is None:
                bar.update(task, description=printable(line))
                return
            bar.update(
                task, description=progress.what, completed=progress.step, total=progress.total
            )
            if progress.samples_per_s is not None:
                bar.update(task, rate=f"{progress.samples_per_s:,.0f} samples/s")

        yield on_progress


def show_run(request: RunRequest, result: RunResult) -> None:
    """Print a run on random batches, beside what the plan promised."""
    plan = request.plan
    if request.json_output:
        predicted = None if plan.cost is None else plan.cost.to_json()
        show_json({"measured": result.to_json(), "predicted": predicted})
        return
    if result.pipelined:
        if plan.cost is not None:
            say(f"The plan says {plan.cost.step.step_ms:.3f} ms for a plain step")
    else:
        _show_terms(request, result)
    timings = result.timings
    tail = (
        "steps overlap (pipelined), so their terms are not told apart"
        if result.pipelined
        else f"of which {timings.other_ms:.3f} ms are not the tables' (data, dense layers)"
    )
    say(f"{timings.num_steps} steps of {timings.wall_ms:.3f} ms wall time each (median), {tail}")
    say(f"Loss: {result.losses[0]:.6f} in the first step, {result.losses[-1]:.6f} in the last")
    if timings.oversubscribed:
        note("note: more ranks than cores (oversubscribed); times say little about a real run")
    if result.stopped_early:
        note(f"note: a rank ran out of batches; unused by rank: {result.unused_batches}")
    _note_ids(result.num_out_of_range)


def _show_terms(request: RunRequest, result: RunResult) -> None:
    from autoshard.cli.views import MAX_RANKS, show_terms

    columns = [("this run", result.cost)]
    if request.plan.cost is not None:
        columns.insert(0, ("the plan says", request.plan.cost.step))
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


def show_training(request: RunRequest, result: TrainingResult) -> None:
    """Print a training run; write its picture and result, if a folder is given for them."""
    assert request.training is not None
    written = []
    if request.training.out_dir is not None:
        from autoshard.training.curve import write_results

        written = write_results(request.training.out_dir, result)
    if request.json_output:
        show_json({"training": result.to_json()})
        return
    say(result.data)
    rows = [
        [
            str(row.step),
            f"{row.epoch:.2f}",
            f"{row.samples:,}",
            f"{row.train_loss:.5f}",
            "-" if row.log_loss is None else f"{row.log_loss:.5f}",
            "-" if row.auc is None else f"{row.auc:.5f}",
            f"{row.samples_per_s:,.0f}",
        ]
        for row in result.curve
    ]
    caption = None
    if len(rows) > _MAX_ROWS:
        caption = f"the first and the last {_MAX_ROWS // 2} of {len(rows)} evaluations"
        rows = rows[: _MAX_ROWS // 2] + rows[-_MAX_ROWS // 2 :]
    names = ("step", "epoch", "samples", "train loss", "log-loss", "AUC", "samples/s")
    show_table("Learning curve", [(name, True) for name in names], rows, caption=caption)
    say(f"{result.num_steps:,} steps, {result.num_samples:,} samples")
    if result.timings is not None:
        say(f"{result.timings.wall_ms:.3f} ms wall time per step lately (median)")
    for path in written:
        note(f"wrote {path}")
    if request.training.checkpoint is not None:
        note(f"newest checkpoint: {result.checkpoint}")
    for line in result.notes:
        note(f"note: {line}")
    _note_ids(result.num_out_of_range)


def _note_ids(num_out_of_range: tuple[int, ...]) -> None:
    if any(num_out_of_range):
        note(f"note: ids out of range by rank: {num_out_of_range}")
