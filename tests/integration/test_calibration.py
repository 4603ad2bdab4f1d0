"""Calibration on a simulated machine: what changed is found, what did not stays as it was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from autoshard.calibration import measuring
from autoshard.calibration.adapting import CalibrationConfig
from autoshard.calibration.artifact import calibrate
from autoshard.calibration.data import CalibrationData, calibration_data
from autoshard.calibration.measuring import QuickMeasuring, measure_for_calibration
from autoshard.calibration.tunable import TunableModel
from autoshard.cli.calibrate import DEFAULT_TABLES
from autoshard.cli.main import run_command_line
from autoshard.cli.options import load_tables
from autoshard.cost_models.exported import load_cost_model
from autoshard.errors import ArtifactError, InputError
from autoshard.measure.config import TimingConfig
from autoshard.measure.loading import load_kernel_measurements
from autoshard.measure.schema import RowKind
from autoshard.measure.store import PartStore
from autoshard.objective import CostSource
from tests.cost_cases import MACHINE, collective_rows, kernel_rows, model_folder, pool

CONFIG = CalibrationConfig(num_folds=2, num_steps=0)


def machine(fwd: float, bwd: float, num: int = 60) -> CalibrationData:
    rows = pd.DataFrame(kernel_rows({"train": num}, seed=5))
    rows["fwd_ms"] *= fwd
    rows["bwd_ms"] *= bwd
    exchanges = pd.DataFrame(collective_rows(60, seed=3))
    exchanges["transfer_ms"] *= 1.7
    return calibration_data(rows, exchanges)


def test_a_slower_machine_is_found_and_the_artifact_says_so(tmp_path) -> None:
    data = machine(1.5, 2.0)
    report = calibrate(TunableModel(model_folder()), data, tmp_path / "a", CONFIG)
    kernels = report["kernels"]
    assert kernels["before"]["total"]["median"] > 0.3
    # Two measurements with 2% noise each differ by about 2% in the median.
    assert kernels["after"]["total"]["median"] < 0.03
    assert report["collectives"]["factors"]["latency"] == pytest.approx(1.7, rel=0.1)
    model = load_cost_model(tmp_path / "a")
    base = load_cost_model(model_folder())
    assert model.config["calibrated_from"]["fingerprint"] == base.fingerprint
    assert model.fingerprint != base.fingerprint
    for world_size in (2, 4):
        slower = model.collective_lower_bound_ms(1e6, world_size)
        assert slower == pytest.approx(
            1.7 * base.collective_lower_bound_ms(1e6, world_size), rel=0.1
        )
    again = calibrate(TunableModel(model_folder()), data, tmp_path / "b", CONFIG)
    assert again["fingerprint"] == report["fingerprint"]


def test_what_is_predicted_already_stays(tmp_path) -> None:
    report = calibrate(TunableModel(model_folder()), machine(1.0, 1.0), tmp_path / "a", CONFIG)
    assert report["kernels"]["after"]["total"]["median"] < 0.03


def test_what_cannot_be_used_is_refused(tmp_path) -> None:
    with pytest.raises(InputError, match="too few shard sets"):
        machine(1.0, 1.0, num=19)
    rows = pd.DataFrame(kernel_rows({"train": 25}))
    rows.loc[3, "optimizer"] = "sgd"
    with pytest.raises(InputError, match="different optimizer"):
        calibration_data(rows, None)
    with pytest.raises(ArtifactError, match="nothing to calibrate"):
        TunableModel("analytic")
    with pytest.raises(InputError, match="not of one kind"):
        TunableModel(model_folder()).check_source(CostSource.SIMULATED)
    with pytest.raises(ArtifactError, match="cannot be calibrated"):
        calibrate(
            TunableModel(model_folder("autoshard")), machine(1.0, 1.0), tmp_path / "a", CONFIG
        )


def measured(folder: Path, kind: RowKind, rows: list[dict[str, Any]]) -> None:
    with PartStore(
        folder / kind.value,
        kind,
        environment=MACHINE,
        protocol="p",
        config={},
        flush_rows=1000,
        flush_s=1e9,
    ) as store:
        for row in rows:
            store.add(row)


def test_the_command_calibrates_what_was_measured(tmp_path, capsys) -> None:
    rows = [row | {"bwd_ms": 3.0 * row["bwd_ms"]} for row in kernel_rows({"train": 30}, seed=5)]
    measured(tmp_path / "measured", RowKind.KERNELS, rows)
    out = str(tmp_path / "model")
    given = ["calibrate", "--from", str(model_folder()), "--measurements"]
    code = run_command_line([*given, str(tmp_path / "measured"), "--out", out, "--json"])
    assert code == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kernels"]["num_sets"] == 30
    assert (
        report["kernels"]["after"]["bwd"]["median"] < report["kernels"]["before"]["bwd"]["median"]
    )
    assert report["collectives"] is None
    assert load_cost_model(out).fingerprint == report["fingerprint"]
    card = (tmp_path / "model" / "card.md").read_text()
    assert "All-to-alls are the base model's." in card


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--out", "{there}"], "exists"),
        (["--out", "{tmp}/a/b"], "does not exist"),
        (["--out", "{tmp}/a", "--num-sets", "19"], "a whole number >= 20"),
        (["--out", "{tmp}/a", "--batch-size", "64"], "a batch size and a world size go together"),
        (["--out", "{tmp}/a", "--optimizer", "adamm"], "adamm"),
        (["--out", "{tmp}/a", "--device", "tpu"], "tpu"),
        (["--out", "{tmp}/a", "--from", "nothing"], "nothing"),
        (["--out", "{tmp}/a", "--tables", "{tmp}/no.csv"], "no.csv"),
        (["--out", "{tmp}/a", "--measurements", "{tmp}"], "holds no kernel measurements"),
        (
            ["--out", "{tmp}/a", "--measurements", "{tmp}", "--optimizer", "sgd"],
            "--measurements measures nothing, and --optimizer says what to measure",
        ),
    ],
)
def test_unusable_requests_end_with_one_line(arguments, message, tmp_path, capsys) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (there / "file").touch()
    filled = [text.format(tmp=tmp_path, there=there) for text in arguments]
    if "--from" not in filled:
        filled += ["--from", str(model_folder())]
    assert run_command_line(["calibrate", *filled]) == 2
    assert message in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["there"]


def test_the_default_tables_are_there() -> None:
    assert len(load_tables(DEFAULT_TABLES)) == 1000


def test_it_measures_this_machine_and_goes_on_where_it_was(tmp_path, monkeypatch) -> None:
    pytest.importorskip("fbgemm_gpu", reason="kernels need fbgemm-gpu-cpu or fbgemm-gpu")
    quick = TimingConfig(warmup_iterations=1, min_iterations=3, max_iterations=3, time_budget_s=0.0)
    monkeypatch.setattr(measuring, "_KERNEL_TIMING", quick)
    wanted = QuickMeasuring(num_sets=20, num_collectives=0, batch_size=32, world_size=2)
    tables = [table for table in pool("train", 200) if table.num_embeddings < 20_000]
    seen: list[tuple[int, int]] = []
    for _ in range(2):
        measure_for_calibration(
            tables, wanted, tmp_path, lambda done, total, what: seen.append((done, total))
        )
    # Every set twice; the second call has nothing left to measure.
    assert seen == [(done, 40) for done in range(1, 41)]
    rows = load_kernel_measurements(tmp_path / "kernels")
    assert rows.groupby("index").size().tolist() == [2] * 20
    assert set(rows["split"]) == {"train"}
    assert set(zip(rows["num_samples"], rows["world_size"], strict=True)) == {(64, 2)}
