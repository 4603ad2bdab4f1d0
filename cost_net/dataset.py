"""Measured rows as tensors: shard sets with their timings, collectives with theirs.

A row's split is that of its tables, fixed when it was measured: test tables occur in no
training row, which `KernelData.check_disjoint` verifies.

Shapes: N=shard sets, S=shards of all sets together, F=shard features, P=phases (forward,
backward), M=collectives, C=traffic features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from autoshard.errors import InputError
from autoshard.features import TRAFFIC_FEATURES
from autoshard.measure.config import Collective, SimulatedDevice
from autoshard.measure.loading import (
    environments_in,
    load_collective_rows,
    load_kernel_measurements,
    row_features,
    row_slices,
)
from autoshard.objective import CostSource
from autoshard.problem import Optimizer, parse_optimizer

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
SPLITS = ("train", "validation", "test")
PHASES = ("fwd", "bwd")
#: Processors where every rank has its own.
NO_LIMIT = 1e9
#: One in so many collectives of a kind and world size is kept for the error report.
HELD_OUT_EVERY = 5


def shard_rows(num_shards_N: IntArray, rows: IntArray) -> tuple[IntArray, IntArray]:
    """Where the shards of chosen sets stand, if the shards of all sets stand one after another.

    Returns:
        The shards' row numbers, set by set, and how many each chosen set has.
    """
    starts = np.cumsum(num_shards_N) - num_shards_N
    counts = num_shards_N[rows]
    shift = starts[rows] - (np.cumsum(counts) - counts)
    return np.repeat(shift, counts) + np.arange(int(counts.sum())), counts


@dataclass(frozen=True, kw_only=True, eq=False)
class KernelData:
    """N measured shard sets."""

    features_SF: FloatArray
    set_S: IntArray
    """Which set each shard belongs to."""
    time_ms_NP: FloatArray
    """Measured forward and backward, > 0."""
    split_N: NDArray[np.str_]
    index_N: IntArray
    """Number of the shard set: one that was measured twice has two rows with one number."""
    optimizer: Optimizer
    tables: Mapping[str, frozenset[str]]
    """Names of the tables of each split."""

    @property
    def num_sets(self) -> int:
        """How many rows there are."""
        return len(self.time_ms_NP)

    @property
    def num_shards_N(self) -> IntArray:
        """Shards in each set, [N]."""
        return np.bincount(self.set_S, minlength=self.num_sets)

    def of(self, chosen_N: BoolArray | IntArray) -> KernelData:
        """Some of the sets, in the order given."""
        rows = np.arange(self.num_sets, dtype=np.int64)[chosen_N]
        flat, counts = shard_rows(self.num_shards_N, rows)
        return KernelData(
            features_SF=self.features_SF[flat],
            set_S=np.repeat(np.arange(len(rows)), counts),
            time_ms_NP=self.time_ms_NP[rows],
            split_N=self.split_N[rows],
            index_N=self.index_N[rows],
            optimizer=self.optimizer,
            tables=self.tables,
        )

    def split(self, name: str) -> KernelData:
        """The sets of one split."""
        return self.of(self.split_N == name)

    def summed(self, columns: slice | IntArray) -> FloatArray:
        """Sums of feature columns over each set's shards, [N, len(columns)]."""
        values = self.features_SF[:, columns]
        result = np.zeros((self.num_sets, values.shape[1]))
        np.add.at(result, self.set_S, values)
        return result

    def check_disjoint(self) -> None:
        """Refuse data in which a table occurs in two splits.

        Raises:
            InputError: some table does.
        """
        for index, first in enumerate(SPLITS):
            for second in SPLITS[index + 1 :]:
                common = self.tables.get(first, frozenset()) & self.tables.get(second, frozenset())
                if common:
                    raise InputError(
                        f"tables occur in both the {first} and the {second} split",
                        got=f"{len(common)} table(s), such as {min(common)!r}",
                        remedy="measure into one folder with one seed, so that the split is one",
                    )


