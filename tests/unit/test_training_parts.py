"""Options, progress lines, the curve's files, and whether a machine can hold a plan."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from autoshard.errors import InfeasibleError, InputError, WorkerError
from autoshard.memory import LEDGER_LINES, RankLedger
from autoshard.runtime import host_memory
from autoshard.runtime.host_memory import available_bytes, check_host_memory
from autoshard.runtime.signals import ended_in_order
from autoshard.runtime.together import each, together
from autoshard.training.curve import CurveRow, draw_curve, write_curve
from autoshard.training.model import within_memory
from autoshard.training.options import DenseOptimizer, Model, TrainingOptions
from autoshard.training.position import Position
from autoshard.training.progress import Progress, parse_progress
from tests.distributed.runtime_cases import alone


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"model": "dlmr"}, "did you mean 'dlrm'"),
        ({"dense_optimizer": "rmsprop"}, "sgd, adagrad, adam"),
        ({"epochs": 0}, "epochs is not usable"),
        ({"max_steps": True}, "max_steps is not usable"),
        ({"eval_every": 1.5}, "eval_every is not usable"),
        ({"top": (64, 0)}, "top is not usable"),
        ({"learning_rate": float("nan")}, "learning_rate is not usable"),
        ({"dense_learning_rate": -1.0}, "dense_learning_rate is not usable"),
        ({"resume": True}, "not where they are"),
        ({"checkpoint_every": 5}, "not where they are"),
    ],
)
def test_options_that_make_no_sense_are_refused(fields: dict[str, object], told: str) -> None:
    with pytest.raises(InputError) as caught:
        TrainingOptions(**fields)  # type: ignore[arg-type]
    assert told in str(caught.value)


def test_options_take_names_for_members() -> None:
    options = TrainingOptions(model="mlp", dense_optimizer="sgd")  # type: ignore[arg-type]
    assert options.model is Model.MLP
    assert options.dense_optimizer is DenseOptimizer.SGD
    assert options.first_dense_learning_rate == 0.01
    assert TrainingOptions().first_dense_learning_rate == 0.001
    assert TrainingOptions(dense_learning_rate=0.0).first_dense_learning_rate == 0


@pytest.mark.parametrize(
    "progress",
    [
        Progress(what="training, epoch 2 of 3", step=7, total=90, samples_per_s=1234.0),
        Progress(what="training, epoch 1 of 1", step=7, samples_per_s=5.0),
        Progress(what="evaluating", step=0, total=3),
        Progress(what="writing a checkpoint", step=12),
    ],
)
def test_lines_of_progress_read_back(progress: Progress) -> None:
    assert parse_progress(progress.line()) == progress
    assert parse_progress("building") is None


def row(step: int, loss: float = 0.5, auc: float | None = 0.7) -> CurveRow:
    return CurveRow(
        step=step, epoch=step / 10, samples=step * 64, train_loss=loss, auc=auc, log_loss=loss,
        samples_per_s=1000.0,
    )  # fmt: skip


def test_a_curve_is_written_as_rows_and_as_a_picture(tmp_path: Path) -> None:
    rows = [row(5, 0.69), row(10, 0.6, None)]
    write_curve(tmp_path / "new" / "folder", rows)
    lines = (tmp_path / "new" / "folder" / "learning_curve.jsonl").read_text().splitlines()
    assert [CurveRow.from_json(json.loads(line)) for line in lines] == rows
    for drawn in (rows, rows[:1], []):
        picture = draw_curve(tmp_path, drawn, "title")
        assert picture.read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="cannot make folder"):
        write_curve(tmp_path / "file" / "below", rows)


def test_a_position_reads_back_and_averages_since_the_last_row() -> None:
    position = Position()
    position.advance([1.0, 2.0, 6.0], 10, 0.5)
    position.add_row(0.6, 0.7, samples_per_epoch=60)
    position.advance([4.0], 10, 0.25)
    first = position.curve[0]
    assert (first.step, first.samples, first.epoch) == (3, 30, 0.5)
    assert first.train_loss == 3.0
    assert first.samples_per_s == 60
    restored = Position.from_json(json.loads(json.dumps(position.to_json())))
    assert restored == position
    restored.add_row(None, None, samples_per_epoch=None)
    assert restored.curve[1].train_loss == 4.0
    assert restored.curve[1].samples_per_s == 40


def ledger(rank: int, weights: int, state: int) -> RankLedger:
    lines = dict.fromkeys(LEDGER_LINES, 0)
    lines.update(weights=weights, optimizer_state=state, reserved=10**15)
    return RankLedger(rank, lines, 10**18)


def test_tables_larger_than_the_machine_are_refused_with_both_numbers() -> None:
    ledgers = [ledger(0, 600, 100), ledger(1, 200, 101)]
    check_host_memory(ledgers, available=1001)
    with pytest.raises(
        InfeasibleError, match=r"got: 1001 bytes .* 700 of them on rank 0"
    ) as caught:
        check_host_memory(ledgers, available=1000)
    assert "1000 bytes" in str(caught.value)
    assert caught.value.exit_code == 2
    available = available_bytes()
    assert available is not None
    with pytest.raises(InfeasibleError):
        check_host_memory([ledger(0, 2**60, 0)])


def test_the_limit_of_a_control_group_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Version 2 with nested groups: the outer one leaves least."""
    outer = tmp_path / "fs" / "outer"
    inner = outer / "inner"
    inner.mkdir(parents=True)
    for folder, limit in ((outer, "5000\n"), (inner, "max\n")):
        (folder / "memory.max").write_text(limit)
        (folder / "memory.current").write_text("4000\n")
        (folder / "memory.stat").write_text("anon 100\ninactive_file 300\n")
    (tmp_path / "self").write_text("0::/outer/inner\n")
    monkeypatch.setattr(host_memory, "_CGROUPS_OF_PROCESS", tmp_path / "self")
    monkeypatch.setattr(
        host_memory,
        "_CGROUP_FILES",
        {"": (tmp_path / "fs", "memory.max", "memory.current")},
    )
    assert available_bytes() == 1300
    monkeypatch.setattr(host_memory, "_MEMINFO", tmp_path / "missing")
    monkeypatch.setattr(host_memory, "_CGROUPS_OF_PROCESS", tmp_path / "missing")
    assert available_bytes() is None
    check_host_memory([ledger(0, 2**60, 0)])  # nothing is known, nothing refused


