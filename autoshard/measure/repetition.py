"""When a repeated timing is good enough, and how its repetitions are summed up.

Used for kernels and collectives alike. Medians throughout: on a shared machine single
repetitions are disturbed by several times their length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.measure.config import TimingConfig

NS_PER_MS = 1e6


@dataclass(frozen=True, kw_only=True)
class Repetitions:
    """Order statistics of the timed repetitions of one thing, in milliseconds."""

    median_ms: float
    p20_ms: float
    p80_ms: float
    min_ms: float
    relative_error: float
    """Standard error of the median, as a share of the median."""

    @classmethod
    def of(cls, times_ms: ArrayLike) -> Repetitions:
        """Sum up at least one repetition."""
        ordered = np.sort(np.asarray(times_ms, dtype=np.float64))
        p20, median, p80 = np.percentile(ordered, [20, 50, 80])
        return cls(
            median_ms=float(median),
            p20_ms=float(p20),
            p80_ms=float(p80),
            min_ms=float(ordered[0]),
            relative_error=median_relative_error(ordered),
        )


def median_relative_error(ordered: NDArray[np.float64]) -> float:
    """Standard error of the median of ascending values, as a share of the median.

    Free of any assumption about the distribution: the number of values below the true
    median is binomial with standard deviation √n / 2, so the order statistics that many
    places from the middle enclose it like one standard error on either side.
    """
    count = len(ordered)
    if count < 3:
        return math.inf
    middle, half_width = (count - 1) / 2.0, math.sqrt(count) / 2.0
    low, high = np.interp(
        [middle - half_width, middle + half_width], np.arange(count, dtype=np.float64), ordered
    )
    median = float(np.median(ordered))
    return float(high - low) / 2.0 / median if median > 0 else 0.0


def is_settled(
    series_ms: Sequence[Sequence[float]], elapsed_s: float, config: TimingConfig
) -> bool:
    """Whether to stop repeating.

    Args:
        series_ms: the repetitions so far of everything timed together, equally many of each.
        elapsed_s: what the timed repetitions took.
        config: the limits.
    """
    count = len(series_ms[0])
    if count < config.min_iterations:
        return False
    return is_used_up(count, elapsed_s, config) or reached_target(series_ms, config)


def is_used_up(count: int, elapsed_s: float, config: TimingConfig) -> bool:
    """Whether so many repetitions, or so much time, are all that is allowed."""
    return count >= config.max_iterations or (
        count >= config.min_iterations and elapsed_s >= config.time_budget_s
    )


def reached_target(series_ms: Sequence[Sequence[float]], config: TimingConfig) -> bool:
    """Whether every median is as certain as asked."""
    return all(
        median_relative_error(np.sort(np.asarray(times))) <= config.target_relative_error
        for times in series_ms
    )
