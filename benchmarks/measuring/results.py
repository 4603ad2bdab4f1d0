"""What passes amount to: spread between two measurements of a set, and sets per minute.

Everything is bootstrapped over shard sets, the same draws for all ways.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from autoshard.measure.normalising import Response, combine_passes, repeat_spread
from autoshard.measure.references import REFERENCE_COLUMNS
from benchmarks.measuring.passes import PassResult, Way
from benchmarks.runtime_speed.statistics import Interval

FloatArray = NDArray[np.float64]

NUM_MEASUREMENTS = 2
_NUM_RESAMPLES = 2000
_TAIL_PERCENT = 2.5


@dataclass(frozen=True)
class WayResults:
    """The passes of one way: of the first measurement, then of the second."""

    way: Way
    passes: tuple[tuple[PassResult, ...], ...]

    @property
    def wall_s(self) -> float:
        """All passes of one measurement together, mean of the two."""
        return sum(p.wall_s for passes in self.passes for p in passes) / len(self.passes)

    @property
    def start_s(self) -> float:
        """Starting the processes of one measurement's passes, mean of the two."""
        return sum(p.start_s for passes in self.passes for p in passes) / len(self.passes)

    @property
    def sets_per_minute(self) -> float:
        """Measurements per minute with all processes busy, their start left out."""
        return 60.0 * len(self.passes[0][0].times) / self.wall_s

    def seconds_S(self) -> FloatArray:
        """What each set took of `wall_s`, in order of the sets' numbers; they add up to it.

        The last set's end, when some processes are idle already, is shared out evenly.
        """
        seconds: dict[int, float] = {}
        for passes in self.passes:
            for one in passes:
                busy_s = sum(t.ended_s - t.started_s for t in one.times)
                for t in one.times:
                    share_s = (t.ended_s - t.started_s) * one.wall_s / busy_s / len(self.passes)
                    seconds[t.index] = seconds.get(t.index, 0.0) + share_s
        return np.array([seconds[index] for index in sorted(seconds)])

    def frame(self) -> pd.DataFrame:
        """Rows as `autoshard.measure.normalising` takes them."""
        rows = [
            {
                "hardware_fingerprint": "this machine",
                "protocol": "measured in turns",
                "index": t.index,
                "repeat": repeat,
                "pass": number,
                **{
                    f"{phase}_{suffix}": value
                    for phase, value in (("fwd", t.fwd_ms), ("bwd", t.bwd_ms))
                    for suffix in ("ms", "p20_ms", "p80_ms", "min_ms", "wall_ms")
                },
                **dict(zip(REFERENCE_COLUMNS, t.reference_ms, strict=False)),
            }
            for repeat, passes in enumerate(self.passes)
            for number, one in enumerate(passes)
            for t in one.times
        ]
        return pd.DataFrame(rows)


def raw_spread_S(results: WayResults) -> FloatArray:
    """|a − b| / mean(a, b) of each set's totals, as they were timed."""
    return repeat_spread(combine_passes(results.frame()))


def normalised_spread_S(results: WayResults) -> FloatArray:
    """The same, less what the reference kernels show of the machine.

    How sets follow the references is told, for each half of the sets, by the other half.
    """
    rows = results.frame()
    half_M = rows["index"] % 2
    parts = []
    for half in (0, 1):
        response = Response.fit(rows[half_M != half])
        own = rows[half_M == half]
        parts.append(own if response is None else response.apply(own))
    return repeat_spread(combine_passes(pd.concat(parts).sort_index()))


def median_of(values_S: FloatArray) -> Interval:
    """The median over sets."""
    return _bootstrap(lambda draw: float(np.median(values_S[draw])), len(values_S))


def difference_of_medians(ours_S: FloatArray, theirs_S: FloatArray) -> Interval:
    """Our median less theirs, of the same sets."""
    return _bootstrap(
        lambda draw: float(np.median(ours_S[draw]) - np.median(theirs_S[draw])), len(ours_S)
    )


def rate_ratio(ours: WayResults, theirs: WayResults) -> Interval:
    """How many times as many sets a minute we measure."""
    our_s, their_s = ours.seconds_S(), theirs.seconds_S()
    return _bootstrap(lambda draw: float(their_s[draw].sum() / our_s[draw].sum()), len(our_s))


def _bootstrap(figure: Callable[[NDArray[np.int64]], float], num_sets: int) -> Interval:
    generator = np.random.default_rng(0)
    drawn = [figure(generator.integers(num_sets, size=num_sets)) for _ in range(_NUM_RESAMPLES)]
    low, high = np.percentile(drawn, [_TAIL_PERCENT, 100 - _TAIL_PERCENT])
    return Interval(figure(np.arange(num_sets)), float(low), float(high))


def totals_ms(results: Mapping[Way, WayResults]) -> dict[Way, FloatArray]:
    """Forward and backward together of each set's first measurement, by way."""
    totals = {}
    for way, of_way in results.items():
        rows = combine_passes(of_way.frame())
        first = rows[rows["repeat"] == 0].sort_values("index")
        totals[way] = (first["fwd_ms"] + first["bwd_ms"]).to_numpy()
    return totals
