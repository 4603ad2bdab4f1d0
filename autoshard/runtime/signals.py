"""Lets a program that started processes end them when it is told to end itself.

Python's default for SIGTERM is to stop at once: no `finally` runs, and folders in /tmp stay.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType

_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextlib.contextmanager
def ended_in_order() -> Iterator[None]:
    """Turn the first SIGINT, SIGTERM or SIGHUP into an exception, and ignore those after it.

    So the clean-up on the way out is not interrupted; it has time limits of its own. Does
    nothing outside of the main thread, where Python allows no handlers.

    Raises:
        KeyboardInterrupt: SIGINT came.
        SystemExit: another one came; with code 128 + its number, as shells say it.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def end(number: int, frame: FrameType | None) -> None:
        for other in handled:
            signal.signal(other, signal.SIG_IGN)
        if number == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + number)

    # What was ignored before, as under nohup, stays so.
    handled = [number for number in _SIGNALS if signal.getsignal(number) is not signal.SIG_IGN]
    before = {number: signal.signal(number, end) for number in handled}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
