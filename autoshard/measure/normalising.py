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

from collections.abc import Mapping
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """How the times of one machine's and protocol's sets follow the references."""

    center_J: FloatArray
    """Median log times of the references."""
    mean_log_ms: float
    std_log_ms: float
    """Of the sets' totals."""
    response_K: Mapping[str, FloatArray]
    """β and γ of each phase."""

    @classmethod
    def fit(cls, rows: pd.DataFrame) -> Response | None:
        """Least squares within sets; None where too few sets were measured twice.

        Args:
            rows: kernel rows of one machine and protocol.
        """
        logs_MJ, size_M = _logs(rows)
        own = cls(
            center_J=np.median(logs_MJ, axis=0),
            mean_log_ms=float(size_M.mean()),
            std_log_ms=max(float(size_M.std(ddof=1)), 1e-9) if len(size_M) > 1 else 1.0,
            response_K={},
        )
        inputs_MK = own._inputs(logs_MJ, size_M)
        index_M = rows["index"].to_numpy()
        if len(index_M) - len(np.unique(index_M)) < _ROWS_PER_NUMBER * inputs_MK.shape[1]:
            return None
        within_MK = _less_mean_of_set(inputs_MK, index_M)
        response_K: dict[str, FloatArray] = {}
        for phase in PHASES:
            times_M1 = np.log(rows[[f"{phase}_ms"]].to_numpy(dtype=np.float64))
            wanted_M1 = _less_mean_of_set(times_M1, index_M)
            found_K1, *_ = np.linalg.lstsq(within_MK, wanted_M1, rcond=None)
            response_K[phase] = found_K1[:, 0].astype(np.float64)
        return replace(own, response_K=response_K)

    def apply(self, rows: pd.DataFrame) -> pd.DataFrame:
        """Rows of the same machine and protocol with times of its usual speed."""
        rows = rows.copy()
        inputs_MK = self._inputs(*_logs(rows))
        for phase, response_K in self.response_K.items():
            columns = [f"{phase}_{suffix}" for suffix in _SUFFIXES]
            rows[columns] = rows[columns].mul(np.exp(-(inputs_MK @ response_K)), axis=0)
        return rows

    def _inputs(self, logs_MJ: FloatArray, size_M: FloatArray) -> FloatArray:
        centered_MJ = logs_MJ - self.center_J
        z_M = (size_M - self.mean_log_ms) / self.std_log_ms
        return np.hstack([centered_MJ, centered_MJ * z_M[:, None]])


def _logs(rows: pd.DataFrame) -> tuple[FloatArray, FloatArray]:
    """Logarithms of the references' times, [M, J], and of each row's set's mean total, [M]."""
    logs_MJ = np.log(rows[list(REFERENCE_COLUMNS)].to_numpy(dtype=np.float64))
    total_M = (rows["fwd_ms"] + rows["bwd_ms"]).groupby(rows["index"]).transform("mean")
    return logs_MJ, np.log(total_M.to_numpy(dtype=np.float64))


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
        response = Response.fit(group)
        if response is not None:
            frame.loc[group.index] = response.apply(group)
    return frame


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
