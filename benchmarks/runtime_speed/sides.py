"""The driver's end: starts the ranks of each side and lets one side run at a time."""

from __future__ import annotations

import json
import os
import select
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from autoshard.errors import WorkerError
from autoshard.runtime.group import available_cores

ROOT = Path(__file__).absolute().parents[2]
#: Of collectives inside the workers.
COLLECTIVE_TIMEOUT_S = 60.0
#: Of any command; building the largest case takes some seconds.
COMMAND_TIMEOUT_S = 180.0
_TAIL_CHARACTERS = 1500


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
            SideError: they did not find each other.
        """
        self.name = name
        self._folder = tempfile.TemporaryDirectory(prefix="runtime-speed-")
        folder = Path(self._folder.name)
        cores = available_cores()
        self.oversubscribed = world_size > len(cores)
        environment = {
            **os.environ,
            "OMP_NUM_THREADS": "1",
            "MKL_NUM_THREADS": "1",
            "GLOO_SOCKET_IFNAME": "lo",
            "PYTHONPATH": str(ROOT),
            "LOCAL_WORLD_SIZE": str(world_size),
        }
        self._processes = []
        self._logs = []
        for rank in range(world_size):
            log = (folder / f"log{rank}").open("w+", encoding="utf-8", errors="replace")
            command = [
                python or sys.executable,
                "-m",
                "benchmarks.runtime_speed.worker",
                f"--rank={rank}",
                f"--world-size={world_size}",
                f"--rendezvous={folder / 'rendezvous'}",
                f"--timeout-s={COLLECTIVE_TIMEOUT_S}",
            ]
            if pin_cores and not self.oversubscribed:
                command.append(f"--core={cores[rank]}")
            self._processes.append(
                subprocess.Popen(
                    command,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    stderr=log,
                    env=environment | {"LOCAL_RANK": str(rank), "RANK": str(rank)},
                    cwd=ROOT,
                )
            )
            self._logs.append(log)
        self._collect("start")

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
        deadline = time.monotonic() + 2.0
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

    def _collect(self, command: str) -> list[Any]:
        answers: dict[int, Any] = {}
        deadline = time.monotonic() + COMMAND_TIMEOUT_S
        while len(answers) < len(self._processes):
            waiting = {
                process.stdout: rank
                for rank, process in enumerate(self._processes)
                if rank not in answers and process.stdout is not None
            }
            ready, _, _ = select.select(
                list(waiting), [], [], max(0.0, deadline - time.monotonic())
            )
            if not ready:
                raise self._failed(command, f"no answer within {COMMAND_TIMEOUT_S:g} s")
            for stream in ready:
                rank = waiting[stream]
                line = stream.readline()
                if not line:
                    raise self._failed(command, f"rank {rank} ended")
                reply = json.loads(line)
                if "error" in reply:
                    raise self._failed(command, f"rank {rank}: {reply['error']}")
                answers[rank] = reply["ok"]
        return [answers[rank] for rank in range(len(self._processes))]

    def _failed(self, command: str, reason: str) -> SideError:
        tails = []
        for log in self._logs:
            log.flush()
            log.seek(0)
            tails.append(log.read()[-_TAIL_CHARACTERS:].strip())
        self.close()
        tail = next((text for text in tails if text), "")
        return SideError(f"{self.name}: {command}: {reason}", got=tail or None)
