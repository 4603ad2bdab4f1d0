"""One rank under torchrun: who it is, its process group, and what it says when others die.

torchrun starts the processes and tells each its place by environment variables. On one
node, its agent ends all ranks when one dies, and names it. Ranks of other nodes find out in
their next collective; here they ask each other, through the store that torchrun keeps for
the rendezvous, who is still there, and name who is not.
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from autoshard.errors import InputError, PlanError
from autoshard.plan import ShardingPlan
from autoshard.runtime.allocator import keep_freed_memory
from autoshard.runtime.capabilities import Device
from autoshard.runtime.collectives import (
    CollectiveError,
    close_process_group,
    open_process_group,
)
from autoshard.runtime.group import available_cores
from autoshard.runtime.host_memory import check_host_memory
from autoshard.runtime.launch import check_plan
from autoshard.runtime.results import RunOptions
from autoshard.runtime.together import each
from autoshard.runtime.worker import RankProcess, torch_device

#: Of a collective. A host that vanishes answers nothing, not even an error, and the other
#: ranks are to end within 30 s.
DEFAULT_TIMEOUT_S = 20.0
#: How long the survivors of a failure wait for each other's sign of life.
_ROLL_CALL_S = 3.0
#: Between two lines of progress.
_REPORT_INTERVAL_S = 5.0


@dataclass(frozen=True, kw_only=True)
class TorchrunPlace:
    """A process's place, as torchrun tells it."""

    rank: int
    world_size: int
    local_rank: int
    local_world_size: int

    @classmethod
    def from_environment(cls) -> TorchrunPlace:
        """Read the environment variables.

        Raises:
            InputError: no launcher has set them.
        """
        return cls(
            **{
                name: _from_environment(name.upper())
                for name in ("rank", "world_size", "local_rank", "local_world_size")
            }
        )

    def check(self, plan: ShardingPlan) -> None:
        """Refuse a plan for other ranks or nodes.

        Raises:
            PlanError: it is for another topology.
        """
        topology = plan.topology
        if self.world_size != topology.world_size:
            raise PlanError(
                "the plan is for another number of ranks",
                got=f"{self.world_size} processes",
                allowed=f"{topology.world_size}, the plan's world_size",
                remedy="give torchrun that number of processes, or plan for this one",
            )
        if self.local_world_size != topology.local_world_size:
            raise PlanError(
                "the plan is for another number of ranks per node",
                got=f"{self.local_world_size} processes on this node",
                allowed=f"{topology.local_world_size}, the plan's local_world_size",
                remedy=f"start torchrun with --nproc-per-node {topology.local_world_size}, or "
                f"plan with --local-world-size {self.local_world_size}",
            )


@contextlib.contextmanager
def torchrun_rank(plan: ShardingPlan, options: RunOptions) -> Iterator[RankProcess]:
    """Join the other ranks; leave them at the end.

    Args:
        plan: that will be run; checked against the launcher's ranks and nodes, and against
            the memory of every machine.
        options: device and time limit.

    Raises:
        AutoshardError: the plan cannot be run here.
        CollectiveError: a rank died or did not answer in time; the error names the ranks
            from which nothing is heard.
    """
    ledgers = check_plan(plan, options)
    place = TorchrunPlace.from_environment()
    place.check(plan)
    torch.set_num_threads(1)
    keep_freed_memory()
    store: dist.Store | None = None
    try:
        collectives = open_process_group(
            place.rank,
            place.world_size,
            init_method="env://",
            device=torch_device(options.device, place.local_rank),
            timeout_s=options.timeout_s,
        )
        if place.world_size > 1:
            store = _store(options.timeout_s)
            store.set(f"here/{place.rank}", f"{socket.gethostname()}, process {os.getpid()}")
        oversubscribed = any(
            collectives.gather_objects("cores", place.local_world_size > len(available_cores()))
        )
        process = RankProcess(collectives, oversubscribed, _reporter(place.rank))
        if options.device is Device.CPU:
            first = place.rank - place.local_rank
            own = ledgers[first : first + place.local_world_size]
            each(process.patient_collectives(), "checking memory", lambda: check_host_memory(own))
        yield process
        close_process_group()
    except CollectiveError as error:
        silent = [] if store is None else _silent_ranks(store, place)
        if not silent:
            raise
        raise CollectiveError(
            f"{error.what}; nothing is heard from {', '.join(silent)}",
            got=error.got,
            remedy="look there for the cause; a rank that died takes all others down",
        ) from error


def leave(code: int) -> None:
    """End this process; at once if it failed, because a process group waits for dead peers."""
    if code and dist.is_initialized():
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def _silent_ranks(store: dist.Store, place: TorchrunPlace) -> list[str]:
    """The ranks that give no sign of life after a failure, as text."""
    try:
        store.set(f"alive/{place.rank}", "")
        waiting = set(range(place.world_size)) - {place.rank}
        deadline = time.monotonic() + _ROLL_CALL_S
        while waiting and time.monotonic() < deadline:
            waiting = {rank for rank in waiting if not store.check([f"alive/{rank}"])}
            time.sleep(0.05)
        return [f"rank {r} ({store.get(f'here/{r}').decode()})" for r in sorted(waiting)]
    except (RuntimeError, ConnectionError):  # torch's store errors are RuntimeErrors
        return ["the node that keeps the rendezvous, and so maybe all of its ranks"]


def _store(timeout_s: float) -> dist.Store:
    """A connection of our own to the store of the rendezvous."""
    store, _, _ = next(dist.rendezvous("env://", timeout=timedelta(seconds=timeout_s)))
    return dist.PrefixStore("autoshard", store)


def _reporter(rank: int) -> Callable[[str], None]:
    last = time.monotonic()

    def report(line: str) -> None:
        nonlocal last
        if rank == 0 and time.monotonic() - last >= _REPORT_INTERVAL_S:
            last = time.monotonic()
            print(line, file=sys.stderr, flush=True)

    return report


def _from_environment(name: str) -> int:
    value = os.environ.get(name, "")
    if not (value.isascii() and value.isdigit()):
        raise InputError(
            f"the environment variable {name} is not set by a launcher",
            got=value or None,
            remedy="start with torchrun, or use autoshard run",
        )
    return int(value)
