"""What a cost model sees of a shard and of a collective: one definition, trained and planned with.

Shapes: S=shards, F=shard features, N=collectives, C=traffic features.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from autoshard.distributions import NUM_REUSE_BINS, IdDistribution, reuse_histogram
from autoshard.problem import TrainingConfig
from autoshard.shards import ShardSlice, padded_cols, shard_load
from autoshard.tables import DataType, PoolingType

FloatArray = NDArray[np.float64]

#: Work that a kernel does for a shard in one step, as plain counts. The kernel sees the
#: samples of all ranks (of one rank for a replica); every count is at that batch size.
#: A physical model of the kernel is a weighted sum of these.
WORK_FEATURES = (
    "bags",
    "bag_elements",
    "lookups",
    "lookup_elements",
    "unique_rows",
    "unique_elements",
)
#: Sizes on a logarithmic scale, log(1 + x), and their ratios.
LOG_FEATURES = (
    "log_num_rows",
    "log_num_cols",
    "log_weights_bytes",
    "log_bags",
    "log_lookups",
    "log_unique_rows",
    "log_lookups_per_bag",
    "log_lookups_per_unique_row",
)
FLAG_FEATURES = ("is_mean", "is_weighted", "is_half_precision")
#: Share of lookups that go to rows occurring (0,1], (1,2], (2,4], … >32768 times in the
#: batch that the kernel sees (the bins of the dlrm_datasets locality statistics).
REUSE_FEATURES = tuple(f"lookup_share_reuse_{index}" for index in range(NUM_REUSE_BINS))
SHARD_FEATURES = WORK_FEATURES + LOG_FEATURES + FLAG_FEATURES + REUSE_FEATURES
NUM_SHARD_FEATURES = len(SHARD_FEATURES)
NUM_WORK_FEATURES = len(WORK_FEATURES)

#: What an all-to-all is described by. Bytes that a rank keeps for itself do not count.
TRAFFIC_FEATURES = ("world_size", "max_sent_bytes", "max_received_bytes", "total_bytes")
NUM_TRAFFIC_FEATURES = len(TRAFFIC_FEATURES)


def shard_features(
    slices: Sequence[ShardSlice], training: TrainingConfig, world_size: int
) -> FloatArray:
    """Describe shards.

    Args:
        slices: S shards.
        training: batch size per rank and optimizer.
        world_size: ranks whose samples a sharded table serves. A kernel measured alone on
            n samples is described by `batch_size=n, world_size=1`.

    Returns:
        float64 [S, F], columns as in `SHARD_FEATURES`.
    """
    features_SF = np.zeros((len(slices), NUM_SHARD_FEATURES))
    for row, slice_ in enumerate(slices):
        table = slice_.table
        load = shard_load(slice_, training, world_size)
        bags = load.batch_samples * table.num_features
        cols = padded_cols(slice_.num_cols)
        per_bag = load.lookups / bags if bags else 0.0
        per_unique = load.lookups / load.unique_rows if load.unique_rows else 0.0
        work = (
            bags,
            bags * cols,
            load.lookups,
            load.lookups * cols,
            load.unique_rows,
            load.unique_rows * cols,
        )
        sizes = (
            slice_.num_rows,
            slice_.num_cols,
            load.weights_bytes,
            bags,
            load.lookups,
            load.unique_rows,
            per_bag,
            per_unique,
        )
        logs = np.log1p(np.array(sizes, dtype=np.float64))  # bytes may go beyond int64
        flags = (
            table.pooling is PoolingType.MEAN,
            table.weighted,
            table.data_type is not DataType.FP32,
        )
        reuse = _lookup_reuse(
            table.ids, table.num_embeddings, load.batch_samples * table.lookups_per_sample
        )
        features_SF[row] = np.concatenate([work, logs, flags, reuse])
    return features_SF


@lru_cache(maxsize=65_536)
def _lookup_reuse(ids: IdDistribution, num_embeddings: int, num_lookups: float) -> FloatArray:
    return reuse_histogram(ids, num_embeddings, num_lookups)[1]


def traffic_features(
    world_size_N: NDArray[np.int64],
    max_sent_bytes_N: FloatArray,
    max_received_bytes_N: FloatArray,
    total_bytes_N: FloatArray,
) -> FloatArray:
    """Stack the description of N all-to-alls, float64 [N, C]."""
    return np.stack(
        [
            np.asarray(world_size_N, dtype=np.float64),
            max_sent_bytes_N,
            max_received_bytes_N,
            total_bytes_N,
        ],
        axis=-1,
    )
