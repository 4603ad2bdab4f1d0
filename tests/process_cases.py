"""Child processes that a test started, apart from worker groups that other tests keep open."""

from __future__ import annotations

import multiprocessing
from multiprocessing.process import BaseProcess
from pathlib import Path


class Children:
    """The children there were before; `new()` gives those that came since and still live."""

    def __init__(self) -> None:
        self._before = {child.pid for child in multiprocessing.active_children()}

    def new(self) -> list[BaseProcess]:
        return [c for c in multiprocessing.active_children() if c.pid not in self._before]


def is_running(process_id: int) -> bool:
    """Whether a process has not ended; one that nobody waited for has."""
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
