"""Calibration of a model's kernels: stages tried in turn, each kept if cross-validation says so.

Folds are drawn over sets. A stage is kept if the loss of held-out sets falls by more than one
standard error. What is reported of a set comes from a model that was fitted without its fold,
with the settings that did best on the other folds.

Shapes: N=measured sets, P=2 phases.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autoshard.calibration.data import SetRows
from autoshard.calibration.errors import noise_floor, score, set_losses
from autoshard.calibration.fine_tuning import CHECKPOINT_EVERY, TUNINGS, tune, tuned
from autoshard.calibration.folds import fold_numbers, helps
from autoshard.calibration.scaling import SCALINGS, check_scalable, fit_scaling
from autoshard.calibration.tunable import TunableModel, predict_ms
from autoshard.checks import check_integers

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """How a model is calibrated."""

    seed: int = 0
    """Decides the folds and the resamples."""
    num_folds: int = 5
    max_steps: int = 120
    """Steps of fine-tuning at most; 0 for none."""

    def __post_init__(self) -> None:
        check_integers(self, seed=0, num_folds=2, max_steps=0)


@dataclass(frozen=True, kw_only=True, eq=False)
class AdaptedKernels:
    """A state for the new machine, and how good it is."""

    state: Mapping[str, Tensor]
    report: dict[str, Any]
    """`num_sets`, `before`, `after`, `kept`, and the `stages` tried."""


def adapt_kernels(model: TunableModel, rows: SetRows, config: CalibrationConfig) -> AdaptedKernels:
    """Adapt a model's kernels to measured sets.

    Args:
        model: the base.
        rows: of the new machine.
        config: how.

    Raises:
        ArtifactError: the model's network has no coefficients to scale.
    """
    check_scalable(model)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the order of sums, and so the result, depends on their number
    try:
        return _adapt(model, rows, config)
    finally:
        torch.set_num_threads(threads)


def _adapt(model: TunableModel, rows: SetRows, config: CalibrationConfig) -> AdaptedKernels:
    fold_N = fold_numbers(rows.index_N, config.num_folds, config.seed)
    parts = [
        (rows.of(fold_N != k), rows.of(fold_N == k), np.flatnonzero(fold_N == k))
        for k in range(config.num_folds)
    ]
    before_NP = predict_ms(model, model.compute_state, rows)
    state: Mapping[str, Tensor] = model.compute_state
    best_NP, kept = before_NP, "base"
    starts: list[Mapping[str, Tensor]] = [state] * config.num_folds
    stages = [_stage("base", before_NP, rows, config, kept=True)]

    fitted = [[fit_scaling(model, train, s) for train, _, _ in parts] for s in SCALINGS]
    held_out = np.empty((len(SCALINGS), *before_NP.shape))
    for number, states in enumerate(fitted):
        for own, (_, test, chosen) in zip(states, parts, strict=True):
            held_out[number, chosen] = predict_ms(model, own, test)
    scaled_NP, best = _choose(held_out, rows, fold_N)
    better = helps(_losses(best_NP, rows), _losses(scaled_NP, rows))
    stages.append(_stage(SCALINGS[best].name, scaled_NP, rows, config, kept=better))
    if better:
        state, best_NP, kept = fit_scaling(model, rows, SCALINGS[best]), scaled_NP, "scaled"
        starts = [*fitted[best]]

    if config.max_steps >= CHECKPOINT_EVERY:
        num_steps = config.max_steps // CHECKPOINT_EVERY
        held_out = np.empty((len(TUNINGS), num_steps, *before_NP.shape))
        for number, tuning in enumerate(TUNINGS):
            for start, (train, test, chosen) in zip(starts, parts, strict=True):
                run = tune(model, start, train, tuning, num_steps * CHECKPOINT_EVERY)
                for place, own in enumerate(run):
                    held_out[number, place, chosen] = predict_ms(model, own, test)
        tuned_NP, best = _choose(held_out.reshape(-1, *before_NP.shape), rows, fold_N)
        tuning, steps = TUNINGS[best // num_steps], (best % num_steps + 1) * CHECKPOINT_EVERY
        better = helps(_losses(best_NP, rows), _losses(tuned_NP, rows))
        name = f"{steps} steps, learning rate {tuning.learning_rate:g}, penalty {tuning.penalty:g}"
        stages.append(_stage(name, tuned_NP, rows, config, kept=better))
        if better:
            state, best_NP = tuned(model, state, rows, tuning, steps), tuned_NP
            kept = "scaled and tuned" if kept == "scaled" else "tuned"
    return AdaptedKernels(
        state=state,
        report={
            "num_sets": rows.num_sets,
            "kept": kept,
            "before": score(before_NP, rows, config.seed),
            "after": score(best_NP, rows, config.seed),
            "noise_floor": noise_floor(rows, config.seed),
            "stages": stages,
        },
    )


def _losses(predicted_NP: FloatArray, rows: SetRows) -> FloatArray:
    return set_losses(predicted_NP, rows.time_ms_NP)


def _choose(
    candidates: FloatArray, rows: SetRows, fold_N: NDArray[np.int64]
) -> tuple[FloatArray, int]:
    """For each fold the held-out predictions of what is best on the others; and the best of all.

    Args:
        candidates: held-out predictions, [candidates, N, P].
        rows: what was measured.
        fold_N: fold of each row.
    """
    losses = np.stack([_losses(predicted_NP, rows) for predicted_NP in candidates])
    chosen_NP = np.empty_like(candidates[0])
    for fold in np.unique(fold_N):
        own_N = fold_N == fold
        chosen_NP[own_N] = candidates[int(losses[:, ~own_N].mean(axis=1).argmin()), own_N]
    return chosen_NP, int(losses.mean(axis=1).argmin())


def _stage(
    name: str, predicted_NP: FloatArray, rows: SetRows, config: CalibrationConfig, *, kept: bool
) -> dict[str, Any]:
    return {"name": name, "kept": kept, **score(predicted_NP, rows, config.seed)}
