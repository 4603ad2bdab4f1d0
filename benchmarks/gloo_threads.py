"""What gloo's receiving threads do to an exchange, and what keeping them from preempting gains.

    python -m benchmarks.gloo_threads                   # 2, 3, 4 and 8 ranks, about a minute
    python -m benchmarks.gloo_threads --ranks 2 --kib 1,1024

All-to-alls of equal sizes between ranks that are pinned to a core each, as far as there are
cores. Both settings (`autoshard/runtime/gloo_threads.py`) take turns within a round, in the
same processes. An exchange takes from the last rank's arrival to the last rank's end; shown
are KiB to each rank, medians, 80th percentiles, and the ratio of medians with its 95% bootstrap
interval over rounds.
"""

from __future__ import annotations

import argparse
import sys
import time

import numpy as np
import torch
import torch.distributed as dist
from rich.console import Console
from rich.progress import track
from rich.table import Table

from autoshard.errors import AutoshardError, InputError
from autoshard.number_text import parse_integer
from autoshard.runtime.gloo_threads import keep_from_preempting, receiving_threads
from autoshard.runtime.group import WorkerGroup
from autoshard.runtime.worker import RankProcess
from benchmarks.runtime_speed.statistics import median_ms, percentile_ms, ratio_of_medians

_WARMUP = 3
_NS_PER_MS = 1e6
_FLOAT_BYTES = 4


def stamps(process: RankProcess, peer_bytes: int, num_steps: int, calm: bool) -> np.ndarray:
    """Arrival at and end of each exchange on this rank, int64 nanoseconds [num_steps, 2]."""
    keep_from_preempting(receiving_threads(), enabled=calm)
    size = peer_bytes // _FLOAT_BYTES
    world_size = process.collectives.world_size
    given, taken = torch.ones(size * world_size), torch.empty(size * world_size)
    times = []
    for _ in range(_WARMUP + num_steps):
        dist.barrier()
        arrival_ns = time.monotonic_ns()
        dist.all_to_all_single(taken, given)
        times.append((arrival_ns, time.monotonic_ns()))
    return np.array(times[_WARMUP:], dtype=np.int64)


def compare(
    group: WorkerGroup, peer_bytes: int, num_rounds: int, num_steps: int
) -> dict[bool, list[list[float]]]:
    """Milliseconds of every exchange, by setting and round."""
    spent: dict[bool, list[list[float]]] = {False: [], True: []}
    for number in range(num_rounds):
        for calm in (False, True) if number % 2 else (True, False):
            of_ranks = np.stack(group.run(stamps, peer_bytes, num_steps, calm))
            taken = of_ranks[:, :, 1].max(axis=0) - of_ranks[:, :, 0].max(axis=0)
            spent[calm].append((taken / _NS_PER_MS).tolist())
    return spent


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison; the exit code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", default="2,3,4,8", help="numbers of ranks (default: 2,3,4,8)")
    parser.add_argument("--kib", default="1,64,1024", help="KiB to each peer (default: 1,64,1024)")
    parser.add_argument("--rounds", type=int, default=10, help="of every case (default: 10)")
    parser.add_argument("--steps", type=int, default=40, help="exchanges per round and setting")
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
        _show(ranks, kib, options.rounds, options.steps)
    except AutoshardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _show(ranks: list[int], kib: list[int], num_rounds: int, num_steps: int) -> None:
    table = Table(title="All-to-alls, ms: gloo's receiving threads as they are, and calm")
    for column in ("ranks", "KiB", "as is", "p80", "calm", "p80", "calm / as is [95%]"):
        table.add_column(column, justify="right", no_wrap=True)
    for world_size in track(ranks, description="exchanging", transient=True):
        with WorkerGroup(world_size) as group:
            for size in kib:
                spent = compare(group, size * 1024, num_rounds, num_steps)
                medians = [
                    f"{value:.2f}"
                    for calm in (False, True)
                    for value in (median_ms(spent[calm]), percentile_ms(spent[calm], 80))
                ]
                ratio = ratio_of_medians(spent[True], spent[False])
                table.add_row(str(world_size), f"{size:,}", *medians, str(ratio))
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
