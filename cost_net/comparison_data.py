"""What cost models are compared on: measured sets, what kind each is, and sets beyond them.

Stands between measurement files and `comparison`. Every set counts once, with its first
measurement; a second one is kept apart, as the prediction that nothing can beat.

Shapes: N=measured shard sets, P=phases.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from autoshard.errors import InputError
from autoshard.measure.loading import (
    load_kernel_measurements,
    row_slices,
    row_training,
)
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import DataType
from cost_net.dataset import KernelData, existing, kernel_data
from cost_net.probe_sets import GrownSets, SetOnRank, grow_sets, odd_sets

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]
#: Kinds of sets; one set may be of several.
REPLICAS, ROW_SLICES, COLUMN_SLICES = "with replicas", "with row slices", "with column slices"
VARIANTS, PLAIN = "with variants", "whole plain tables only"
_TEXT_FACTS = ("device", "cache", "hardware_fingerprint", "software_fingerprint")
_COUNT_FACTS = ("threads", "concurrent_workers")
KINDS = (PLAIN, REPLICAS, ROW_SLICES, COLUMN_SLICES, VARIANTS)


@dataclass(frozen=True, kw_only=True, eq=False)
class ComparisonData:
    """What contenders learn from and are asked."""

    kernels: KernelData
    """N sets, each with its first measurement."""
    second_ms_NP: FloatArray
    """The second measurement; NaN where there is none."""
    kinds: Mapping[str, BoolArray]
    """Of `KINDS`, which sets are of that kind, [N]."""
    grown: GrownSets
    odd: Mapping[str, KernelData]
    """`random` and `absurd` sets."""
    facts: Mapping[str, Any]
    """Where the measurements come from."""

    @property
    def mark(self) -> str:
        """Identifies the numbers that contenders learn from and are judged by."""
        kernels = self.kernels
        digest = hashlib.sha256()
        for part in (kernels, self.grown.data, *self.odd.values()):
            for values in (part.features_SF, part.set_S, part.time_ms_NP):
                digest.update(np.ascontiguousarray(values).tobytes())
            digest.update("/".join(part.split_N).encode())
        return digest.hexdigest()[:16]


def load_comparison_data(
    folders: Sequence[str | Path], *, num_grown_sets: int, num_random_sets: int, seed: int
) -> ComparisonData:
    """Read what `experiments.measure` wrote; collectives are not needed.

    Args:
        folders: its output folders.
        num_grown_sets: test sets that are grown at most.
        num_random_sets: random sets besides.
        seed: of both choices.

    Raises:
        InputError: a folder has no kernel measurements, or rows cannot be used together.
    """
    if not folders:
        raise InputError("no measurements are given", remedy="measurements=[path/to/folder]")
    frame = load_kernel_measurements([existing(folder, "kernels") for folder in folders])
    return comparison_data(
        frame, num_grown_sets=num_grown_sets, num_random_sets=num_random_sets, seed=seed
    )


def comparison_data(
    frame: pd.DataFrame, *, num_grown_sets: int, num_random_sets: int, seed: int
) -> ComparisonData:
    """The same of rows that are read already.

    Args:
        frame: as returned by `autoshard.measure.loading.load_kernel_measurements`.
        num_grown_sets: test sets that are grown at most.
        num_random_sets: random sets besides.
        seed: of both choices.

    Raises:
        InputError: a split is empty, or a table occurs in two of them.
    """
    everything = kernel_data(frame)
    everything.check_disjoint()
    _, first = np.unique(everything.index_N, return_index=True)
    kernels = everything.of(first)
    for split in ("train", "validation", "test"):
        if not np.any(kernels.split_N == split):
            raise InputError(
                f"no measured shard set belongs to the {split} split",
                remedy="measure more sets, or set sampling.split_shares",
            )
    records = [
        {str(key): value for key, value in record.items()}
        for record in frame.iloc[first].to_dict("records")
    ]
    slices = [row_slices(record) for record in records]
    sets = {
        row: SetOnRank(
            slices=slices[row],
            training=row_training(records[row]),
            world_size=int(records[row]["world_size"]),
        )
        for row in np.flatnonzero(kernels.split_N == "test").tolist()
    }
    return ComparisonData(
        kernels=kernels,
        second_ms_NP=_second_ms(everything, kernels),
        kinds={kind: np.array([kind in kinds_of(own) for own in slices]) for kind in KINDS},
        grown=grow_sets(sets, kernels.optimizer, num_grown_sets, seed=seed),
        odd=odd_sets(kernels.optimizer, num_random_sets, seed=seed),
        facts={
            "num_rows": len(frame),
            "measured_from": str(frame["measured_at"].min()),
            "measured_to": str(frame["measured_at"].max()),
            **{name: str(frame[name].iloc[0]) for name in _TEXT_FACTS},
            **{name: int(frame[name].iloc[0]) for name in _COUNT_FACTS},
        },
    )


def _second_ms(everything: KernelData, kernels: KernelData) -> FloatArray:
    """Each set's second measurement, float64 [N, P]."""
    order = np.argsort(everything.index_N, kind="stable")
    index = everything.index_N[order]
    repeated = np.flatnonzero(index[1:] == index[:-1])
    second_ms_NP = np.full(kernels.time_ms_NP.shape, np.nan)
    # The sets stand in the order of their numbers. Backwards, so that of three the second stays.
    for place in repeated[::-1]:
        row = int(np.searchsorted(kernels.index_N, index[place]))
        second_ms_NP[row] = everything.time_ms_NP[order[place + 1]]
    return second_ms_NP


def kinds_of(slices: Sequence[ShardSlice]) -> frozenset[str]:
    """Which of `KINDS` a set is."""
    kinds = set()
    for slice_ in slices:
        table = slice_.table
        if slice_.sharding_type is ShardingType.DATA_PARALLEL:
            kinds.add(REPLICAS)
        if slice_.num_rows < table.num_embeddings:
            kinds.add(ROW_SLICES)
        if slice_.num_cols < table.embedding_dim:
            kinds.add(COLUMN_SLICES)
        if table.weighted or table.data_type is not DataType.FP32 or table.num_features > 1:
            kinds.add(VARIANTS)
    return frozenset(kinds or {PLAIN})
