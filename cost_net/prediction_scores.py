"""Scores of predictions that come from outside: the error report's, with an interval.

Shapes: N=measurements (a set that was measured twice has two), Q=quantities, B=resamples.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from autoshard.errors import InputError, listed
from autoshard.problem import parse_optimizer
from cost_net.dataset import PHASES, KernelData
from cost_net.errors import QUANTITIES, noise_floor, score, with_total

FloatArray = NDArray[np.float64]
TIME_COLUMNS = tuple(f"{phase}_ms" for phase in PHASES)
NUM_RESAMPLES = 1000
#: Resamples worked on at a time, which bounds memory.
_RESAMPLES_AT_ONCE = 50
#: As in the error report: a time of 0 would have no order of magnitude.
_LEAST_MS = 1e-9


def score_predictions(frame: pd.DataFrame, predicted: pd.DataFrame, split: str) -> dict[str, Any]:
    """Score predictions of one split.

    Args:
        frame: from `plain_tables.load_kernels`.
        predicted: from `plain_tables.read_predictions`; rows of other splits are not read.
        split: `train`, `validation`, `test`, or `all`.

    Returns:
        `scores[fwd|bwd|total]` as `cost_net.errors.score` gives them, `median_95` (of each
        quantity, a bootstrap over shard sets), `noise_floor`, and what was scored. JSON-able.

    Raises:
        InputError: a set of the split has no prediction or more than one, a prediction is of a
            set that was not measured, or is not a number >= 0; the sets are named.
    """
    part = frame if split == "all" else frame[frame["split"] == split]
    if part.empty:
        raise InputError(
            f"no shard set of the {split} split was measured",
            got=listed(sorted(frame["split"].unique())),
        )
    predicted_NP = _aligned(frame, part, predicted)
    measured_NP = part[list(TIME_COLUMNS)].to_numpy(dtype=np.float64)
    predicted_NP = np.maximum(predicted_NP, _LEAST_MS)
    predicted_NQ, measured_NQ = with_total(predicted_NP), with_total(measured_NP)
    errors_NQ = np.abs(predicted_NQ - measured_NQ) / measured_NQ
    set_N = _numbered(part)
    return {
        "split": split,
        "num_sets": int(set_N.max()) + 1,
        "num_measurements": len(part),
        "device": str(part["device"].iloc[0]),
        "hardware_fingerprint": str(part["hardware_fingerprint"].iloc[0]),
        "scores": score(predicted_NP, measured_NP, part["num_slices"].to_numpy()),
        "median_95": {
            name: list(median_interval(errors_NQ[:, column], set_N))
            for column, name in enumerate(QUANTITIES)
        },
        "noise_floor": noise_floor(_times_only(frame)),
    }


def median_interval(
    errors_N: FloatArray, set_N: NDArray[np.int64], *, seed: int = 0
) -> tuple[float, float]:
    """A 95% percentile bootstrap interval of the median.

    Whole sets are drawn, with replacement: two measurements of one set are not two sets.

    Args:
        errors_N: of each measurement.
        set_N: which set each is of, counted from 0 without gaps.
        seed: of the draws.
    """
    order = np.argsort(errors_N, kind="stable")
    sorted_N, set_N = errors_N[order], set_N[order]
    num_sets = int(set_N.max()) + 1
    generator = np.random.default_rng(seed)
    medians = []
    for _ in range(NUM_RESAMPLES // _RESAMPLES_AT_ONCE):
        drawn = generator.integers(0, num_sets, (_RESAMPLES_AT_ONCE, num_sets))
        times_BN = np.stack([np.bincount(row, minlength=num_sets) for row in drawn])[:, set_N]
        below_BN = times_BN.cumsum(axis=1)
        total_B1 = below_BN[:, -1:]
        middle = [(below_BN <= place).sum(axis=1) for place in ((total_B1 - 1) // 2, total_B1 // 2)]
        medians.append((sorted_N[middle[0]] + sorted_N[middle[1]]) / 2)
    low, high = np.quantile(np.concatenate(medians), [0.025, 0.975])
    return float(low), float(high)


def _numbered(frame: pd.DataFrame) -> NDArray[np.int64]:
    """Which set each row is of, counted from 0 without gaps."""
    return np.asarray(frame.groupby(["protocol", "index"]).ngroup(), dtype=np.int64)


def _names(frame: pd.DataFrame) -> list[str]:
    """The columns that name a set: its number, and its run where there are several."""
    return ["index"] if frame["protocol"].nunique() == 1 else ["protocol", "index"]


def _aligned(frame: pd.DataFrame, part: pd.DataFrame, predicted: pd.DataFrame) -> FloatArray:
    """The prediction for each measurement of `part`, [N, 2]."""
    names = _names(frame)
    if missing := [name for name in names if name not in predicted.columns]:
        raise InputError(
            "predictions do not say which set they are of",
            got=f"no column {listed(missing)}",
            allowed=f"{listed(names)}: the data holds "
            f"{frame['protocol'].nunique()} runs, each numbered from 0",
        )
    keys = pd.MultiIndex.from_frame(predicted[names])
    known = pd.MultiIndex.from_frame(frame[names].drop_duplicates())
    wanted = pd.MultiIndex.from_frame(part[names])
    _refuse(keys[~keys.isin(known)], "predictions are of sets that the data does not hold")
    own = keys.isin(wanted)
    keys, values = keys[own], predicted.loc[own, list(TIME_COLUMNS)].to_numpy(dtype=np.float64)
    _refuse(keys[keys.duplicated()], "sets have more than one prediction")
    _refuse(wanted[~wanted.isin(keys)].unique(), "sets have no prediction")
    unusable = ~np.isfinite(values).all(axis=1)
    _refuse(keys[np.flatnonzero(unusable)], "predictions are not finite numbers")
    _refuse(keys[np.flatnonzero((values < 0).any(axis=1))], "predictions are negative")
    return values[keys.get_indexer(wanted)]


def _refuse(sets: pd.MultiIndex, what: str) -> None:
    if len(sets):
        named = [", ".join(map(str, name)) for name in sets.unique()]
        raise InputError(
            what,
            got=f"{len(named)} set(s), {listed(f'index {name}' for name in named)}",
            remedy="one row per shard set, with fwd_ms and bwd_ms >= 0",
        )


def _times_only(frame: pd.DataFrame) -> KernelData:
    """The data set without features, which take long to work out and play no part in scores."""
    counts = frame["num_slices"].to_numpy(dtype=np.int64)
    return KernelData(
        features_SF=np.zeros((int(counts.sum()), 0)),
        set_S=np.repeat(np.arange(len(frame)), counts),
        time_ms_NP=frame[list(TIME_COLUMNS)].to_numpy(dtype=np.float64),
        split_N=frame["split"].to_numpy(dtype=str),
        index_N=_numbered(frame),
        optimizer=parse_optimizer(str(frame["optimizer"].iloc[0])),
        tables={},
    )
