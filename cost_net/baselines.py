"""Plain predictors that the network has to beat, fitted to the same training rows.

Each predicts both phases of a set, float64 [N, 2].
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls
from sklearn.ensemble import HistGradientBoostingRegressor

from autoshard.features import (
    NUM_SHARD_FEATURES,
    NUM_WORK_FEATURES,
    WORK_FEATURES,
    WORK_OF_PHASE,
)
from cost_net.dataset import PHASES, KernelData

FloatArray = NDArray[np.float64]
Predictor = Callable[[KernelData], FloatArray]
_WORK = slice(0, NUM_WORK_FEATURES)
_ELEMENTS = [WORK_FEATURES.index(f"{phase}_lookup_elements") for phase in PHASES]


def lookups_times_dim(train: KernelData) -> Predictor:
    """One coefficient on Σ lookups × dim: the median ratio of the training sets."""
    columns = np.array(_ELEMENTS)
    work_NP = np.maximum(train.summed(columns), 1.0)
    ratio_P = np.median(train.time_ms_NP / work_NP, axis=0)
    return lambda data: np.maximum(data.summed(columns), 1.0) * ratio_P


def _relative_nnls(inputs_NK: FloatArray, wanted_N: FloatArray) -> FloatArray:
    """Non-negative least squares of relative errors: rows are divided by what is wanted."""
    scale_K = np.maximum(inputs_NK.max(axis=0), 1e-12)
    weights_K, _ = nnls(inputs_NK / scale_K / wanted_N[:, None], np.ones(len(wanted_N)))
    return weights_K / scale_K


def _linear_inputs(data: KernelData, *, constant: bool) -> FloatArray:
    """Summed work, number of shards, and 1 if there is a constant."""
    parts = [data.summed(_WORK), data.num_shards_N[:, None]]
    return np.hstack([*parts, np.ones((data.num_sets, 1))] if constant else parts)


def _phase_weights(inputs_NK: FloatArray, time_ms_NP: FloatArray) -> FloatArray:
    """Weights of each phase, [K, 2]; work of the other phase weighs nothing."""
    weights_KP = np.zeros((inputs_NK.shape[1], 2))
    for phase in range(2):
        used_K = np.ones(inputs_NK.shape[1], dtype=bool)
        used_K[:NUM_WORK_FEATURES] = WORK_OF_PHASE[:, phase]
        weights_KP[used_K, phase] = _relative_nnls(inputs_NK[:, used_K], time_ms_NP[:, phase])
    return weights_KP


def linear_weights(train: KernelData) -> FloatArray:
    """Non-negative weights of summed work, number of shards and a constant, [K + 2, 2], in ms."""
    return _phase_weights(_linear_inputs(train, constant=True), train.time_ms_NP)


def linear(train: KernelData) -> Predictor:
    """Non-negative linear regression on summed work, the number of shards and a constant."""
    weights_KP = linear_weights(train)
    return lambda data: _linear_inputs(data, constant=True) @ weights_KP


def sum_of_single(train: KernelData) -> Predictor:
    """Each shard's cost alone, learned from sets of one shard, added up."""
    alone = train.of(train.num_shards_N == 1)
    if alone.num_sets < 2 * NUM_WORK_FEATURES:
        alone = train.of(np.argsort(train.num_shards_N, kind="stable")[: 4 * NUM_WORK_FEATURES])
    weights_KP = _phase_weights(_linear_inputs(alone, constant=False), alone.time_ms_NP)
    return lambda data: _linear_inputs(data, constant=False) @ weights_KP


def gradient_boosting(train: KernelData) -> Predictor:
    """scikit-learn's histogram gradient boosting on aggregated features, of log times."""
    everything = slice(0, NUM_SHARD_FEATURES)

    def inputs(data: KernelData) -> FloatArray:
        counts = data.num_shards_N[:, None].astype(np.float64)
        sums = data.summed(everything)
        return np.hstack([np.log1p(sums[:, _WORK]), sums[:, NUM_WORK_FEATURES:] / counts, counts])

    own = inputs(train)
    models = [
        HistGradientBoostingRegressor(random_state=0, max_iter=300, learning_rate=0.05).fit(
            own, np.log(train.time_ms_NP[:, p])
        )
        for p in range(2)
    ]
    return lambda data: np.exp(np.stack([m.predict(inputs(data)) for m in models], axis=1))


BASELINES: dict[str, Callable[[KernelData], Predictor]] = {
    "lookups × dim": lookups_times_dim,
    "sum of single-table costs": sum_of_single,
    "linear regression": linear,
    "gradient boosting": gradient_boosting,
}
