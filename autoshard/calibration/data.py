"""Measured rows as arrays, for calibration: shard sets and all-to-alls of one machine.

Shapes: N=measured sets, S=shards of all sets together, F=shard features, P=phases (forward,
backward), M=all-to-alls, C=traffic features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from autoshard.errors import InputError
from autoshard.features import TRAFFIC_FEATURES
from autoshard.measure.config import Collective, SimulatedDevice
from autoshard.measure.loading import (
    load_collective_rows,
    load_kernel_measurements,
    row_features,
)
from autoshard.measure.runner import COLLECTIVES_FOLDER, KERNELS_FOLDER
from autoshard.objective import CostSource
from autoshard.problem import Optimizer, parse_optimizer

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
#: Fewer different shard sets say too little about their own error.
MIN_SETS = 20
_FINGERPRINTS = ("hardware_fingerprint", "software_fingerprint")


@dataclass(frozen=True, kw_only=True, eq=False)
class SetRows:
    """N measurements of shard sets."""

    features_SF: FloatArray
    num_shards_N: IntArray
    """Shards of each set, >= 1; the sets' shards stand one after another in `features_SF`."""
    time_ms_NP: FloatArray
    """Measured forward and backward, > 0."""
    index_N: IntArray
    """Which set: one that was measured twice has two rows with one number."""

    @property
    def set_S(self) -> IntArray:
        """Which row each shard belongs to."""
        return np.repeat(np.arange(len(self.num_shards_N)), self.num_shards_N)

    @property
    def num_sets(self) -> int:
        """How many different sets there are."""
        return len(np.unique(self.index_N))

    def of(self, chosen_N: BoolArray | IntArray) -> SetRows:
        """Some of the rows, in the order given."""
        rows = np.arange(len(self.num_shards_N))[chosen_N]
        parts = np.split(self.features_SF, np.cumsum(self.num_shards_N)[:-1])
        return SetRows(
            features_SF=np.concatenate([parts[row] for row in rows] or [self.features_SF[:0]]),
            num_shards_N=self.num_shards_N[rows],
            time_ms_NP=self.time_ms_NP[rows],
            index_N=self.index_N[rows],
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class ExchangeRows:
    """M measured all-to-alls in which something is sent."""

    traffic_MC: FloatArray
    time_ms_M: FloatArray
    """> 0."""

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """World sizes that occur, ascending."""
        return tuple(sorted({int(size) for size in self.traffic_MC[:, 0]}))

    def of(self, chosen_M: BoolArray | IntArray) -> ExchangeRows:
        """Some of the rows."""
        return ExchangeRows(
            traffic_MC=self.traffic_MC[chosen_M], time_ms_M=self.time_ms_M[chosen_M]
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibrationData:
    """What a model is calibrated with, all of one machine, optimizer and setting."""

    sets: SetRows
    exchanges: ExchangeRows | None
    """None: all-to-alls stay as the base model predicts them."""
    optimizer: Optimizer
    facts: Mapping[str, Any]
    """Hardware, versions, counts and times, as plain values."""

    def __post_init__(self) -> None:
        if self.sets.num_sets < MIN_SETS:
            raise InputError(
                "too few shard sets to calibrate with",
                got=self.sets.num_sets,
                allowed=f"at least {MIN_SETS}; 100 are advised",
                remedy="measure more: give a larger --num-sets",
            )

    @property
    def source(self) -> CostSource:
        """Of the costs of a model that is calibrated with these rows."""
        if self.facts.get("device") == SimulatedDevice.SIMULATED.value:
            return CostSource.SIMULATED
        return CostSource.PREDICTED


def calibration_data(kernels: pd.DataFrame, exchanges: pd.DataFrame | None) -> CalibrationData:
    """Turn rows into arrays.

    Args:
        kernels: as `autoshard.measure.loading.load_kernel_measurements` returns them.
        exchanges: as `load_collective_rows` returns them; None for none. Other collectives than
            all-to-alls are not looked at.

    Raises:
        InputError: there are fewer than `MIN_SETS` sets, rows of several optimizers or
            machines, or times that are no times.
    """
    _check_one(kernels, "optimizer", "kernels", "calibrate one model for each optimizer")
    for name in _FINGERPRINTS:
        _check_one(kernels, name, "kernels", "calibrate one model for each machine")
    if exchanges is not None:
        exchanges = exchanges[
            (exchanges["collective"] == Collective.ALL_TO_ALL.value)
            & (exchanges["total_bytes"] > 0)
        ]
        if exchanges.empty:
            exchanges = None
    if exchanges is not None:
        for name in ("device", *_FINGERPRINTS):
            both = pd.concat([kernels[[name]], exchanges[[name]]])
            _check_one(both, name, "kernels and all-to-alls", "measure both on one machine")
    time_ms_NP = kernels[["fwd_ms", "bwd_ms"]].to_numpy(dtype=np.float64)
    _check_times(time_ms_NP)
    features = [
        row_features({str(key): value for key, value in record.items()})
        for record in kernels.to_dict("records")
    ]
    if not features:
        raise InputError("there are no kernel measurements", remedy="measure shard sets first")
    sets = SetRows(
        features_SF=np.concatenate(features),
        num_shards_N=np.array([len(own) for own in features], dtype=np.int64),
        time_ms_NP=time_ms_NP,
        # Draws are numbered within a protocol: two folders both begin at 0.
        index_N=np.asarray(kernels.groupby(["protocol", "index"]).ngroup(), dtype=np.int64),
    )
    return CalibrationData(
        sets=sets,
        exchanges=None if exchanges is None else _exchange_rows(exchanges),
        optimizer=parse_optimizer(kernels["optimizer"].iloc[0]),
        facts={
            "num_kernel_rows": len(kernels),
            "num_collective_rows": 0 if exchanges is None else len(exchanges),
            "measured_from": str(kernels["measured_at"].min()),
            "measured_to": str(kernels["measured_at"].max()),
            **{name: str(kernels[name].iloc[0]) for name in ("device", "cache", *_FINGERPRINTS)},
            **{name: int(kernels[name].iloc[0]) for name in ("threads", "concurrent_workers")},
        },
    )


def _exchange_rows(frame: pd.DataFrame) -> ExchangeRows:
    time_ms_M = frame["transfer_ms"].to_numpy(dtype=np.float64)
    _check_times(time_ms_M)
    return ExchangeRows(
        traffic_MC=frame[list(TRAFFIC_FEATURES)].to_numpy(dtype=np.float64), time_ms_M=time_ms_M
    )


def load_calibration_data(folder: str | Path, *, exchanges: bool = True) -> CalibrationData:
    """Read a folder of measurements.

    Args:
        folder: with `kernels` and, if they are wanted and there, `collectives`: part folders or
            merged files.
        exchanges: whether all-to-alls are wanted.

    Raises:
        InputError: there are no kernels, a file is torn, or see `calibration_data`.
    """
    path = _existing(folder, KERNELS_FOLDER)
    if path is None:
        raise InputError(
            f"{folder} holds no kernel measurements",
            remedy="name a folder that 'autoshard calibrate' or experiments.measure wrote",
        )
    kernels = load_kernel_measurements(path)
    found = _existing(folder, COLLECTIVES_FOLDER) if exchanges else None
    return calibration_data(kernels, None if found is None else load_collective_rows(found))


def _existing(folder: str | Path, name: str) -> Path | None:
    """The merged file, or the folder of parts; None where neither has anything in it."""
    merged, parts = Path(folder) / f"{name}.parquet", Path(folder) / name
    if merged.exists():
        return merged
    return parts if parts.is_dir() and any(parts.glob("part-*.parquet")) else None


def _check_one(frame: pd.DataFrame, column: str, what: str, remedy: str) -> None:
    values = sorted(map(str, frame[column].unique()))
    if len(values) > 1:
        raise InputError(
            f"{what} with different {column.replace('_', ' ')} are mixed", got=values, remedy=remedy
        )


def _check_times(times: FloatArray) -> None:
    if not np.all(np.isfinite(times) & (times > 0)):
        raise InputError(
            "measured times are not usable",
            got="times that are 0, negative or no numbers",
            allowed="milliseconds > 0",
            remedy="measure again into a new folder",
        )