@pytest.fixture
def handlers() -> Iterator[None]:
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


@pytest.mark.usefixtures("handlers")
def test_the_first_signal_ends_in_order_and_later_ones_wait() -> None:
    before = signal.getsignal(signal.SIGTERM)
    cleaned = []

    def told_to_end() -> None:
        try:
            os.kill(os.getpid(), signal.SIGTERM)
        finally:
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGINT)
            cleaned.append(True)

    with pytest.raises(SystemExit) as caught, ended_in_order():
        told_to_end()
    assert caught.value.code == 143
    assert cleaned
    assert signal.getsignal(signal.SIGTERM) is before
    with pytest.raises(KeyboardInterrupt), ended_in_order():
        os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.usefixtures("handlers")
def test_an_ignored_signal_stays_ignored() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with ended_in_order():
        os.kill(os.getpid(), signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN


def fail(error: Exception) -> object:
    raise error


def test_work_of_a_world_of_one_fails_as_it_is() -> None:
    collectives = alone().collectives
    assert together(collectives, "counting", lambda: 3) == [3]
    assert each(collectives, "counting", lambda: [3]) == [3]
    with pytest.raises(InputError, match=r"^wrong$"):
        together(collectives, "counting", lambda: fail(InputError("wrong")))
    with pytest.raises(WorkerError, match="counting failed; got: ZeroDivisionError: zero"):
        each(collectives, "counting", lambda: fail(ZeroDivisionError("zero")))


def test_dense_layers_beyond_all_memory_are_an_infeasible_request() -> None:
    with pytest.raises(InfeasibleError, match="--interaction-dim"), within_memory():
        torch.empty(2**50)
    with pytest.raises(RuntimeError, match="shape"), within_memory():
        torch.empty(3).view(2, 2)
