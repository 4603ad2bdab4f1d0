"""What one rank does: build its part of a plan, run it, report.

The same code runs under autoshard's own launcher and under torchrun.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass

import torch

from autoshard.errors import InputError, UnsupportedError
from autoshard.plan import ShardingPlan
from autoshard.runtime.capabilities import Device
from autoshard.runtime.clocks import clock_offsets_ns
from autoshard.runtime.collectives import Collectives
from autoshard.runtime.data import SyntheticBatches
from autoshard.runtime.dense import DenseHead
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.loop import PlainLoop
from autoshard.runtime.results import RunOptions, RunResult
from autoshard.runtime.timing import StepRecord, combine_records


@dataclass
class RankProcess:
    """One worker process, as the functions that it is asked to run see it."""

    collectives: Collectives
    oversubscribed: bool
    """Whether there are more ranks than cores."""
    report: Callable[[str], None]
    """Sends a line of progress to the launcher."""

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.collectives.rank


def torch_device(device: Device, local_rank: int) -> torch.device:
    """The device of a rank.

    Raises:
        UnsupportedError: CUDA is asked for and not there for this rank.
    """
    if device is Device.CPU:
        return torch.device("cpu")
    if not torch.cuda.is_available() or local_rank >= torch.cuda.device_count():
        raise UnsupportedError(
            f"local rank {local_rank} has no CUDA device",
            got=f"{torch.cuda.device_count() if torch.cuda.is_available() else 0} devices",
            remedy="run with device cpu, or with as many ranks as there are devices",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def execute_plan(process: RankProcess, plan: ShardingPlan, options: RunOptions) -> RunResult:
    """Build, train and tear down one plan; every rank of the group must call it.

    Returns:
        The result of all ranks together, on every rank.
    """
    collectives = process.collectives
    process.report("building")
    embeddings = ShardedEmbeddings(plan, collectives, ids_mode=options.ids_mode, seed=options.seed)
    head = DenseHead(embeddings.output_dims, hidden=options.hidden, seed=options.seed)
    head.to(collectives.device)
    optimizer = torch.optim.SGD(head.parameters(), lr=plan.training.learning_rate)
    batches = SyntheticBatches(
        plan,
        rank=process.rank,
        num_batches=options.warmup_steps + options.num_steps,
        seed=options.seed,
        num_distinct=options.num_distinct_batches,
    )
    total = options.warmup_steps + options.num_steps
    loop = PlainLoop(embeddings, head, optimizer, collectives)
    done = loop.train_steps(
        batches,
        num_steps=options.num_steps,
        warmup_steps=options.warmup_steps,
        progress=lambda step: process.report(f"step {step} of {total}"),
    )
    gathered: list[_RankReport] = collectives.gather_objects(
        "results",
        _RankReport(
            records=done.records,
            losses=done.losses,
            stopped_early=done.stopped_early,
            unused_batches=done.unused_batches,
            num_out_of_range=embeddings.num_out_of_range,
            allocated_bytes=embeddings.allocated_bytes(),
            held_tables=embeddings.held_tables(),
        ),
    )
    offsets = clock_offsets_ns(collectives)
    # Tables are large: the next plan must not find this one's still there.
    del loop, optimizer, head, embeddings, batches
    gc.collect()
    return _combined(gathered, offsets, process.oversubscribed)


@dataclass
class _RankReport:
    records: list[StepRecord]
    losses: list[float]
    stopped_early: bool
    unused_batches: int
    num_out_of_range: int
    allocated_bytes: int
    held_tables: tuple[str, ...]


def _combined(reports: list[_RankReport], offsets: list[int], oversubscribed: bool) -> RunResult:
    if not reports[0].records:
        raise InputError(
            "the data ended before the first timed step",
            got=f"{len(reports[0].losses)} steps",
            remedy="give more batches or fewer warm-up steps",
        )
    losses = zip(*(report.losses for report in reports), strict=True)
    return RunResult(
        timings=combine_records(
            [report.records for report in reports],
            clock_offsets_ns=offsets,
            oversubscribed=oversubscribed,
        ),
        losses=tuple(sum(step) / len(reports) for step in losses),
        stopped_early=any(report.stopped_early for report in reports),
        unused_batches=tuple(report.unused_batches for report in reports),
        num_out_of_range=tuple(report.num_out_of_range for report in reports),
        allocated_bytes=tuple(report.allocated_bytes for report in reports),
        held_tables=tuple(report.held_tables for report in reports),
    )