@dataclass(frozen=True, kw_only=True, eq=False)
class CollectiveData:
    """M measured collectives of one kind."""

    traffic_MC: FloatArray
    time_ms_M: FloatArray
    oversubscribed_M: BoolArray
    test_M: BoolArray
    """Held out: about a fifth of each world size. Exchanges share no tables to split by."""
    num_processors: float = NO_LIMIT
    """What the ranks of one host share."""

    @property
    def world_sizes(self) -> tuple[int, ...]:
        """World sizes that occur, ascending."""
        return tuple(sorted({int(size) for size in self.traffic_MC[:, 0]}))

    def of(self, chosen_M: BoolArray) -> CollectiveData:
        """Some of the collectives."""
        return CollectiveData(
            traffic_MC=self.traffic_MC[chosen_M],
            time_ms_M=self.time_ms_M[chosen_M],
            oversubscribed_M=self.oversubscribed_M[chosen_M],
            test_M=self.test_M[chosen_M],
            num_processors=self.num_processors,
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class MeasuredData:
    """All that a cost model learns from, and where it comes from."""

    kernels: KernelData
    collectives: CollectiveData
    """All-to-alls, the only ones that the exported model predicts."""
    facts: Mapping[str, Any]
    """Hardware, versions, counts and times, as plain values."""
    other_collectives: Mapping[Collective, CollectiveData] = field(default_factory=dict)
    """Those of other kinds that were measured, for the error report."""

    @property
    def source(self) -> CostSource:
        """Of the costs of a model that learns from these rows."""
        if self.facts.get("device") == SimulatedDevice.SIMULATED.value:
            return CostSource.SIMULATED
        return CostSource.PREDICTED


def kernel_data(frame: pd.DataFrame) -> KernelData:
    """Turn kernel rows into arrays.

    Args:
        frame: as returned by `autoshard.measure.loading.load_kernel_measurements`.

    Raises:
        InputError: there are no rows, or rows of several optimizers.
    """
    if frame.empty:
        raise InputError("there are no kernel measurements", remedy="run experiments.measure")
    optimizers = sorted(frame["optimizer"].unique().tolist())
    if len(optimizers) > 1:
        raise InputError(
            "measurements of different optimizers are mixed",
            got=optimizers,
            remedy="train one model for each optimizer",
        )
    features, set_S = [], []
    tables: dict[str, set[str]] = {name: set() for name in SPLITS}
    for number, record in enumerate(frame.to_dict("records")):
        row = {str(key): value for key, value in record.items()}
        own = row_features(row)
        features.append(own)
        set_S.append(np.full(len(own), number))
        tables[str(row["split"])].update(s.table.name for s in row_slices(row))
    return KernelData(
        features_SF=np.concatenate(features),
        set_S=np.concatenate(set_S),
        time_ms_NP=frame[["fwd_ms", "bwd_ms"]].to_numpy(dtype=np.float64),
        split_N=frame["split"].to_numpy(dtype=str),
        # Draws are numbered within a protocol: two folders both begin at 0.
        index_N=np.asarray(
            frame.groupby(["protocol", "hardware_fingerprint", "index"]).ngroup(), dtype=np.int64
        ),
        optimizer=parse_optimizer(optimizers[0]),
        tables={name: frozenset(names) for name, names in tables.items()},
    )


def rows_of(frame: pd.DataFrame, collective: Collective) -> pd.DataFrame:
    """The rows of one kind of collective."""
    return frame[frame["collective"] == collective.value]


def collective_data(
    frame: pd.DataFrame, collective: Collective = Collective.ALL_TO_ALL
) -> CollectiveData:
    """Turn the rows of one kind of collective into arrays; empty exchanges are left out.

    Args:
        frame: as returned by `autoshard.measure.loading.load_collective_rows`, of any kinds.
        collective: which kind.
    """
    frame = rows_of(frame, collective)
    frame = frame[frame["total_bytes"] > 0]
    test_M = np.zeros(len(frame), dtype=bool)
    shuffle = np.random.default_rng(0)
    for size in np.unique(frame["world_size"]):
        rows = shuffle.permutation(np.flatnonzero(frame["world_size"] == size))
        test_M[rows[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY]] = True
    return CollectiveData(
        traffic_MC=frame[list(TRAFFIC_FEATURES)].to_numpy(dtype=np.float64),
        time_ms_M=frame["transfer_ms"].to_numpy(dtype=np.float64),
        oversubscribed_M=frame["oversubscribed"].to_numpy(dtype=bool),
        test_M=test_M,
        num_processors=_processors(frame),
    )


def _processors(frame: pd.DataFrame) -> float:
    """How many ranks work at once: the largest world size that was not oversubscribed."""
    crowded = frame["oversubscribed"].astype(bool)
    if not crowded.any():
        return NO_LIMIT
    roomy = frame.loc[~crowded, "world_size"]
    return float(roomy.max() if len(roomy) else frame["world_size"].min() - 1)


def load_measurements(folders: Sequence[str | Path]) -> MeasuredData:
    """Read what `experiments.measure` wrote.

    Args:
        folders: its output folders.

    Raises:
        InputError: a folder has no measurements, rows are mixed (simulated ones with real ones
            in any way), or splits overlap.
    """
    if not folders:
        raise InputError("no measurements are given", remedy="measurements=[path/to/folder]")
    kernel_files = [existing(folder, "kernels") for folder in folders]
    kernel_frame = load_kernel_measurements(kernel_files)
    collective_frame = load_collective_rows([existing(folder, "collectives") for folder in folders])
    _check_one_device(kernel_frame, collective_frame)
    kernels = kernel_data(kernel_frame)
    kernels.check_disjoint()
    by_kind = {kind: collective_data(collective_frame, kind) for kind in Collective}
    exchanges = rows_of(collective_frame, Collective.ALL_TO_ALL)
    collectives = by_kind.pop(Collective.ALL_TO_ALL)
    if len(collectives.time_ms_M) == 0:
        raise InputError(
            "there are no measurements of all-to-alls",
            remedy="measure with collectives.num_collectives > 0 and all_to_all among "
            "collectives.kinds",
        )
    return MeasuredData(
        kernels=kernels,
        collectives=collectives,
        other_collectives={kind: data for kind, data in by_kind.items() if len(data.time_ms_M)},
        facts={
            "num_kernel_rows": len(kernel_frame),
            "num_collective_rows": len(exchanges),
            "measured_from": str(kernel_frame["measured_at"].min()),
            "measured_to": str(
                max(kernel_frame["measured_at"].max(), exchanges["measured_at"].max())
            ),
            "device": str(kernel_frame["device"].iloc[0]),
            "cache": str(kernel_frame["cache"].iloc[0]),
            "threads": int(kernel_frame["threads"].iloc[0]),
            "concurrent_workers": int(kernel_frame["concurrent_workers"].iloc[0]),
            "num_repeated_sets": int((kernel_frame["repeat"] == 1).sum()),
            "num_passes": int(kernel_frame["num_passes"].max()),
            "num_oversubscribed_rows": int(exchanges["oversubscribed"].sum()),
            "hardware_fingerprint": str(kernel_frame["hardware_fingerprint"].iloc[0]),
            "software_fingerprint": str(kernel_frame["software_fingerprint"].iloc[0]),
            "environments": environments_in(kernel_files),
        },
    )


def _check_one_device(kernel_frame: pd.DataFrame, collective_frame: pd.DataFrame) -> None:
    """Refuse kernels of a simulated device beside all-to-alls of a real or of another one."""
    frames = {"kernels": kernel_frame, "all-to-alls": collective_frame}
    devices = {
        name: sorted(set(zip(frame["device"], frame["hardware_fingerprint"], strict=True)))
        for name, frame in frames.items()
    }
    simulated = any(
        device == SimulatedDevice.SIMULATED.value
        for found in devices.values()
        for device, _ in found
    )
    if simulated and len({device for found in devices.values() for device in found}) > 1:
        raise InputError(
            "kernels and all-to-alls are not of one simulated device",
            got="; ".join(
                f"{name} of {', '.join(' '.join(device) for device in found) or 'none'}"
                for name, found in devices.items()
            ),
            allowed="simulated rows of one device, or real ones",
            remedy="simulate both with one simulated_device",
        )


def existing(folder: str | Path, name: str) -> Path:
    """The `kernels` or `collectives` of a measurement folder, merged or in parts.

    Raises:
        InputError: it has none.
    """
    folder = Path(folder)
    for candidate in (folder / f"{name}.parquet", folder / name):
        if candidate.exists():
            return candidate
    raise InputError(
        f"{folder} holds no {name} measurements",
        remedy=f"run experiments.measure with out={folder}",
    )
