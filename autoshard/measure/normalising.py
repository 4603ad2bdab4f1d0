"""Takes the machine's moods out of kernel rows, and makes one measurement of several passes.

Between raw rows (`loading.load_kernel_rows`) and what learns from them. The reference kernels
that were timed in between show how slow the machine was; the sets that were measured several
times show how much of that reaches a set's forward and backward. Sets that live in the caches
follow other references than those that wait for memory, so the response depends on the size:

    log t[row] = c[set] + Σ_j (β_j + γ_j · z[set]) · log r_j[row] + noise

with r_j the references' times and z the standardised log of the set's time. β and γ are least
squares within sets, for each phase, machine and protocol; c cancels, so what a set costs does
not enter. A row's times are then taken to the run's median r.

Shapes: M=rows, J=references and phases.
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from autoshard.measure.references import PHASES, REFERENCE_COLUMNS

FloatArray = NDArray[np.float64]
#: One response for all rows of a group.
_GROUP = ["hardware_fingerprint", "protocol"]
_SET = [*_GROUP, "index"]
MEASUREMENT = [*_SET, "repeat"]
#: Times of a phase that move together.
_SUFFIXES = ("ms", "p20_ms", "p80_ms", "min_ms", "wall_ms")
#: So many rows beyond the first of their sets are needed for each number that is fitted.
_ROWS_PER_NUMBER = 5


def normalise_by_references(frame: pd.DataFrame) -> pd.DataFrame:
    """See the module's first lines.

    Groups with too few sets measured twice to tell the response keep their times.

    Args:
        frame: from `loading.load_kernel_rows`.

    Returns:
        The same rows, with normalised times.
    """
    frame = frame.copy()
    for _, group in frame.groupby(_GROUP):
        factors = _factors(group)
        if factors is None:
            continue
        for phase, factor_M in factors.items():
            for suffix in _SUFFIXES:
                frame.loc[group.index, f"{phase}_{suffix}"] *= factor_M
    return frame


def _factors(group: pd.DataFrame) -> dict[str, FloatArray] | None:
    """What to multiply each row's times by, per phase; None if that cannot be told."""
    logs_MJ = np.log(group[list(REFERENCE_COLUMNS)].to_numpy(dtype=np.float64))
    logs_MJ -= np.median(logs_MJ, axis=0)
    size_M = np.log((group["fwd_ms"] + group["bwd_ms"]).groupby(group["index"]).transform("mean"))
    z_M = (size_M - size_M.mean()) / max(float(size_M.std()), 1e-9)
    inputs_MK = np.hstack([logs_MJ, logs_MJ * z_M.to_numpy()[:, None]])
    index = group["index"].to_numpy()
    if len(index) - len(np.unique(index)) < _ROWS_PER_NUMBER * inputs_MK.shape[1]:
        return None
    within_MK = _less_mean_of_set(inputs_MK, index)
    factors = {}
    for phase in PHASES:
        times_M1 = np.log(group[[f"{phase}_ms"]].to_numpy(dtype=np.float64))
        response_K1, *_ = np.linalg.lstsq(within_MK, _less_mean_of_set(times_M1, index), rcond=None)
        factors[phase] = np.exp(-(inputs_MK @ response_K1)[:, 0])
    return factors


def _less_mean_of_set(values_MK: FloatArray, index_M: NDArray[np.int64]) -> FloatArray:
    _, set_M = np.unique(index_M, return_inverse=True)
    sums = np.zeros((set_M.max() + 1, values_MK.shape[1]))
    np.add.at(sums, set_M, values_MK)
    return values_MK - (sums / np.bincount(set_M)[:, None])[set_M]


def combine_passes(frame: pd.DataFrame) -> pd.DataFrame:
    """One row per measurement: the geometric mean of its passes.

    Args:
        frame: kernel rows, normalised or not.

    Returns:
        The first pass's row of each measurement with the means of `fwd_ms` and `bwd_ms`, and two
        more columns: `num_passes`, and `pass_spread`, the difference between the largest and the
        smallest total as a share of their mean (NaN for a single pass).
    """
    times = [f"{phase}_ms" for phase in PHASES]
    logs = pd.DataFrame(np.log(frame[times]))
    total = frame[times].sum(axis=1)
    keys = [frame[name] for name in MEASUREMENT]
    means = pd.DataFrame(np.exp(logs.groupby(keys).mean()))
    extremes = total.groupby(keys).agg(["min", "max", "mean", "size"])
    rows = frame.sort_values("pass", kind="stable").drop_duplicates(MEASUREMENT)
    rows = rows.set_index(MEASUREMENT).sort_index()
    means, extremes = means.loc[rows.index], extremes.loc[rows.index]
    rows[times] = means
    rows["num_passes"] = extremes["size"]
    spread = (extremes["max"] - extremes["min"]) / extremes["mean"]
    rows["pass_spread"] = spread.where(extremes["size"] > 1)
    return rows.reset_index()


def repeat_spread(frame: pd.DataFrame) -> FloatArray:
    """|a − b| / mean(a, b) of the totals of two measurements a and b of one set.

    Args:
        frame: from `combine_passes`.

    Returns:
        One number per set that was measured twice.
    """
    total = (frame["fwd_ms"] + frame["bwd_ms"]).rename("total")
    pairs = pd.concat([frame[MEASUREMENT], total], axis=1).pivot_table(
        index=_SET, columns="repeat", values="total"
    )
    if 0 not in pairs or 1 not in pairs:
        return np.zeros(0)
    first, second = pairs[0].to_numpy(), pairs[1].to_numpy()
    spread = 2 * np.abs(first - second) / (first + second)
    return spread[np.isfinite(spread)]
