"""Worker processes that measure, and what happens when one fails.

Workers are spawned, get one task at a time and answer it. An exception, a signal, an
exit or silence beyond the time limit ends the run with a `WorkerError` that says which;
the other workers are then ended too. A worker whose parent is gone ends by itself.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
import traceback
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from typing import Any

from autoshard.errors import WorkerError
from autoshard.interrupts import held_back_from_children

#: Importing torch and FBGEMM on a busy machine; far beyond what was ever seen.
START_LIMIT_S = 180.0
_POLL_S = 0.5
_END_LIMIT_S = 2.0
_NO_TASK = object()

#: Called with the worker's number in the worker; returns what answers the tasks.
HandlerFactory = Callable[[int], Callable[[Any], Any]]


@dataclass
class _Worker:
    number: int
    process: SpawnProcess
    connection: Connection
    task: Any = None
    deadline_s: float = 0.0
    is_ready: bool = False
    is_busy: bool = True
    """Starting counts as busy."""


def run_tasks(
    make_handler: HandlerFactory,
    tasks: Iterable[Any],
    *,
    num_workers: int,
    time_limit_s: float,
    on_idle: Callable[[], None] = lambda: None,
) -> Generator[tuple[Any, Any], None, None]:
    """Answer tasks in worker processes.

    Args:
        make_handler: picklable.
        tasks: picklable; drawn and handed out in order, one ahead of the workers.
        num_workers: processes.
        time_limit_s: for one task.
        on_idle: called about twice a second.

    Yields:
        (task, answer), in the order of the answers.

    Raises:
        WorkerError: a worker failed, died or took too long.
    """
    pending = iter(tasks)
    upcoming = next(pending, _NO_TASK)
    if upcoming is _NO_TASK:
        return
    context = multiprocessing.get_context("spawn")
    workers: list[_Worker] = []
    try:
        for number in range(num_workers):
            ours, theirs = context.Pipe()
            process = context.Process(
                target=_work, args=(theirs, make_handler, number), daemon=True
            )
            with held_back_from_children():
                process.start()
            theirs.close()
            workers.append(
                _Worker(number, process, ours, deadline_s=time.monotonic() + START_LIMIT_S)
            )
        while upcoming is not _NO_TASK or any(worker.is_busy for worker in workers):
            for worker in workers:
                if upcoming is not _NO_TASK and not worker.is_busy:
                    worker.task, worker.is_busy = upcoming, True
                    worker.deadline_s = time.monotonic() + time_limit_s
                    _hand_out(worker)
                    upcoming = next(pending, _NO_TASK)
            wait(
                [w.connection for w in workers] + [w.process.sentinel for w in workers],
                timeout=_POLL_S,
            )
            for worker in workers:
                if worker.connection.poll():
                    answer = _receive(worker)
                    task, worker.is_busy = worker.task, False
                    if worker.is_ready:
                        yield task, answer
                    worker.is_ready = True
                elif not worker.process.is_alive():
                    raise _death(worker)
                elif worker.is_busy and time.monotonic() > worker.deadline_s:
                    raise WorkerError(
                        f"measuring worker {worker.number} (pid {worker.process.pid}) "
                        "did not answer in time",
                        got=_shown(worker.task) if worker.is_ready else "still starting",
                        allowed=f"{time_limit_s if worker.is_ready else START_LIMIT_S} s",
                        remedy="raise item_time_limit_s, or lower the measuring budget",
                    )
            on_idle()
        for worker in workers:
            worker.connection.send(None)
            worker.process.join(_END_LIMIT_S)
    finally:
        end_processes([worker.process for worker in workers])
        for worker in workers:
            worker.connection.close()


def end_processes(processes: Sequence[SpawnProcess]) -> None:
    """End processes that this one started: ask first, then kill."""
    for process in processes:
        if process.is_alive():
            process.terminate()
    deadline_s = time.monotonic() + _END_LIMIT_S
    for process in processes:
        process.join(max(0.0, deadline_s - time.monotonic()))
        if process.is_alive():
            process.kill()
            process.join()


def describe_exit(exit_code: int | None) -> str:
    """How a process ended, in words."""
    if exit_code is None:
        return "still running"
    if exit_code < 0:
        try:
            return f"killed by {signal.Signals(-exit_code).name}"
        except ValueError:
            return f"killed by signal {-exit_code}"
    return f"exited with code {exit_code}"


def _hand_out(worker: _Worker) -> None:
    try:
        worker.connection.send(worker.task)
    except OSError as error:
        worker.process.join(_END_LIMIT_S)
        raise _death(worker) from error


def _receive(worker: _Worker) -> Any:
    try:
        kind, value = worker.connection.recv()
    except (EOFError, OSError) as error:
        worker.process.join(_END_LIMIT_S)
        raise _death(worker) from error
    if kind == "failed":
        raise WorkerError(
            f"measuring worker {worker.number} (pid {worker.process.pid}) failed"
            + (f" at {_shown(worker.task)}" if worker.is_ready else " while starting")
            + f"\n{value}"
        )
    return value


def _death(worker: _Worker) -> WorkerError:
    ended = describe_exit(worker.process.exitcode)
    out_of_memory = worker.process.exitcode == -signal.SIGKILL
    return WorkerError(
        f"measuring worker {worker.number} (pid {worker.process.pid}) died: {ended}",
        got=_shown(worker.task) if worker.is_ready else "still starting",
        remedy=(
            "if the system ran out of memory, lower arena_bytes or workers; then run again: "
            if out_of_memory
            else "run again: "
        )
        + "finished rows are kept",
    )


def _shown(task: Any) -> str:
    text = str(task)
    return text if len(text) <= 120 else f"{text[:117]}..."


def _work(connection: Connection, make_handler: HandlerFactory, number: int) -> None:
    """The worker's side: answer tasks until told to stop, or until the parent is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers itself
    try:
        handler = make_handler(number)
        connection.send(("done", None))
        while (task := connection.recv()) is not None:
            connection.send(("done", handler(task)))
    except (EOFError, BrokenPipeError, ConnectionResetError):
        return
    except Exception:
        connection.send(("failed", traceback.format_exc()))
