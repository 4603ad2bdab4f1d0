"""Times collectives between processes on this host; the parent's side.

Transfer time runs from the last rank's arrival to the last rank's end: waiting for a late
rank is imbalance, which the objective already counts, and stands apart as `wait_ms`.
One set of processes serves all group sizes, largest first; a failure or silence of any
of them ends all with a `WorkerError` that says which rank did what.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path
from typing import Any

from autoshard.errors import InputError, WorkerError
from autoshard.interrupts import held_back_from_children
from autoshard.measure.collective_ranks import CollectiveTiming, RankSetup, Stage, rank_main
from autoshard.measure.config import CollectiveConfig, real_device
from autoshard.measure.environment import available_cores
from autoshard.measure.traffic_sampling import Traffic
from autoshard.measure.workers import START_LIMIT_S, describe_exit, end_processes
from autoshard.runtime.capabilities import Device

_POLL_S = 0.5
#: Ranks that lose a peer fail too; the first cause is looked for this long.
_CAUSE_LIMIT_S = 2.0


def time_collectives(
    traffics: Sequence[Traffic],
    config: CollectiveConfig,
    *,
    arrival_delay_ms: Sequence[float] = (),
) -> Generator[tuple[Traffic, CollectiveTiming], None, None]:
    """Time collectives, largest groups first.

    Args:
        traffics: what to exchange.
        config: device, repetitions and time limit.
        arrival_delay_ms: makes each rank late by so much; for tests of the clockwork.

    Yields:
        Each collective with its timing.

    Raises:
        InputError: more ranks than GPUs, or the device is simulated.
        WorkerError: a rank failed, died, or an exchange did not end in time.
    """
    if not traffics:
        return
    ordered = tuple(sorted(traffics, key=lambda traffic: -traffic.world_size))
    world_size = ordered[0].world_size
    check_world_size(world_size, real_device(config.device))
    with tempfile.TemporaryDirectory(prefix="autoshard-measure-") as folder:
        setup = RankSetup(
            world_size=world_size,
            store_path=str(Path(folder) / "ranks"),
            config=config,
            traffics=ordered,
            cores=available_cores(),
            arrival_delay_ms=tuple(arrival_delay_ms),
        )
        with closing(_run_ranks(setup)) as timings:
            for position, timing in timings:
                yield ordered[position], timing


def check_world_size(world_size: int, device: Device) -> None:
    """Refuse more ranks than GPUs (the CPU takes any number, marked `oversubscribed`).

    Raises:
        InputError: too few GPUs.
    """
    if device is Device.CPU:
        return
    import torch

    if world_size > torch.cuda.device_count():
        raise InputError(
            "NCCL needs a GPU for each rank",
            got=f"{world_size} ranks, {torch.cuda.device_count()} GPU(s)",
            remedy="lower collectives.world_sizes, or set collectives.device=cpu",
        )


def _run_ranks(setup: RankSetup) -> Generator[tuple[int, CollectiveTiming], None, None]:
    context = multiprocessing.get_context("spawn")
    stages = context.RawArray("q", 2 * setup.world_size)
    processes: list[SpawnProcess] = []
    connections: list[Connection] = []
    try:
        with _loopback():
            for rank in range(setup.world_size):
                ours, theirs = context.Pipe(duplex=False)
                process = context.Process(
                    target=rank_main, args=(rank, setup, stages, theirs), daemon=True
                )
                with held_back_from_children():
                    process.start()
                theirs.close()
                processes.append(process)
                connections.append(ours)
        running = set(range(setup.world_size))
        limit_s = START_LIMIT_S
        deadline_s = time.monotonic() + limit_s
        while running:
            wait(
                [connections[r] for r in running] + [processes[r].sentinel for r in running],
                timeout=_POLL_S,
            )
            for rank in sorted(running):
                message = _receive(connections[rank])
                if message is None and not processes[rank].is_alive():
                    message = _receive(connections[rank])  # its last words
                    if message is None:
                        raise _failure(setup, processes, connections, stages, {})
                if message is None:
                    continue
                kind, value = message
                if kind == "failed":
                    raise _failure(setup, processes, connections, stages, {rank: value})
                if kind == "finished":
                    running.discard(rank)
                else:
                    yield value
                limit_s = setup.config.item_time_limit_s
                deadline_s = time.monotonic() + limit_s
            if running and time.monotonic() > deadline_s:
                raise WorkerError(
                    "a collective did not end in time",
                    got=_describe_stages(setup, stages),
                    allowed=f"{limit_s} s",
                    remedy="look for the rank that is not waiting for the others; "
                    "or raise collectives.item_time_limit_s",
                )
    finally:
        end_processes(processes)
        for connection in connections:
            connection.close()


@contextmanager
def _loopback() -> Iterator[None]:
    """Let gloo use the loopback interface: all ranks are on this host."""
    name, missing = "GLOO_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME" not in os.environ
    if missing and Path("/sys/class/net/lo").exists():
        os.environ[name] = "lo"
    try:
        yield
    finally:
        if missing:
            os.environ.pop(name, None)


def _receive(connection: Connection) -> tuple[str, Any] | None:
    """The next message, or None if there is none (any more)."""
    try:
        return connection.recv() if connection.poll() else None
    except (EOFError, OSError):
        return None


def _failure(
    setup: RankSetup,
    processes: Sequence[SpawnProcess],
    connections: Sequence[Connection],
    stages: Any,
    words: dict[int, tuple[int, str]],
) -> WorkerError:
    """Find the rank that failed first: one that died without a word, if there is one."""
    described = _describe_stages(setup, stages)
    deadline_s = time.monotonic() + _CAUSE_LIMIT_S
    while time.monotonic() < deadline_s and not _silently_dead(processes, words):
        for rank, connection in enumerate(connections):
            message = _receive(connection)
            if message is not None and message[0] == "failed":
                words.setdefault(rank, message[1])
        time.sleep(0.05)
    if dead := _silently_dead(processes, words):
        rank = dead[0]
        how = describe_exit(processes[rank].exitcode)
        return WorkerError(f"rank {rank} died: {how}", got=described)
    if not words:
        return WorkerError("a rank ended without a word", got=described)
    first = min(words, key=lambda rank: words[rank][0])
    return WorkerError(f"rank {first} failed\n{words[first][1]}", got=described)


def _silently_dead(
    processes: Sequence[SpawnProcess], words: Mapping[int, tuple[int, str]]
) -> list[int]:
    """Ranks that were killed or left without saying why."""
    return [
        rank
        for rank, process in enumerate(processes)
        if rank not in words and process.exitcode not in (None, 0, 1, -signal.SIGTERM)
    ]


def _describe_stages(setup: RankSetup, stages: Any) -> str:
    parts = []
    for rank in range(setup.world_size):
        stage = Stage(stages[2 * rank])
        told = f"rank {rank}: {stage.name.lower().replace('_', ' ')}"
        if stage not in (Stage.STARTING, Stage.FINISHED):
            told += f" ({setup.traffics[stages[2 * rank + 1]]})"
        parts.append(told)
    return ", ".join(parts)
