"""One pass over all shard sets in fresh processes, one per core, in one of three ways.

A pass is timed from the moment at which all its processes are ready until its last answer.
"""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass
from enum import Enum
from functools import partial
from threading import Barrier

from autoshard.measure.config import KernelConfig
from autoshard.measure.environment import available_cores, pin_to_core
from autoshard.measure.sampling import ShardSet
from autoshard.measure.workers import START_LIMIT_S, run_tasks
from benchmarks.measuring.naive import measure_naively

#: A shard set that takes longer ends the run with an error.
SET_LIMIT_S = 60.0


class Way(Enum):
    """How shard sets are measured."""

    NAIVE = "naive"
    FAST = "fast"
    PRECISE = "precise"


@dataclass(frozen=True)
class SetTask:
    """One set to measure."""

    shard_set: ShardSet
    seed: int

    def __str__(self) -> str:
        return f"shard set {self.shard_set.index}"


@dataclass(frozen=True, kw_only=True)
class SetTime:
    """What came of it."""

    index: int
    fwd_ms: float
    bwd_ms: float
    reference_ms: tuple[float, ...]
    """As `REFERENCE_COLUMNS` has them; () where none were timed."""
    started_s: float
    """On the system's monotonic clock, which all processes share."""
    ended_s: float


@dataclass(frozen=True, kw_only=True)
class PassResult:
    """One pass."""

    start_s: float
    """Until all processes were ready."""
    wall_s: float
    """From then on."""
    times: tuple[SetTime, ...]


def run_pass(
    kernels: KernelConfig | None,
    tasks: Sequence[SetTask],
    num_workers: int,
    report: Callable[[SetTask], None] = lambda task: None,
) -> PassResult:
    """Measure every set once, all processes busy.

    Args:
        kernels: how autoshard measures; None for the naive way.
        tasks: in order of measurement.
        num_workers: processes; one core each.
        report: told after each set.

    Raises:
        WorkerError: a process failed, died or took too long.
    """
    num_workers = min(num_workers, len(tasks))
    ready = multiprocessing.get_context("spawn").Barrier(num_workers)
    make = partial(_make_handler, kernels, available_cores(), ready)
    called_s = time.monotonic()
    times: list[SetTime] = []
    answers = run_tasks(make, tasks, num_workers=num_workers, time_limit_s=SET_LIMIT_S)
    with closing(answers):
        for task, answer in answers:
            times.append(answer)
            report(task)
    ready_s = min(t.started_s for t in times)
    return PassResult(
        start_s=ready_s - called_s,
        wall_s=max(t.ended_s for t in times) - ready_s,
        times=tuple(times),
    )


def _make_handler(
    kernels: KernelConfig | None, cores: Sequence[int], ready: Barrier, worker: int
) -> Callable[[SetTask], SetTime]:
    """Runs in the process, which stays on its core."""
    pin_to_core(cores[worker % len(cores)])
    measure = _naive() if kernels is None else _metered(kernels)
    ready.wait(START_LIMIT_S)

    def handle(task: SetTask) -> SetTime:
        started_s = time.monotonic()
        fwd_ms, bwd_ms, reference_ms = measure(task)
        return SetTime(
            index=task.shard_set.index,
            fwd_ms=fwd_ms,
            bwd_ms=bwd_ms,
            reference_ms=reference_ms,
            started_s=started_s,
            ended_s=time.monotonic(),
        )

    return handle


_Measure = Callable[[SetTask], tuple[float, float, tuple[float, ...]]]


def _naive() -> _Measure:
    import torch

    from autoshard.runtime.fbgemm import load_fbgemm

    torch.set_num_threads(1)
    load_fbgemm()  # importing it is a part of starting
    return lambda task: (*measure_naively(task.shard_set, task.seed), ())


def _metered(kernels: KernelConfig) -> _Measure:
    """As the runner measures."""
    from autoshard.measure.kernels import KernelMeter
    from autoshard.runtime.allocator import keep_freed_memory

    keep_freed_memory()
    meter = KernelMeter(kernels)

    def measure(task: SetTask) -> tuple[float, float, tuple[float, ...]]:
        drawn = task.shard_set
        timing = meter.measure(
            drawn.slices, drawn.batch_size, world_size=drawn.world_size, seed=task.seed
        )
        return timing.fwd.median_ms, timing.bwd.median_ms, timing.reference_ms

    return measure
