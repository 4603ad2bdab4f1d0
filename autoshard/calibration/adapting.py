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
from autoshard.calibration.fine_tuning import tunings
from autoshard.calibration.folds import fold_numbers, helps, most_restrained
from autoshard.calibration.gating import GATINGS
from autoshard.calibration.options import Stage
from autoshard.calibration.scaling import SCALINGS, check_scalable
from autoshard.calibration.tunable import State, TunableModel, predict_ms
from autoshard.checks import check_integers

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class CalibrationConfig:
    """How a model is calibrated."""

    seed: int = 0
    """Decides the folds and the resamples."""
    num_folds: int = 5
    num_steps: int = 150
    """Steps of fine-tuning; 0 for none."""

    def __post_init__(self) -> None:
        check_integers(self, seed=0, num_folds=2, num_steps=0)

    @property
    def stages(self) -> tuple[Stage, ...]:
        """What is tried, each on top of what was kept before."""
        return (
            Stage(done="scaled", options=SCALINGS),
            Stage(done="gated", options=GATINGS),
            Stage(done="tuned", options=tunings(self.num_steps)),
        )


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
    state: State = model.compute_state
    starts: list[State] = [state] * config.num_folds
    best_NP, done = before_NP, list[str]()
    tried = [_outcome("base", before_NP, rows, config, kept=True)]
    for stage in config.stages:
        if not stage.options:
            continue
        fitted: list[list[State]] = []
        held_out = np.empty((len(stage.options), *before_NP.shape))
        for number, option in enumerate(stage.options):
            fitted.append([])
            for start, (train, test, chosen) in zip(starts, parts, strict=True):
                own = option.fit(model, start, train)
                held_out[number, chosen] = predict_ms(model, own, test)
                fitted[number].append(own)
        chosen_NP, best = _choose(held_out, rows, fold_N)
        kept = helps(_losses(best_NP, rows), _losses(chosen_NP, rows))
        option = stage.options[best]
        tried.append(_outcome(option.name, chosen_NP, rows, config, kept=kept))
        if kept:
            state, starts = option.fit(model, state, rows), fitted[best]
            best_NP = chosen_NP
            done.append(stage.done)
    return AdaptedKernels(
        state=state,
        report={
            "num_sets": rows.num_sets,
            "kept": ", ".join(done) or "base",
            "before": score(before_NP, rows, config.seed),
            "after": score(best_NP, rows, config.seed),
            "noise_floor": noise_floor(rows, config.seed),
            "stages": tried,
        },
    )


def _losses(predicted_NP: FloatArray, rows: SetRows) -> FloatArray:
    return set_losses(predicted_NP, rows.time_ms_NP)


def _choose(
    candidates: FloatArray, rows: SetRows, fold_N: NDArray[np.int64]
) -> tuple[FloatArray, int]:
    """For each fold the held-out predictions of what the others choose; and what all choose.

    Args:
        candidates: held-out predictions, [candidates, N, P]; the most restrained one first.
        rows: what was measured.
        fold_N: fold of each row.
    """
    losses = np.stack([_losses(predicted_NP, rows) for predicted_NP in candidates])
    chosen_NP = np.empty_like(candidates[0])
    for fold in np.unique(fold_N):
        own_N = fold_N == fold
        chosen_NP[own_N] = candidates[most_restrained(losses[:, ~own_N]), own_N]
    return chosen_NP, most_restrained(losses)


def _outcome(
    name: str, predicted_NP: FloatArray, rows: SetRows, config: CalibrationConfig, *, kept: bool
) -> dict[str, Any]:
    return {"name": name, "kept": kept, **score(predicted_NP, rows, config.seed)}
