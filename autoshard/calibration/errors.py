"""How far predictions are from measurements, as calibration weighs and reports it.

Relative error is |predicted − measured| / measured. What is minimised is the Huber loss of the
log ratio of predicted and measured time, per phase and of their sum, as in the training of
cost models: relative errors count, and single disturbed measurements do not decide.

Shapes: N=measured sets, P=2 phases, Q=3 quantities (forward, backward, total).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from autoshard.calibration.data import SetRows

FloatArray = NDArray[np.float64]
QUANTITIES = ("fwd", "bwd", "total")
HUBER_DELTA = 0.1
#: Resamples of the sets behind an interval, and the share of them within it.
NUM_RESAMPLES = 1000
CONFIDENCE = 0.95
_LEAST_MS = 1e-9


def log_ratios(predicted_NP: Tensor, measured_NP: Tensor) -> Tensor:
    """log(predicted / measured) of both phases and of the total, [N, Q]."""

    def logs(time_NP: Tensor) -> Tensor:
        whole = torch.cat([time_NP, time_NP.sum(dim=1, keepdim=True)], dim=1)
        return torch.log(whole.clamp_min(_LEAST_MS))

    return logs(predicted_NP) - logs(measured_NP)


def huber(ratios: Tensor) -> Tensor:
    """Huber loss of each log ratio."""
    return nn.functional.huber_loss(
        ratios, torch.zeros_like(ratios), delta=HUBER_DELTA, reduction="none"
    )


def mean_loss(predicted_NP: Tensor, measured_NP: Tensor) -> Tensor:
    """What fitting minimises: the mean Huber loss over sets, phases and the total."""
    return huber(log_ratios(predicted_NP, measured_NP)).mean()


def set_losses(predicted_NP: FloatArray, measured_NP: FloatArray) -> FloatArray:
    """The loss of each set, float64 [N]."""
    ratios = log_ratios(torch.tensor(predicted_NP), torch.tensor(measured_NP))
    return huber(ratios).mean(dim=1).numpy()


def relative_errors(predicted_NP: FloatArray, measured_NP: FloatArray) -> FloatArray:
    """Relative errors of both phases and of the total, float64 [N, Q]."""

    def whole(time_NP: FloatArray) -> FloatArray:
        return np.hstack([time_NP, time_NP.sum(axis=1, keepdims=True)])

    return np.abs(whole(predicted_NP) / whole(measured_NP) - 1.0)


def spread(errors_N: FloatArray, index_N: NDArray[np.int64], seed: int) -> dict[str, Any]:
    """Median, 90th percentile, and a bootstrap interval of the median.

    Sets are drawn, not rows: two measurements of one set stay together.

    Args:
        errors_N: relative errors of rows, N >= 1.
        index_N: which set each row is of.
        seed: of the resamples.

    Returns:
        `median`, `p90`, and `interval`, the 2.5th and 97.5th percentile of the median.
    """
    rng = np.random.default_rng(seed)
    _, group_N = np.unique(index_N, return_inverse=True)
    num_groups = int(group_N.max()) + 1
    order_N = np.argsort(errors_N, kind="stable")
    sorted_N = errors_N[order_N]
    medians = np.empty(NUM_RESAMPLES)
    for number in range(NUM_RESAMPLES):
        drawn = np.bincount(rng.integers(num_groups, size=num_groups), minlength=num_groups)
        taken = np.cumsum(drawn[group_N][order_N])
        middle = np.searchsorted(taken, [(taken[-1] + 1) // 2, taken[-1] // 2 + 1])
        medians[number] = sorted_N[middle].mean()
    outside = (1.0 - CONFIDENCE) / 2
    low, high = np.quantile(medians, [outside, 1.0 - outside])
    return {
        "median": float(np.median(errors_N)),
        "p90": float(np.quantile(errors_N, 0.9)),
        "interval": [float(low), float(high)],
    }


def score(predicted_NP: FloatArray, rows: SetRows, seed: int = 0) -> dict[str, Any]:
    """`spread` of each of `QUANTITIES`."""
    errors_NQ = relative_errors(predicted_NP, rows.time_ms_NP)
    return {
        name: spread(errors_NQ[:, column], rows.index_N, seed)
        for column, name in enumerate(QUANTITIES)
    }


def noise_floor(rows: SetRows, seed: int = 0) -> dict[str, Any] | None:
    """`score` of a second measurement as a prediction of the first; None if fewer than 2 repeat."""
    order = np.argsort(rows.index_N, kind="stable")
    index = rows.index_N[order]
    pairs = np.flatnonzero(index[1:] == index[:-1])
    if len(pairs) < 2:
        return None
    first, second = rows.of(order[pairs]), order[pairs + 1]
    return {"num_pairs": len(pairs), **score(rows.time_ms_NP[second], first, seed)}
