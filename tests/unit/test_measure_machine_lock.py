"""Two processes never measure at once: the second waits, says for whom, and gives up in time."""

from __future__ import annotations

import dataclasses
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
from autoshard.measure.config import (
    CollectiveConfig,
    KernelConfig,
    MeasureConfig,
    SamplingConfig,
    SimulatedDevice,
)
from autoshard.measure.machine_lock import MachineBusyError, lock_path, machine_to_itself
from autoshard.measure.runner import measure_collectives, measure_kernels
from autoshard.tables import Table
from tests.process_cases import Children

ROOT = Path(__file__).resolve().parents[2]
HOLD = """
import sys, time
from pathlib import Path
from autoshard.measure.machine_lock import machine_to_itself
with machine_to_itself(Path("runs/first"), 0.0):
    print("held", flush=True)
    time.sleep(60)
"""

#: What spawned workers import, and so run, too; each measures into a folder of its own.
UNGUARDED = """
import tempfile
from autoshard.measure.config import KernelConfig, MeasureConfig, SamplingConfig
from autoshard.measure.runner import measure_kernels
from autoshard.tables import Table
table = Table(name="t", num_embeddings=100, embedding_dim=8, pooling_factor=2.0)
sampling = SamplingConfig(split_shares=(1, 0, 0), max_weight_bytes=2**20)
kernels = KernelConfig(arena_bytes=2**20)
config = MeasureConfig(
    num_sets=1, num_repeated_sets=0, workers=1, kernels=kernels, sampling=sampling
)
measure_kernels(config, [table], tempfile.mkdtemp())
"""


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture
def holder(tmp_path: Path):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD],
        env={**os.environ, "TMPDIR": str(tmp_path)},
        cwd=ROOT,
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


def test_a_script_without_a_guard_does_not_wait_for_itself(tmp_path: Path):
    script = tmp_path / "script.py"
    script.write_text(UNGUARDED)
    run = subprocess.run(
        [sys.executable, str(script)],
        env={**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert run.returncode == 1
    assert "a worker of a measurement cannot measure itself" in run.stderr
    assert 'under `if __name__ == "__main__":`' in run.stderr


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


def test_a_run_waits_before_it_starts_anything_and_simulated_ones_do_not(holder, tmp_path: Path):
    children = Children()
    table = Table(name="t", num_embeddings=100, embedding_dim=8, pooling_factor=2.0)
    config = MeasureConfig(
        num_sets=1,
        num_repeated_sets=0,
        workers=1,
        machine_wait_limit_s=0.0,
        sampling=SamplingConfig(split_shares=(1, 0, 0)),
        collectives=CollectiveConfig(world_sizes=(2,), num_collectives=1),
    )
    for measure in (
        lambda: measure_kernels(config, [table], tmp_path / "real"),
        lambda: measure_collectives(config, tmp_path / "real"),
    ):
        with pytest.raises(MachineBusyError, match=f"process {holder.pid}"):
            measure()
    assert not children.new()
    simulated = dataclasses.replace(
        config,
        kernels=KernelConfig(device=SimulatedDevice.SIMULATED),
        collectives=CollectiveConfig(device=SimulatedDevice.SIMULATED, num_collectives=1),
    )
    assert measure_kernels(simulated, [table], tmp_path / "simulated") == 2
