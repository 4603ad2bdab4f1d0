"""A group of local worker processes that stays up while many things are run on it.

The parent watches all of them: the first that fails or dies ends the others, and the
error says which one it was and why. Whatever happens, no process outlives the group.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from autoshard import errors
from autoshard.errors import AutoshardError, InputError, WorkerError
from autoshard.interrupts import held_back_from_children
from autoshard.runtime.capabilities import Device
from autoshard.runtime.collectives import DEFAULT_TIMEOUT_S, CollectiveError
from autoshard.runtime.collectives import stall_timeout_s as default_stall_timeout_s
from autoshard.runtime.serve import WorkerSpec, serve

#: After the first failure, how long other ranks may take to tell theirs.
_GRACE_S = 2.0
#: After asking a process to end, how long until it is killed.
_TERMINATE_S = 2.0

Progress = Callable[[int, str], None]
"""Called in the parent with a rank and a line that says what it does."""


def available_cores() -> list[int]:
    """The cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


class WorkerGroup:
    """W spawned processes with one process group; a context manager."""

    def __init__(
        self,
        world_size: int,
        *,
        device: Device = Device.CPU,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        pin_cores: bool = True,
        stall_timeout_s: float | None = None,
    ) -> None:
        """Describe the group; `__enter__` starts it.

        Args:
            world_size: number of processes.
            device: where tables live.
            timeout_s: of every collective, and of the rendezvous.
            pin_cores: give each rank a core of its own, if there are enough.
            stall_timeout_s: how long all ranks may stay silent before the group is
                given up; five collective timeouts and at least 300 s by default.
        """
        if isinstance(world_size, bool) or not isinstance(world_size, int) or world_size < 1:
            raise InputError("world_size is not usable", got=world_size, allowed="integers >= 1")
        self.world_size = world_size
        self._device = device
        self._timeout_s = timeout_s
        self._stall_timeout_s = stall_timeout_s or default_stall_timeout_s(timeout_s)
        cores = available_cores()
        self.oversubscribed = world_size > len(cores)
        self._cores = cores if pin_cores and not self.oversubscribed else None
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._connections: list[Connection] = []
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._last_report = [""] * world_size

    def __enter__(self) -> WorkerGroup:
        self._folder = tempfile.TemporaryDirectory(prefix="autoshard-")
        context = multiprocessing.get_context("spawn")
        try:
            with _single_threaded_children():
                for rank in range(self.world_size):
                    parent, child = context.Pipe()
                    spec = WorkerSpec(
                        rank=rank,
                        world_size=self.world_size,
                        device=self._device,
                        timeout_s=self._timeout_s,
                        store=str(Path(self._folder.name) / "rendezvous"),
                        core=None if self._cores is None else self._cores[rank],
                        oversubscribed=self.oversubscribed,
                    )
                    process = context.Process(
                        target=serve, args=(spec, child), name=f"rank{rank}", daemon=True
                    )
                    with held_back_from_children():
                        process.start()
                    child.close()
                    self._processes.append(process)
                    self._connections.append(parent)
            self._collect(None)
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the ranks, in order; empty once the group is closed."""
        return tuple(process.pid or 0 for process in self._processes)

    def run(
        self,
        function: Callable[..., Any],
        *arguments: Any,
        progress: Progress | None = None,
    ) -> list[Any]:
        """Run `function(process, *arguments)` on every rank.

        Args:
            function: importable by name in the workers; gets a `RankProcess`.
            arguments: picklable, the same for every rank.
            progress: called with what the ranks report.

        Returns:
            What each rank returned.

        Raises:
            AutoshardError: of the kind and with the text that the failing rank raised.
            WorkerError: a rank died, failed unexpectedly or fell silent.
        """
        if not self._connections:
            raise WorkerError("the worker group is closed", remedy="start a new one")
        try:
            for connection in self._connections:
                with contextlib.suppress(OSError):  # a dead rank is reported below
                    connection.send((function, arguments))
            return self._collect(progress)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End all processes of the group, by force where needed."""
        for connection in self._connections:
            connection.close()
        _end(self._processes)
        self._processes, self._connections = [], []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None

    def _collect(self, progress: Progress | None) -> list[Any]:
        """Wait for one answer of every rank; raise the root cause if one fails."""
        answers: dict[int, Any] = {}
        failures: dict[int, Exception] = {}
        deadline = time.monotonic() + self._stall_timeout_s
        while len(answers) + len(failures) < self.world_size:
            open_ranks = [
                r for r in range(self.world_size) if r not in answers and r not in failures
            ]
            waited = {self._connections[r]: r for r in open_ranks}
            ready = wait(list(waited), timeout=max(0.0, deadline - time.monotonic()))
            if not ready:
                if failures:
                    break
                raise self._stalled(open_ranks)
            for connection in ready:
                rank = waited[connection]  # type: ignore[index]
                try:
                    kind, value = self._connections[rank].recv()
                except (EOFError, OSError):
                    failures[rank] = self._death(rank)
                else:
                    if kind == "progress":
                        self._last_report[rank] = value
                        if progress is not None:
                            progress(rank, value)
                    elif kind == "done":
                        answers[rank] = value
                    else:
                        failures[rank] = _rebuilt(rank, *value)
            grace = _GRACE_S if failures else self._stall_timeout_s
            deadline = (
                min(deadline, time.monotonic() + grace) if failures else (time.monotonic() + grace)
            )
        if failures:
            heard_from = answers.keys() | failures.keys()
            silent = [rank for rank in range(self.world_size) if rank not in heard_from]
            raise self._root_cause(failures, silent)
        return [answers[rank] for rank in range(self.world_size)]

    def _death(self, rank: int) -> WorkerError:
        process = self._processes[rank]
        process.join(_TERMINATE_S)
        code = process.exitcode
        if code is not None and code < 0:
            how = f"was killed by {signal.Signals(-code).name}"
        elif code is None:
            how = "closed its connection"
        else:
            how = f"ended with exit code {code}"
        last = self._last_report[rank]
        return _DeathError(
            f"rank {rank} (process {process.pid}) {how}" + (f" after: {last}" if last else ""),
            remedy=(
                "the kernel kills processes when memory runs out: check its log"
                if code == -signal.SIGKILL
                else "run it again; if it repeats, report it with the plan"
            ),
        )

    def _root_cause(self, failures: dict[int, Exception], silent: Sequence[int]) -> Exception:
        """What the other failures follow from: a death, an error that is no echo, a silence."""
        ordered = [failures[rank] for rank in sorted(failures)]
        for error in ordered:
            if isinstance(error, _DeathError):
                return error
        for error in ordered:
            if not isinstance(error, CollectiveError):
                return error
        if not silent:
            return ordered[0]
        # What fails on one rank fails on all that take part in it.
        return WorkerError(
            f"nothing is heard from {', '.join(map(self._who, silent))}",
            got=f"from another rank: {str(ordered[0]).partition('; got: ')[0]}",
            remedy="look there for what it waits for, or for who stopped it",
        )

    def _who(self, rank: int) -> str:
        """A silent rank: its process, what the kernel says of it, and its last report."""
        process_id, last = self._processes[rank].pid, self._last_report[rank]
        state = _process_state(process_id) if process_id else ""
        return f"rank {rank} (process {process_id}{state and f', {state}'})" + (
            f" after: {last}" if last else ""
        )

    def _stalled(self, ranks: Sequence[int]) -> WorkerError:
        return WorkerError(
            f"no rank answered for {self._stall_timeout_s:g} s",
            got=f"silent are {'; '.join(map(self._who, ranks))}",
        )


class _DeathError(WorkerError):
    """A process ended without a word."""


def _process_state(process_id: int) -> str:
    """What a process does, where the kernel tells and it explains a silence."""
    try:
        stat = Path(f"/proc/{process_id}/stat").read_text()
    except OSError:
        return ""
    states = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for a device"}
    return states.get(stat.rpartition(")")[2].split()[0], "")


def _rebuilt(rank: int, kind: str, text: str, trace: str) -> Exception:
    """An exception of a worker, as the parent raises it."""
    if kind == CollectiveError.__name__:
        return CollectiveError(text)
    known = getattr(errors, kind, None)
    if isinstance(known, type) and issubclass(known, AutoshardError):
        return known(text)
    return WorkerError(f"rank {rank} failed: {kind}: {text}\n{trace}")


def _end(processes: Sequence[multiprocessing.process.BaseProcess]) -> None:
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline = time.monotonic() + _TERMINATE_S
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()
        process.close()


@contextlib.contextmanager
def _single_threaded_children() -> Any:
    """Let children start with one thread per library and gloo on the loopback device."""
    wanted = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
