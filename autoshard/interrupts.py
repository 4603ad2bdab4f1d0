"""Ctrl-C, which a terminal sends to all processes at once: the one that started others answers."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator


@contextlib.contextmanager
def held_back_from_children() -> Iterator[None]:
    """Processes that are started within never see SIGINT; one that comes meanwhile is not lost.

    Children inherit the mask from their first instruction on, before they could ignore the signal
    themselves: without it, each would print a traceback from the middle of its imports.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
