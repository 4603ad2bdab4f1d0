"""Puts the clocks of several hosts on one scale.

Processes of one host share CLOCK_MONOTONIC, so their readings compare directly. Across
hosts, rank 0 asks every rank for its reading many times; the answer with the shortest
round trip bounds the offset best (Cristian's algorithm), to within half that round trip.
Offsets drift by some microseconds per second, so they hold for runs of seconds.
"""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.distributed as dist

from autoshard.runtime.collectives import Collectives

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def host_identity() -> str:
    """Equal for processes that share a monotonic clock."""
    try:
        return _BOOT_ID.read_text(encoding="ascii").strip()
    except OSError:
        import socket

        return socket.gethostname()


def clock_offsets_ns(collectives: Collectives, *, num_rounds: int = 32) -> list[int]:
    """What each rank's clock shows ahead of rank 0's, [R]; all 0 on one host.

    Every rank must call it.

    Raises:
        CollectiveError: the ranks did not answer in time.
    """
    hosts = collectives.gather_objects("host names", host_identity())
    if len(set(hosts)) == 1:
        return [0] * collectives.world_size
    return measure_offsets_ns(collectives, num_rounds=num_rounds)


def measure_offsets_ns(collectives: Collectives, *, num_rounds: int = 32) -> list[int]:
    """The ping-pong behind `clock_offsets_ns`, whichever hosts the ranks are on."""
    offset = 0
    buffer = torch.zeros(1, dtype=torch.int64, device=collectives.device)
    for rank in range(1, collectives.world_size):
        if collectives.rank == rank:
            for _ in range(num_rounds):
                dist.recv(buffer, src=0)
                buffer.fill_(time.monotonic_ns())
                dist.send(buffer, dst=0)
        elif collectives.rank == 0:
            best_round_trip = None
            for _ in range(num_rounds):
                start = time.monotonic_ns()
                dist.send(buffer, dst=rank)
                dist.recv(buffer, src=rank)
                end = time.monotonic_ns()
                if best_round_trip is None or end - start < best_round_trip:
                    best_round_trip = end - start
                    offset = int(buffer) - (start + end) // 2
            dist.send(torch.tensor([offset], device=collectives.device), dst=rank)
        if collectives.rank == rank:
            dist.recv(buffer, src=0)
            offset = int(buffer)
    own = 0 if collectives.rank == 0 else offset
    return [int(value) for value in collectives.gather_objects("clock offsets", own)]
