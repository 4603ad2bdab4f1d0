"""What every test process needs before its first test."""

from __future__ import annotations

import signal


def pytest_configure() -> None:
    """Heed Ctrl-C, and so do children: a shell starts what runs in its background without that."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)
