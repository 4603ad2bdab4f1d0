"""Gates find corrections that do not hold on another machine, and leave the others alone."""

from __future__ import annotations

import pandas as pd
import torch

from autoshard.calibration.data import SetRows, calibration_data
from autoshard.calibration.errors import relative_errors
from autoshard.calibration.gating import Gating
from autoshard.calibration.options import Option
from autoshard.calibration.scaling import SCALINGS
from autoshard.calibration.tunable import State, TunableModel, predict_ms
from tests.cost_cases import kernel_rows, model_folder

GATING = Gating(penalty=1e-3)


def rows() -> SetRows:
    """Of the machine that the model was trained on, with 2% noise."""
    return calibration_data(pd.DataFrame(kernel_rows({"train": 60}, seed=5)), None).sets


def median_errors(model: TunableModel, state: State, sets: SetRows) -> tuple[float, float]:
    """Of forward and backward on other sets than those that were fitted to."""
    errors = relative_errors(predict_ms(model, state, sets), sets.time_ms_NP)
    return float(pd.Series(errors[:, 0]).median()), float(pd.Series(errors[:, 1]).median())


def with_wrong_correction(model: TunableModel) -> dict[str, torch.Tensor]:
    """The backward's cost per distinct row corrected by what has nothing to do with it."""
    name = max(k for k in model.compute_state if k.startswith("network.correction."))
    layer = name.rsplit(".", 1)[0]
    weight = model.compute_state[f"{layer}.weight"].clone()
    weight[5] = 3.0 * torch.randn(weight.shape[1], generator=torch.Generator().manual_seed(0))
    return {**model.compute_state, f"{layer}.weight": weight}


def test_a_wrong_correction_is_gated_away() -> None:
    model = TunableModel(model_folder())
    wrong, fitted_to = with_wrong_correction(model), rows()
    others = calibration_data(pd.DataFrame(kernel_rows({"train": 200}, seed=6)), None).sets

    def backward_after(option: Option) -> float:
        return median_errors(model, option.fit(model, wrong, fitted_to), others)[1]

    before = median_errors(model, wrong, others)
    right = median_errors(model, model.compute_state, others)
    assert before[1] > 3 * right[1]
    gated = backward_after(GATING)
    assert gated < 0.5 * before[1]
    assert gated < min(backward_after(scaling) for scaling in SCALINGS)
    after = median_errors(model, GATING.fit(model, wrong, fitted_to), others)
    assert after[0] < right[0] + 0.01  # the forward was right


def test_a_model_that_is_right_stays_near_where_it_is() -> None:
    model, sets = TunableModel(model_folder()), rows()
    state = GATING.fit(model, model.compute_state, sets)
    before, after = (predict_ms(model, s, sets) for s in (model.compute_state, state))
    assert abs(after / before - 1.0).max() < 0.1
    moved = {name for name, value in state.items() if (value != model.compute_state[name]).any()}
    layers = {name.split(".")[1] for name in moved}
    assert layers == {"correction", "factor", "raw_work_K", "raw_shard_P", "raw_overhead_P"}
    assert len([name for name in moved if "correction" in name]) == 2  # the last layer only
