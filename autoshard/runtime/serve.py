"""The child's side of a worker group: joins, runs what it is asked, tells its failures."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path

from autoshard.runtime.allocator import keep_freed_memory
from autoshard.runtime.capabilities import Device
from autoshard.runtime.collectives import close_process_group, open_process_group
from autoshard.runtime.worker import RankProcess, torch_device

#: Progress lines are sent at most this often.
_REPORT_INTERVAL_S = 0.1


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What a worker process is told when it starts."""

    rank: int
    world_size: int
    device: Device
    timeout_s: float
    store: str
    """Path of the rendezvous file, in a folder of its own."""
    core: int | None
    """The core to stay on; None for any."""
    oversubscribed: bool
    """Whether there are more ranks than cores."""


def serve(spec: WorkerSpec, connection: Connection) -> None:
    """The main function of a worker process: run what is asked until the parent hangs up."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends its workers itself
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    threading.Thread(target=_follow_parent, args=(spec,), daemon=True).start()
    if spec.core is not None and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {spec.core})
    import torch

    torch.set_num_threads(1)
    keep_freed_memory()
    try:
        device = torch_device(spec.device, spec.rank)
        collectives = open_process_group(
            spec.rank,
            spec.world_size,
            init_method=f"file://{spec.store}",
            device=device,
            timeout_s=spec.timeout_s,
        )
        connection.send(("done", None))
        process = RankProcess(collectives, spec.oversubscribed, _reporter(connection))
        while True:
            try:
                function, arguments = connection.recv()
            except EOFError:
                break
            connection.send(("done", function(process, *arguments)))
    except Exception as error:
        text = str(error)
        with contextlib.suppress(OSError):
            connection.send(("failed", (type(error).__name__, text, traceback.format_exc())))
        # Leave before the process group's destructors, which may wait for dead peers.
        connection.close()
        os._exit(1)
    close_process_group()


def _reporter(connection: Connection) -> Callable[[str], None]:
    last = 0.0

    def report(line: str) -> None:
        nonlocal last
        now = time.monotonic()
        if now - last >= _REPORT_INTERVAL_S:
            last = now
            connection.send(("progress", line))

    return report


def _follow_parent(spec: WorkerSpec) -> None:
    """End this process when its parent ends, however that happens, and clear up after it."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        shutil.rmtree(Path(spec.store).parent, ignore_errors=True)
        os._exit(1)
