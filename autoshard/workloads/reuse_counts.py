"""Counts lookups, and turns the counts into an id distribution: how a trace is measured."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.distributions import NUM_REUSE_BINS, REUSE_BIN_EDGES, IdDistribution

IntArray = NDArray[np.int64]

_MIN_MERGE_SIZE = 1_000_000


def measured_distribution(counts: IntArray) -> IdDistribution:
    """Group the rows of a table by how often they were looked up.

    Each of the 17 reuse bins (0,1], (1,2], (2,4] … becomes one bucket: its rows, and its
    share of the lookups. Rows that never occurred belong to no bucket.

    Args:
        counts: lookups of each row; zeros are ignored. int64 [rows].

    Returns:
        The buckets, hottest first; the uniform distribution if nothing was looked up.
    """
    counts = counts[counts > 0]
    if not counts.size:
        return IdDistribution()
    bin_of = np.searchsorted(np.array(REUSE_BIN_EDGES), counts, side="left")
    rows = np.bincount(bin_of, minlength=NUM_REUSE_BINS)
    lookups = np.bincount(bin_of, weights=counts, minlength=NUM_REUSE_BINS)
    filled = np.flatnonzero(rows)[::-1]
    shares = lookups[filled] / lookups.sum()
    return IdDistribution(
        bucket_rows=tuple(int(count) for count in rows[filled]),
        bucket_shares=tuple(float(share) for share in shares),
    )


class IdCounter:
    """Counts ids that arrive in pieces, in memory that grows with the distinct ids only.

    Ids may be as large as int64, so they are kept sorted rather than used as indices.
    """

    def __init__(self) -> None:
        self._pieces: list[tuple[IntArray, IntArray]] = []
        self._compact_size = 0
        self._pending_size = 0

    def add(self, ids: IntArray) -> None:
        """Count `ids`, int64 of any length."""
        if not ids.size:
            return
        unique, counts = np.unique(ids, return_counts=True)
        self._pieces.append((unique, counts))
        self._pending_size += unique.size
        # Merging only once the new pieces outweigh the old keeps the total work small.
        if self._pending_size > max(self._compact_size, _MIN_MERGE_SIZE):
            self._compact()

    def result(self) -> tuple[IntArray, IntArray]:
        """The distinct ids in rising order and how often each occurred, int64 [rows]."""
        self._compact()
        if not self._pieces:
            return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
        return self._pieces[0]

    def _compact(self) -> None:
        if len(self._pieces) > 1:
            ids = np.concatenate([unique for unique, _ in self._pieces])
            counts = np.concatenate([count for _, count in self._pieces])
            order = np.argsort(ids, kind="stable")
            ids, counts = ids[order], counts[order]
            starts = np.flatnonzero(np.concatenate([[True], ids[1:] != ids[:-1]]))
            self._pieces = [(ids[starts], np.add.reduceat(counts, starts))]
        self._compact_size = sum(unique.size for unique, _ in self._pieces)
        self._pending_size = 0
