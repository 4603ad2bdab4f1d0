"""What gloo's receiving threads do to an exchange, and what keeping them from preempting gains.

    python -m benchmarks.gloo_threads                   # 2, 3, 4 and 8 ranks, about a minute
    python -m benchmarks.gloo_threads --ranks 2 --busy  # beside another process

All-to-alls of equal sizes between ranks that are pinned to a core each, as far as there are
cores. Both settings (`autoshard/runtime/gloo_threads.py`) take turns within a round, in the
same processes. An exchange takes from the last rank's arrival to the last rank's end; shown
are KiB to each rank, medians, 80th percentiles, and the ratio of medians with its 95% bootstrap
interval over rounds. "Held up" is what the runtime decides by, whether to leave the threads
alone: how long other processes keep them from a core in an exchange, calm, in the median of
the rank that suffers most.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autoshard.errors import AutoshardError, InputError
from autoshard.number_text import parse_integer
from autoshard.runtime.gloo_threads import (
    NUM_READ,
    held_up_ns,
    keep_from_preempting,
    read_clocks,
    receiving_threads,
)
from autoshard.runtime.group import WorkerGroup
from autoshard.runtime.worker import RankProcess
from benchmarks.runtime_speed.statistics import median_ms, percentile_ms, ratio_of_medians

_WARMUP = 3
_NS_PER_MS = 1e6
_FLOAT_BYTES = 4


@dataclass
class Spent:
    """One setting's exchanges, in milliseconds."""

    rounds_ms: list[list[float]] = field(default_factory=list)
    """From the last rank's arrival to the last rank's end."""
    held_up_ms: list[float] = field(default_factory=list)
    """Per round, the median of the rank that suffered most."""


def stamps(
    process: RankProcess, peer_bytes: int, num_steps: int, calm: bool
) -> tuple[np.ndarray, float]:
    """Arrival at and end of each exchange on this rank, and what held its threads up.

    Returns:
        int64 nanoseconds [num_steps, 2]; milliseconds, the median of further exchanges, since
        reading these clocks takes time itself.
    """
    threads = receiving_threads()
    keep_from_preempting(threads, enabled=calm)
    size = peer_bytes // _FLOAT_BYTES
    world_size = process.collectives.world_size
    given, taken = torch.ones(size * world_size), torch.empty(size * world_size)
    times = []
    for _ in range(_WARMUP + num_steps):
        dist.barrier()
        arrival_ns = time.monotonic_ns()
        dist.all_to_all_single(taken, given)
        times.append((arrival_ns, time.monotonic_ns()))
    delays_ns = []
    for _ in range(NUM_READ):
        dist.barrier()
        before = read_clocks(threads)
        dist.all_to_all_single(taken, given)
        delays_ns.append(held_up_ns(before, read_clocks(threads)))
    held_up_ms = float(np.median(delays_ns)) / _NS_PER_MS
    return np.array(times[_WARMUP:], dtype=np.int64), held_up_ms


def compare(
    group: WorkerGroup, peer_bytes: int, num_rounds: int, num_steps: int
) -> dict[bool, Spent]:
    """What exchanges took, by setting."""
    spent = {False: Spent(), True: Spent()}
    for number in range(num_rounds):
        for calm in (False, True) if number % 2 else (True, False):
            of_ranks, held_up_ms = zip(*group.run(stamps, peer_bytes, num_steps, calm), strict=True)
            arrivals, ends = np.moveaxis(np.stack(of_ranks), 2, 0)
            taken = ends.max(axis=0) - arrivals.max(axis=0)
            spent[calm].rounds_ms.append((taken / _NS_PER_MS).tolist())
            spent[calm].held_up_ms.append(max(held_up_ms))
    return spent


@contextmanager
def busy_core() -> Iterator[None]:
    """Another process that computes on the first core, as long as the context is open."""
    process = multiprocessing.get_context("spawn").Process(target=_compute, daemon=True)
    process.start()
    try:
        yield
    finally:
        process.kill()
        process.join()


def _compute() -> None:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    parent = os.getppid()
    while os.getppid() == parent:
        sum(range(10_000))


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,3,4,8", help="numbers of ranks (default: 2,3,4,8)")
    parser.add_argument("--kib", default="1,64,1024", help="KiB to each peer (default: 1,64,1024)")
    parser.add_argument("--rounds", type=int, default=10, help="of every case (default: 10)")
    parser.add_argument("--steps", type=int, default=40, help="exchanges per round and setting")
    parser.add_argument(
        "--busy", action="store_true", help="beside a process that computes on the first core"
    )
    options = parser.parse_args(arguments)
    try:
        ranks = _counts("--ranks", options.ranks, least=2)
        kib = _counts("--kib", options.kib, least=1)
        if options.rounds < 1 or options.steps < 1:
            raise InputError(
                "--rounds and --steps are not usable",
                got=f"{options.rounds}, {options.steps}",
                allowed=">= 1",
            )
        with busy_core() if options.busy else nullcontext():
            _show(ranks, kib, options.rounds, options.steps)
    except AutoshardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _show(ranks: list[int], kib: list[int], num_rounds: int, num_steps: int) -> None:
    table = Table(title="All-to-alls, ms: gloo's receiving threads as they are, and calm")
    columns = ("ranks", "KiB", "as is", "p80", "calm", "p80", "calm / as is [95%]", "held up")
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    for world_size in track(ranks, description="exchanging", transient=True):
        with WorkerGroup(world_size) as group:
            for size in kib:
                spent = compare(group, size * 1024, num_rounds, num_steps)
                as_is, calm = spent[False].rounds_ms, spent[True].rounds_ms
                medians = [
                    f"{value:.2f}"
                    for rounds in (as_is, calm)
                    for value in (median_ms(rounds), percentile_ms(rounds, 80))
                ]
                held_up = f"{np.median(spent[True].held_up_ms):.2f}"
                ratio = ratio_of_medians(calm, as_is)
                table.add_row(str(world_size), f"{size:,}", *medians, str(ratio), held_up)
    Console().print(table)


def _counts(option: str, given: str, *, least: int) -> list[int]:
    """The numbers of a comma-separated option."""
    try:
        counts = [parse_integer(part) for part in given.split(",")]
    except ValueError:
        counts = []
    if not counts or min(counts) < least:
        raise InputError(
            f"{option} is not usable", got=given, allowed=f"integers >= {least}, with commas"
        )
    return counts


if __name__ == "__main__":
    sys.exit(main())
