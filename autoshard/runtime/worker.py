"""What one rank does: build its part of a plan, run it, report.

The same code runs under autoshard's own launcher and under torchrun.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import nn

from autoshard.errors import InputError, UnsupportedError
from autoshard.plan import ShardingPlan
from autoshard.runtime.capabilities import Device
from autoshard.runtime.clocks import clock_offsets_ns
from autoshard.runtime.collectives import Collectives
from autoshard.runtime.data import SyntheticBatches
from autoshard.runtime.dense import DenseHead
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.loop import PlainLoop, TrainingLoop
from autoshard.runtime.pipelined_loop import PipelinedLoop
from autoshard.runtime.results import RunOptions, RunResult
from autoshard.runtime.timing import StepRecord, combine_records
from autoshard.runtime.together import each

#: Time limit of what may take ranks very different times: building tables, reading data,
#: writing checkpoints. A rank that dies meanwhile is noticed at once.
PATIENT_TIMEOUT_S = 1800.0


@dataclass
class RankProcess:
    """One worker process, as the functions that it is asked to run see it."""

    collectives: Collectives
    oversubscribed: bool
    """Whether there are more ranks than cores."""
    report: Callable[[str], None]
    """Sends a line of progress to the launcher."""
    _groups: dict[str, Collectives] = field(default_factory=dict)

    def input_collectives(self) -> Collectives:
        """For distributing the input in another thread; every rank must ask for it.

        Raises:
            CollectiveError: other ranks did not, within the time limit.
        """
        return self._group("input", self.collectives)

    def patient_collectives(self) -> Collectives:
        """For work that takes ranks different times; every rank must ask for it.

        Raises:
            CollectiveError: other ranks did not, within the time limit.
        """
        own = self.collectives
        timeout_s = max(own.timeout_s, PATIENT_TIMEOUT_S)
        patient = Collectives(own.rank, own.world_size, device=own.device, timeout_s=timeout_s)
        return self._group("patient", patient)

    def _group(self, name: str, like: Collectives) -> Collectives:
        # One of each for as long as the process lives: many plans may be run in it.
        if name not in self._groups:
            self._groups[name] = like.new_group()
        return self._groups[name]

    @property
    def rank(self) -> int:
        """This process's rank."""
        return self.collectives.rank


def torch_device(device: Device, local_rank: int) -> torch.device:
    """The device of a rank.

    Raises:
        UnsupportedError: CUDA is asked for and not there for this rank.
    """
    check_devices(device, local_rank + 1)
    if device is Device.CPU:
        return torch.device("cpu")
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def check_devices(device: Device, num_local: int) -> None:
    """Make sure that there is a device for each of a machine's ranks.

    Raises:
        UnsupportedError: there are fewer CUDA devices.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device is Device.CUDA and num_devices < num_local:
        raise UnsupportedError(
            f"local rank {num_devices} has no CUDA device",
            got=f"{num_devices} devices",
            allowed=f"at least {num_local}, one per rank of this machine",
            remedy="run with device cpu, or with as many ranks as there are devices",
        )


def execute_plan(process: RankProcess, plan: ShardingPlan, options: RunOptions) -> RunResult:
    """Build, train and tear down one plan; every rank of the group must call it.

    Returns:
        The result of all ranks together, on every rank.
    """
    collectives = process.collectives
    process.report("building")
    input_collectives = process.input_collectives() if options.pipelined else None
    embeddings = each(
        process.patient_collectives(),
        "building the tables",
        lambda: ShardedEmbeddings(
            plan,
            collectives,
            input_collectives=input_collectives,
            ids_mode=options.ids_mode,
            seed=options.seed,
        ),
    )
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
    loop = make_loop(embeddings, head, optimizer, collectives, pipelined=options.pipelined)
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
    return _combined(gathered, offsets, process.oversubscribed, options.pipelined)


def make_loop(
    embeddings: ShardedEmbeddings,
    dense: nn.Module,
    dense_optimizer: torch.optim.Optimizer,
    collectives: Collectives,
    *,
    pipelined: bool,
) -> TrainingLoop:
    """The plain or the pipelined loop; the latter needs input collectives of its own."""
    kind = PipelinedLoop if pipelined else PlainLoop
    return kind(embeddings, dense, dense_optimizer, collectives)


@dataclass
class _RankReport:
    records: list[StepRecord]
    losses: list[float]
    stopped_early: bool
    unused_batches: int
    num_out_of_range: int
    allocated_bytes: int
    held_tables: tuple[str, ...]


def _combined(
    reports: list[_RankReport], offsets: list[int], oversubscribed: bool, pipelined: bool
) -> RunResult:
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
        pipelined=pipelined,
    )
