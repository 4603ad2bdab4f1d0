"""Statistics of comparisons: paired ratios, rank agreement, errors, with their uncertainty.

Every interval comes from a seeded bootstrap or from Student's t, so a report repeats exactly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

from autoshard.errors import InputError

FloatArray = NDArray[np.float64]
NUM_RESAMPLES = 2000
SEED = 0


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """A value with its two-sided 95% interval, and the one-sided upper 95% bound."""

    value: float
    low: float
    high: float
    upper_95: float
    num: int
    """Pairs or values behind it."""


def geometric_mean_ratio(values: ArrayLike, reference: ArrayLike) -> Estimate:
    """Geometric mean of the paired ratios values / reference.

    The logarithms of the ratios are taken as a sample: the interval is mean ± t · s / √n on
    the logarithmic scale (Student's t with n − 1 degrees of freedom), the bound likewise.

    Args:
        values: numbers > 0.
        reference: as many numbers > 0, pair by pair.

    Raises:
        InputError: fewer than two pairs, unequal lengths, or a number that is not > 0.
    """
    values_N, reference_N = _positive(values, "values"), _positive(reference, "reference")
    _check_pairs(values_N, reference_N)
    if len(values_N) < 2:
        raise InputError("a ratio needs at least two pairs", got=values_N.shape)
    ratios = np.log(values_N) - np.log(reference_N)
    mean = float(ratios.mean())
    error = float(ratios.std(ddof=1) / np.sqrt(len(ratios)))
    two_sided = float(stats.t.ppf(0.975, len(ratios) - 1)) * error
    one_sided = float(stats.t.ppf(0.95, len(ratios) - 1)) * error
    return Estimate(
        value=float(np.exp(mean)),
        low=float(np.exp(mean - two_sided)),
        high=float(np.exp(mean + two_sided)),
        upper_95=float(np.exp(mean + one_sided)),
        num=len(ratios),
    )


def kendall_tau(first: ArrayLike, second: ArrayLike) -> Estimate:
    """Kendall's tau-b of two rankings, with a percentile bootstrap over the pairs.

    Args:
        first: n numbers.
        second: n numbers.

    Raises:
        InputError: fewer than three pairs, unequal lengths, or a number that is not finite.
    """
    first_N = np.asarray(first, dtype=np.float64)
    second_N = np.asarray(second, dtype=np.float64)
    if first_N.shape != second_N.shape or first_N.ndim != 1 or len(first_N) < 3:
        raise InputError(
            "Kendall's tau needs at least three pairs", got=f"{first_N.shape}, {second_N.shape}"
        )
    if not np.all(np.isfinite(first_N) & np.isfinite(second_N)):
        raise InputError("Kendall's tau needs finite numbers", remedy="leave the other pairs out")
    generator = np.random.default_rng(SEED)
    draws = []
    for _ in range(NUM_RESAMPLES):
        rows = generator.integers(0, len(first_N), len(first_N))
        tau = float(stats.kendalltau(first_N[rows], second_N[rows]).statistic)
        if np.isfinite(tau):  # a draw of one pair over and over has no order
            draws.append(tau)
    value = float(stats.kendalltau(first_N, second_N).statistic)
    low, high, upper = np.quantile(draws, [0.025, 0.975, 0.95]) if draws else (value,) * 3
    return Estimate(
        value=value, low=float(low), high=float(high), upper_95=float(upper), num=len(first_N)
    )


def relative_errors(predicted: ArrayLike, measured: ArrayLike) -> FloatArray:
    """|predicted − measured| / measured, pair by pair.

    Raises:
        InputError: unequal lengths, or a measured value that is not > 0.
    """
    predicted_N, measured_N = (
        np.asarray(predicted, dtype=np.float64),
        _positive(measured, "measured"),
    )
    _check_pairs(predicted_N, measured_N)
    return np.abs(predicted_N - measured_N) / measured_N


def mean_and_std(values: ArrayLike) -> tuple[float, float]:
    """Mean and sample standard deviation (0 for a single value) of the finite values."""
    finite = np.asarray(values, dtype=np.float64)
    finite = finite[np.isfinite(finite)]
    if len(finite) == 0:
        return float("nan"), float("nan")
    return float(finite.mean()), float(finite.std(ddof=1)) if len(finite) > 1 else 0.0


def _positive(values: ArrayLike, what: str) -> FloatArray:
    array = np.asarray(values, dtype=np.float64)
    usable = np.isfinite(array) & (array > 0)
    if not np.all(usable):
        raise InputError(f"{what} must be finite numbers > 0", got=array[~usable][:5].tolist())
    return array


def _check_pairs(first: FloatArray, second: FloatArray) -> None:
    """Refuse what NumPy would broadcast: one number against many is no pairing."""
    if first.ndim != 1 or first.shape != second.shape:
        raise InputError("values must come in pairs", got=f"{first.shape} against {second.shape}")
