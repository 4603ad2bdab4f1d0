"""What the most loaded rank costs at least, whatever the placement. Used by every cost model.

Shapes: S=shards, P=phases (forward, backward), R=ranks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

FloatArray = NDArray[np.float64]


def makespan_lower_bound(costs_S: ArrayLike, world_size: int) -> float:
    """A lower bound on max_r Σ_{i on r} costs_S[i], over all placements on `world_size` ranks.

    With the costs sorted from the largest, a_1 >= a_2 >= …, it is the largest of

    * Σ a_i / min(R, S): no more ranks than that are in use, and none is below average;
    * for each k with k·R < S, the sum of the k + 1 smallest of the k·R + 1 largest costs:
      R ranks cannot share k·R + 1 shards without one of them getting k + 1 (pigeonhole).
      k = 0 is the largest shard alone.

    Args:
        costs_S: numbers >= 0, in any order and unit.
        world_size: R >= 1.

    Returns:
        The bound in the same unit; 0 without shards.
    """
    costs_S = np.sort(np.asarray(costs_S, dtype=np.float64))[::-1]
    num_shards = costs_S.size
    if num_shards == 0:
        return 0.0
    k = np.arange((num_shards - 1) // world_size + 1)
    prefix = np.concatenate([[0.0], np.cumsum(costs_S)])
    last = k * world_size + 1
    pigeonhole = float(np.max(prefix[last] - prefix[last - k - 1]))
    average = float(prefix[-1]) / min(world_size, num_shards)
    # Differences of prefix sums are off by a few ulp of the total: stay on the safe side.
    slack = 4.0 * num_shards * np.finfo(np.float64).eps * float(prefix[-1])
    return max(pigeonhole - slack, average - slack, float(costs_S[0]), 0.0)
