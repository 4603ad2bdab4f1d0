"""Draws training batches: the ids that kernels are measured with and plans are run on.

A workload gives tables; this file turns them into ids. `draw_kernel_batch` makes the
input of one rank's multi-table kernel, `draw_table_batch` makes one table's part of a
rank's local batch. Both repeat exactly for a generator of the same seed.

Shapes: F=features, B=samples, L=ids, K=buckets.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.distributions import IdDistribution, sample_ids
from autoshard.errors import InputError, quoted
from autoshard.shards import ShardSlice
from autoshard.tables import BagLengths, Table

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
WeightArray = NDArray[np.float32]

#: Most ids in one batch: 16 GiB of int64. More is a mistake in a pooling factor.
MAX_BATCH_IDS = 2**31


@dataclass(frozen=True, kw_only=True)
class KernelBatch:
    """The input of one multi-table kernel, in FBGEMM's table-batched layout.

    Bags are feature-major: for each slice, for each of its features, one bag per sample.
    """

    values: IntArray
    """Ids, int64 [L], each in [0, num_rows) of its slice."""
    offsets: IntArray
    """Where each bag starts, and the end: int64 [num_features · num_samples + 1]."""
    weights: WeightArray | None
    """One weight per id, float32 [L]; 1 for tables that have none; None if none has."""


@dataclass(frozen=True, kw_only=True)
class TableBatch:
    """What one table is asked for in a batch of samples."""

    lengths: IntArray
    """Ids per bag, int64 [num_features, num_samples]."""
    values: IntArray
    """Ids, int64 [L], feature-major, each in [0, num_embeddings)."""
    weights: WeightArray | None
    """One weight per id, float32 [L]; None unless the table is weighted."""


def sample_lengths(
    table: Table, num_samples: int, generator: np.random.Generator, *, row_share: float = 1.0
) -> IntArray:
    """Draw the number of ids in each bag.

    Args:
        table: gives the pooling factor and the kind of bag lengths.
        num_samples: bags per feature, >= 0.
        generator: the source of randomness.
        row_share: the part of the table's rows that is asked; each id falls into it
            with this probability, so bags shrink binomially.

    Returns:
        int64 [num_features, num_samples]. With constant bags, the sum over a feature is
        within 1 of num_samples · pooling_factor (before `row_share` is applied).

    Raises:
        InputError: `num_samples` is not usable, or the batch would not fit any memory.
    """
    if isinstance(num_samples, bool) or not isinstance(num_samples, int | np.integer):
        raise InputError("num_samples is not a whole number", got=quoted(num_samples))
    if num_samples < 0:
        raise InputError("num_samples is negative", got=num_samples, allowed="integers >= 0")
    expected = table.lookups_per_sample * row_share * num_samples
    if expected > MAX_BATCH_IDS:
        raise InputError(
            f"table {table.name!r}: one batch would hold {expected:.3g} ids",
            allowed=f"at most {MAX_BATCH_IDS}",
            remedy="lower the batch size or the pooling factor",
        )
    shape = (table.num_features, int(num_samples))
    if table.bag_lengths is BagLengths.POISSON:
        return generator.poisson(table.pooling_factor * row_share, size=shape).astype(np.int64)
    whole = math.floor(table.pooling_factor)
    lengths_FB = np.full(shape, whole, dtype=np.int64)
    fraction = table.pooling_factor - whole
    if fraction > 0.0:
        for lengths_B in lengths_FB:
            # Exactly the share of longer bags that gives the mean, in random places.
            longer = math.floor(num_samples * fraction + generator.random())
            lengths_B[:longer] += 1
            generator.shuffle(lengths_B)
    if row_share < 1.0:
        lengths_FB = generator.binomial(lengths_FB, row_share).astype(np.int64)
    return lengths_FB


def slice_distribution(table: Table, num_rows: int) -> IdDistribution:
    """How ids are spread over a row slice of `num_rows` rows of `table`.

    Rows of every popularity are scattered evenly over the table, so a slice is a smaller
    table with the same popularity curve; rows that would become fractional are merged.
    """
    if num_rows >= table.num_embeddings:
        return table.ids
    return _slice_distribution(table.ids, table.num_embeddings, num_rows)


@lru_cache(maxsize=65_536)
def _slice_distribution(ids: IdDistribution, num_embeddings: int, num_rows: int) -> IdDistribution:
    if not ids.is_measured and ids.zipf_exponent == 0.0:
        return ids
    rows_K, shares_K = ids.buckets(num_embeddings)
    position = np.concatenate([[0.0], np.cumsum(rows_K)]) * (num_rows / num_embeddings)
    mass = np.concatenate([[0.0], np.cumsum(shares_K)])
    edges = np.unique(np.maximum(np.round(position[1:]), 1.0))
    edges = np.concatenate([[0.0], edges])
    # The last bucket keeps what rounding cut off.
    inner = np.interp(edges[1:-1], position, mass)
    shares = np.diff(np.concatenate([[0.0], inner, [mass[-1]]])) / mass[-1]
    return IdDistribution(
        bucket_rows=tuple(int(rows) for rows in np.diff(edges)),
        bucket_shares=tuple(float(share) for share in shares),
    )


def draw_kernel_batch(
    slices: Sequence[ShardSlice], num_samples: int, generator: np.random.Generator
) -> KernelBatch:
    """Draw the ids that one rank's kernel sees in one step.

    Args:
        slices: what the rank holds, in the kernel's order. A row slice is asked for its
            share of the table's ids, numbered from 0; a column slice for all of them.
        num_samples: samples that the kernel sees, of all ranks together unless replicated.
        generator: the source of randomness.

    Returns:
        The batch; empty arrays (and one offset) for no slices.

    Raises:
        InputError: `num_samples` is not usable, or the batch would not fit any memory.
    """
    lengths: list[IntArray] = []
    values: list[IntArray] = []
    weights: list[WeightArray] = []
    any_weighted = any(slice_.table.weighted for slice_ in slices)
    total = sum(s.table.lookups_per_sample * s.row_share for s in slices) * num_samples
    if total > MAX_BATCH_IDS:
        raise InputError(
            f"one batch over {len(slices)} slices would hold {total:.3g} ids",
            allowed=f"at most {MAX_BATCH_IDS}",
            remedy="lower the batch size",
        )
    for slice_ in slices:
        table = slice_.table
        lengths_FB = sample_lengths(table, num_samples, generator, row_share=slice_.row_share)
        lengths.append(lengths_FB.ravel())
        num_ids = int(lengths_FB.sum())
        if num_ids:
            ids = slice_distribution(table, slice_.num_rows)
            values.append(sample_ids(ids, slice_.num_rows, num_ids, generator))
        if any_weighted:
            weights.append(_draw_weights(table, num_ids, generator))
    return KernelBatch(
        values=np.concatenate(values) if values else np.zeros(0, dtype=np.int64),
        offsets=_offsets(lengths),
        weights=np.concatenate(weights) if any_weighted else None,
    )


def draw_table_batch(table: Table, num_samples: int, generator: np.random.Generator) -> TableBatch:
    """Draw what `num_samples` samples ask of one table.

    Raises:
        InputError: `num_samples` is not usable, or the batch would not fit any memory.
    """
    lengths_FB = sample_lengths(table, num_samples, generator)
    num_ids = int(lengths_FB.sum())
    return TableBatch(
        lengths=lengths_FB,
        values=sample_ids(table.ids, table.num_embeddings, num_ids, generator),
        weights=_draw_weights(table, num_ids, generator) if table.weighted else None,
    )


def _draw_weights(table: Table, num_ids: int, generator: np.random.Generator) -> WeightArray:
    """Weights around 1, so that weighted and plain tables train at the same scale."""
    if not table.weighted:
        return np.ones(num_ids, dtype=np.float32)
    return generator.random(num_ids, dtype=np.float32) + np.float32(0.5)


def _offsets(lengths: Sequence[IntArray]) -> IntArray:
    flat = np.concatenate(lengths) if lengths else np.zeros(0, dtype=np.int64)
    offsets = np.zeros(flat.size + 1, dtype=np.int64)
    np.cumsum(flat, out=offsets[1:])
    return offsets
