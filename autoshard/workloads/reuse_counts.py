"""From counted lookups to an id distribution: the last step of measuring a trace."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.distributions import NUM_REUSE_BINS, REUSE_BIN_EDGES, IdDistribution


def measured_distribution(counts: NDArray[np.int64]) -> IdDistribution:
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
