"""Calibration on a simulated machine: what changed is found, what did not stays as it was."""

from __future__ import annotations

import pandas as pd
import pytest

from autoshard.calibration.adapting import CalibrationConfig
from autoshard.calibration.artifact import calibrate
from autoshard.calibration.data import CalibrationData, calibration_data
from autoshard.calibration.tunable import TunableModel
from autoshard.cost_models.exported import load_cost_model
from autoshard.errors import ArtifactError, InputError
from autoshard.objective import CostSource
from tests.cost_cases import collective_rows, kernel_rows, model_folder

CONFIG = CalibrationConfig(max_steps=0)


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


def test_what_cannot_be_used_is_refused() -> None:
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
