"""Two processes never measure at once: the second waits, says for whom, and gives up in time."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from autoshard.errors import InputError
from autoshard.measure.machine_lock import MachineBusyError, lock_path, machine_to_itself

HOLD = """
import sys, time
from pathlib import Path
from autoshard.measure.machine_lock import machine_to_itself
with machine_to_itself(Path("runs/first"), 0.0):
    print("held", flush=True)
    time.sleep(60)
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def holder(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=Path(__file__).resolve().parents[2],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    yield process
    process.kill()
    process.wait(10)
    process.stdout.close()


def test_a_second_process_gives_up_in_time_and_says_who_measures(holder):
    with pytest.raises(MachineBusyError) as caught, machine_to_itself(Path("b"), 0.6):
        pytest.fail("two at once")
    told = str(caught.value)
    assert f"process {holder.pid} of " in told
    assert "runs/first" in told
    assert "machine_wait_limit_s" in told
    assert caught.value.exit_code == 1


def test_a_waiter_goes_on_once_the_holder_is_killed(holder, caplog):
    caplog.set_level(logging.WARNING)
    threading.Timer(0.7, holder.send_signal, [signal.SIGKILL]).start()
    with machine_to_itself(Path("b"), 30.0):
        told = json.loads(lock_path().read_text())
        assert told["pid"] == os.getpid()
        assert told["folder"] == str(Path("b").resolve())
    assert f"waiting for the machine: process {holder.pid}" in caplog.text
    assert lock_path().read_text() == ""


def test_what_times_nothing_needs_no_machine(holder):
    start = time.monotonic()
    with machine_to_itself(Path("b"), 30.0, needed=False):
        pass
    assert time.monotonic() - start < 20.0


def test_the_lock_is_given_back_after_an_error():
    with pytest.raises(ZeroDivisionError), machine_to_itself(Path("a"), 0.0):
        raise ZeroDivisionError
    with machine_to_itself(Path("b"), 0.0):
        pass


def test_other_users_may_lock_too_and_a_link_is_not_followed(tmp_path: Path):
    with machine_to_itself(Path("a"), 0.0):
        assert lock_path().stat().st_mode & 0o777 == 0o666
    lock_path().unlink()
    lock_path().symlink_to(tmp_path / "precious")
    (tmp_path / "precious").write_text("kept")
    with pytest.raises(InputError, match="TMPDIR"), machine_to_itself(Path("a"), 0.0):
        pytest.fail("a link was followed")
    assert (tmp_path / "precious").read_text() == "kept"
