"""The driver's end: starts the ranks of each side and lets one side run at a time."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Set
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from autoshard.errors import WorkerError
from autoshard.runtime.group import available_cores

ROOT = Path(__file__).absolute().parents[2]
#: Of collectives inside the workers.
COLLECTIVE_TIMEOUT_S = 60.0
#: Of any command; building the largest case takes some seconds.
COMMAND_TIMEOUT_S = 180.0
#: After the first failure, how long other ranks may take to tell theirs.
_GRACE_S = 1.0
#: After hanging up, how long until processes are killed.
_CLOSE_S = 2.0


class SideError(WorkerError):
    """A side could not do what it was asked; its processes have been ended."""


class Side:
    """One process per rank, running one Python; a context manager."""

    def __init__(
        self, name: str, *, world_size: int = 2, python: str | None = None, pin_cores: bool = True
    ) -> None:
        """Start the ranks.

        Args:
            name: for errors.
            world_size: ranks.
            python: the interpreter; this one by default.
            pin_cores: give each rank a core of its own, if there are enough.

        Raises:
            SideError: they did not start or not find each other.
        """
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="runtime-speed-")
        folder = Path(self._folder.name)
        cores = available_cores()
        self._world_size = world_size
        self.oversubscribed = world_size > len(cores)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        self._processes: list[subprocess.Popen[bytes]] = []
        self._logs: list[IO[str]] = []
        try:
            self._start(python or sys.executable, folder, environment, cores if pin_cores else [])
            self._collect("start")
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Side:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def process_ids(self) -> tuple[int, ...]:
        """Of the ranks, in order."""
        return tuple(process.pid for process in self._processes)

    @property
    def is_open(self) -> bool:
        """Whether the processes are still there."""
        return bool(self._processes)

    def ask(
        self, command: str, per_rank: list[dict[str, Any]] | None = None, **options: Any
    ) -> Any:
        """Send every rank a command and wait for all answers, [R].

        Args:
            command: a method of `benchmarks.runtime_speed.worker.Worker`.
            per_rank: further options that differ between ranks.
            options: those that do not.

        Raises:
            SideError: a rank failed, died or fell silent; the side is closed.
        """
        if not self._processes:
            raise SideError(f"{self.name}: its processes have ended")
        for rank, process in enumerate(self._processes):
            own = {} if per_rank is None else per_rank[rank]
            line = json.dumps({"command": command, **options, **own}) + "\n"
            assert process.stdin is not None
            try:
                process.stdin.write(line.encode())
                process.stdin.flush()
            except OSError:
                continue  # reported by what follows
        return self._collect(command)

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            if process.stdin is not None:
                try:
                    process.stdin.close()
                except OSError:
                    continue
        deadline = time.monotonic() + _CLOSE_S
        for process in self._processes:
            try:
                process.wait(max(0.0, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            if process.stdout is not None:
                process.stdout.close()
        for log in self._logs:
            log.close()
        self._processes, self._logs = [], []
        self._folder.cleanup()

    def _start(
        self, python: str, folder: Path, environment: dict[str, str], cores: list[int]
    ) -> None:
        world_size = self._world_size
        for rank in range(world_size):
            log = (folder / f"log{rank}").open("w+", encoding="utf-8", errors="replace")
            self._logs.append(log)
            command = [
                python,
                "-m",
                "benchmarks.runtime_speed.worker",
                f"--rank={rank}",
                f"--world-size={world_size}",
                f"--rendezvous={folder / 'rendezvous'}",
                f"--timeout-s={COLLECTIVE_TIMEOUT_S}",
            ]
            if len(cores) >= world_size:
                command.append(f"--core={cores[rank]}")
            try:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment | {"LOCAL_RANK": str(rank), "RANK": str(rank)},
                    cwd=ROOT,
                )
            except OSError as error:
                raise SideError(
                    f"{self.name}: {python} does not start", got=error.strerror
                ) from error
            self._processes.append(process)

    def _collect(self, command: str) -> list[Any]:
        """Wait for one answer of every rank; raise the root cause if one fails."""
        answers: dict[int, Any] = {}
        failures: dict[int, str] = {}
        died: dict[int, str] = {}
        deadline = time.monotonic() + COMMAND_TIMEOUT_S
        while waiting := self._streams(answers.keys() | failures.keys() | died.keys()):
            left_s = max(0.0, deadline - time.monotonic())
            ready, _, _ = select.select(list(waiting), [], [], left_s)
            if not ready:
                break
            for stream in ready:
                rank = waiting[stream]
                line = stream.readline()
                if not line.endswith(b"\n"):  # nothing, or what a kill cut off
                    died[rank] = f"rank {rank} {self._end_of(rank)}"
                    continue
                reply = json.loads(line)
                if "error" in reply:
                    failures[rank] = f"rank {rank}: {reply['error']}"
                else:
                    answers[rank] = reply["ok"]
            if failures or died:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
        if len(answers) < len(self._processes):
            silent = sorted(set(range(len(self._processes))) - answers.keys())
            self.close()
            # Others fail because their peer died, and say so; the death is the cause.
            causes = [*died.values(), *failures.values()]
            causes.append(f"no answer of rank {silent[0]} within {COMMAND_TIMEOUT_S:g} s")
            raise SideError(f"{self.name}: {command}: {causes[0]}")
        return [answers[rank] for rank in range(len(self._processes))]

    def _streams(self, heard: Set[int]) -> dict[IO[bytes], int]:
        """Of the ranks that have not been heard yet."""
        return {
            process.stdout: rank
            for rank, process in enumerate(self._processes)
            if rank not in heard and process.stdout is not None
        }

    def _end_of(self, rank: int) -> str:
        """How a process ended that did not answer."""
        try:
            code = self._processes[rank].wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            return "hung up"
        how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        if code < 0 and -code != signal.SIGABRT:
            return how
        # Whoever aborts says why last.
        log = self._logs[rank]
        log.flush()
        log.seek(0)
        last = next((line for line in reversed(log.read().splitlines()) if line.strip()), "")
        return f"{how}: {last.strip()}" if last else how
