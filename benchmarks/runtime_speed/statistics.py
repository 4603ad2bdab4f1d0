"""Medians and ratios of interleaved rounds, with intervals."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

_NUM_RESAMPLES = 2000
_CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """A figure and its 95% bootstrap interval."""

    value: float
    low: float
    high: float

    def to_json(self) -> dict[str, float]:
        """As a plain dictionary."""
        return {"value": self.value, "low": self.low, "high": self.high}

    def __str__(self) -> str:
        return f"{self.value:.2f} [{self.low:.2f}, {self.high:.2f}]"


def median_ms(rounds_ms: Sequence[Sequence[float]]) -> float:
    """The median over all steps of all rounds."""
    return float(np.median(np.concatenate([np.asarray(steps) for steps in rounds_ms])))


def percentile_ms(rounds_ms: Sequence[Sequence[float]], percent: float) -> float:
    """A percentile over all steps of all rounds."""
    return float(np.percentile(np.concatenate([np.asarray(r) for r in rounds_ms]), percent))


def ratio_of_medians(
    ours_ms: Sequence[Sequence[float]], theirs_ms: Sequence[Sequence[float]]
) -> Interval:
    """Our median step time over theirs.

    Rounds of both ran side by side, so they are drawn in pairs: what slows the machine
    for a while slows both.

    Args:
        ours_ms: per round, its steps.
        theirs_ms: the same number of rounds.
    """
    generator = np.random.default_rng(0)
    ours = [np.asarray(steps) for steps in ours_ms]
    theirs = [np.asarray(steps) for steps in theirs_ms]
    drawn = []
    for _ in range(_NUM_RESAMPLES):
        picks = generator.integers(len(ours), size=len(ours))
        drawn.append(
            np.median(np.concatenate([ours[i] for i in picks]))
            / np.median(np.concatenate([theirs[i] for i in picks]))
        )
    tail = 50 * (1 - _CONFIDENCE)
    low, high = np.percentile(drawn, [tail, 100 - tail])
    return Interval(median_ms(ours_ms) / median_ms(theirs_ms), float(low), float(high))
