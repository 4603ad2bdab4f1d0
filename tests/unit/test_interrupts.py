"""Ctrl-C reaches the process that started others, and only that one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

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


def test_one_that_comes_meanwhile_arrives_afterwards() -> None:
    reached = []

    def interrupted() -> None:
        with held_back_from_children():
            os.kill(os.getpid(), signal.SIGINT)
            reached.append("the end of the block")
        reached.append("what follows it")

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert reached == ["the end of the block"]
