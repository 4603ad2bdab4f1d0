"""Scores of predictors with their uncertainty: the sets are resampled, with replacement.

Every predictor is resampled alike, so differences between two of them are paired. A network that
was trained with several seeds is scored seed by seed, and the scores are averaged: what one
training can be expected to give, not what an ensemble would.

Shapes: Q=seeds, N=shard sets, B=resamples, P=phases, G=sets of a group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
LOW, HIGH = 0.025, 0.975


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value and its 95% interval."""

    value: float
    low: float
    high: float

    @classmethod
    def of(cls, value: float, draws_B: FloatArray) -> Interval:
        """The percentile interval of a bootstrap; draws that are not finite are left out."""
        draws_B = draws_B[np.isfinite(draws_B)]
        low, high = np.quantile(draws_B, [LOW, HIGH]) if len(draws_B) else (value, value)
        return cls(value=float(value), low=float(low), high=float(high))

    def to_json(self) -> dict[str, float]:
        """The interval as a plain dictionary."""
        return {"value": self.value, "low": self.low, "high": self.high}


@dataclass(frozen=True, kw_only=True, eq=False)
class Resamples:
    """Which sets each resample consists of."""

    rows_BN: IntArray

    @classmethod
    def draw(cls, num_sets: int, num_resamples: int, *, seed: int) -> Resamples:
        """Draw; the same for equal arguments."""
        generator = np.random.default_rng([seed, num_sets])
        return cls(rows_BN=generator.integers(0, num_sets, (num_resamples, num_sets)))

    def counts_BN(self) -> FloatArray:
        """How often each set occurs in each resample, float64 [B, N]."""
        num_resamples, num_sets = self.rows_BN.shape
        flat = (np.arange(num_resamples)[:, None] * num_sets + self.rows_BN).ravel()
        counts = np.bincount(flat, minlength=num_resamples * num_sets)
        return counts.reshape(num_resamples, num_sets).astype(np.float64)


def error_statistics(errors_QN: FloatArray) -> dict[str, FloatArray]:
    """Median, mean and 90th percentile along the last axis, averaged over the first.

    Args:
        errors_QN: relative errors, [Q, …, N].
    """
    ordered = np.sort(errors_QN, axis=-1)
    return {
        "median": _quantile(ordered, 0.5).mean(axis=0),
        "mean": ordered.mean(axis=-1).mean(axis=0),
        "p90": _quantile(ordered, 0.9).mean(axis=0),
    }


def _quantile(ordered: FloatArray, share: float) -> FloatArray:
    """The quantile of ascending values, between neighbours linearly as `numpy.quantile` does."""
    place = share * (ordered.shape[-1] - 1)
    below = int(np.floor(place))
    above = min(below + 1, ordered.shape[-1] - 1)
    return ordered[..., below] + (place - below) * (ordered[..., above] - ordered[..., below])


def error_intervals(errors_QN: FloatArray, resamples: Resamples) -> dict[str, Interval]:
    """The error statistics with their intervals, by name."""
    values = error_statistics(errors_QN)
    draws = error_statistics(errors_QN[:, resamples.rows_BN])
    return {name: Interval.of(float(values[name]), draws[name]) for name in values}


def median_difference(first_QN: FloatArray, other_QN: FloatArray, resamples: Resamples) -> Interval:
    """The first's median error less the other's, on the same resamples; below 0: it is better."""
    draws = [
        error_statistics(errors[:, resamples.rows_BN])["median"] for errors in (first_QN, other_QN)
    ]
    values = [float(error_statistics(errors)["median"]) for errors in (first_QN, other_QN)]
    return Interval.of(values[0] - values[1], draws[0] - draws[1])


def groups_of_equal(values_N: IntArray, min_group: int) -> list[IntArray]:
    """Rows with equal values, one array for each value that occurs often enough."""
    groups = (np.flatnonzero(values_N == value) for value in np.unique(values_N))
    return [rows for rows in groups if len(rows) >= max(min_group, 2)]


def tau_interval(
    predicted_QN: FloatArray,
    measured_N: FloatArray,
    groups: Sequence[IntArray],
    counts_BN: FloatArray,
) -> Interval | None:
    """Kendall's tau-b within groups, averaged over them by their pairs, and over seeds.

    Args:
        predicted_QN: predictions, one row for each seed.
        measured_N: what they are compared with.
        groups: rows of each group, which depend on no prediction.
        counts_BN: how often each set occurs in each resample. A set that occurs twice makes no
            pair with itself.

    Returns:
        None if there is no group in which both differ.
    """
    values, draws = [], []
    for predicted_N in predicted_QN:
        value, draw_B = _grouped_tau(predicted_N, measured_N, groups, counts_BN)
        values.append(value)
        draws.append(draw_B)
    if not np.all(np.isfinite(values)):
        return None
    return Interval.of(float(np.mean(values)), np.mean(draws, axis=0))


def _grouped_tau(
    predicted_N: FloatArray,
    measured_N: FloatArray,
    groups: Sequence[IntArray],
    counts_BN: FloatArray,
) -> tuple[float, FloatArray]:
    total_B, weight_B = np.zeros(len(counts_BN) + 1), np.zeros(len(counts_BN) + 1)
    for rows in groups:
        # The first row is the data itself: every set once.
        counts_BG = np.vstack([np.ones(len(rows)), counts_BN[:, rows]])
        predicted_GG, measured_GG = _signs(predicted_N[rows]), _signs(measured_N[rows])
        concordant_B = _pairs(counts_BG, predicted_GG * measured_GG)
        ordered_B = _pairs(counts_BG, np.abs(predicted_GG)) * _pairs(counts_BG, np.abs(measured_GG))
        usable_B = ordered_B > 0
        tau_B = np.where(usable_B, concordant_B / np.sqrt(np.maximum(ordered_B, 1e-300)), 0.0)
        pairs_B = usable_B * (len(rows) * (len(rows) - 1) / 2)
        total_B += tau_B * pairs_B
        weight_B += pairs_B
    with np.errstate(invalid="ignore"):
        tau_B = np.where(weight_B > 0, total_B / np.where(weight_B > 0, weight_B, 1.0), np.nan)
    return float(tau_B[0]), tau_B[1:]


def _signs(values_G: FloatArray) -> NDArray[np.float32]:
    """Which of two sets is above the other, [G, G]."""
    return np.sign(values_G[:, None] - values_G[None, :]).astype(np.float32)


def _pairs(counts_BG: FloatArray, signs_GG: NDArray[np.float32]) -> FloatArray:
    """Sum over pairs of a resample, [B]."""
    counts = counts_BG.astype(np.float32)
    return ((counts @ signs_GG) * counts).sum(axis=1, dtype=np.float64) / 2


def intervals_to_json(intervals: dict[str, Interval]) -> dict[str, Any]:
    """Named intervals as plain dictionaries."""
    return {name: interval.to_json() for name, interval in intervals.items()}
