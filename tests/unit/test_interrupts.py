"""Ctrl-C reaches the process that started others, and only that one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from autoshard.interrupts import held_back_from_children

IS_BLOCKED = "import signal; print(signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, []))"


def is_blocked_in_a_child() -> bool:
    told = subprocess.run(
        [sys.executable, "-c", IS_BLOCKED], capture_output=True, text=True, check=True, timeout=60
    )
    return told.stdout.strip() == "True"


def test_children_started_within_never_see_it() -> None:
    assert not is_blocked_in_a_child()
    with held_back_from_children():
        assert is_blocked_in_a_child()
    assert not is_blocked_in_a_child()


def test_one_that_comes_meanwhile_is_not_lost() -> None:
    # It waits for the end of the block, or another thread takes it at once.
    with pytest.raises(KeyboardInterrupt):
        interrupt_within()
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def interrupt_within() -> None:
    with held_back_from_children():
        os.kill(os.getpid(), signal.SIGINT)
    time.sleep(5.0)
