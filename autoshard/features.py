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
from autoshard.tables import DataType

FloatArray = NDArray[np.float64]

#: Work that a rank's kernels do for a shard in one step, as plain counts. The lookup and the
#: update of a shard see the samples of all ranks. A replica's lookup sees one rank's; its update
#: all ranks' bags, or one bag per row that some rank touched, after this rank has reduced its
#: own lookups to sums per row (`autoshard.shards.replica_exchange` says which of the two).
#: A physical model of the kernels is a weighted sum of these, with weights >= 0.
FWD_WORK_FEATURES = (
    "fwd_bags",
    "fwd_bag_elements",
    "fwd_lookups",
    "fwd_lookup_elements",
    "fwd_unique_rows",
    "fwd_unique_elements",
)
BWD_WORK_FEATURES = (
    "bwd_bags",
    "bwd_bag_elements",
    "bwd_lookups",
    "bwd_lookup_elements",
    "bwd_unique_rows",
    "bwd_unique_elements",
    "reduced_lookups",
    "reduced_lookup_elements",
)
WORK_FEATURES = FWD_WORK_FEATURES + BWD_WORK_FEATURES
#: Sizes on a logarithmic scale, log(1 + x), and their ratios.
LOG_FEATURES = (
    "log_num_rows",
    "log_num_cols",
    "log_weights_bytes",
    "log_fwd_bags",
    "log_fwd_lookups",
    "log_fwd_unique_rows",
    "log_fwd_lookups_per_bag",
    "log_fwd_lookups_per_unique_row",
    "log_bwd_bags",
    "log_bwd_lookups",
    "log_bwd_unique_rows",
    "log_bwd_lookups_per_bag",
    "log_bwd_lookups_per_unique_row",
    "log_num_features",
)
FLAG_FEATURES = ("is_weighted", "is_half_precision", "is_reduced_by_row")
#: Share of lookups that go to rows occurring (0,1], (1,2], (2,4], … >32768 times in the
#: batch that the kernel sees (the bins of the dlrm_datasets locality statistics).
REUSE_FEATURES = tuple(f"lookup_share_reuse_{index}" for index in range(NUM_REUSE_BINS))
SHARD_FEATURES = WORK_FEATURES + LOG_FEATURES + FLAG_FEATURES + REUSE_FEATURES
NUM_SHARD_FEATURES = len(SHARD_FEATURES)
NUM_WORK_FEATURES = len(WORK_FEATURES)
#: Which of the work features each phase consists of, bool [work features, 2].
WORK_OF_PHASE = np.array(
    [[True, False]] * len(FWD_WORK_FEATURES) + [[False, True]] * len(BWD_WORK_FEATURES)
)

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
        cols = padded_cols(slice_.num_cols)
        bags = load.batch_samples * table.num_features
        fwd = (bags, load.lookups, load.unique_rows)
        bwd = (load.update_bags, load.update_lookups, load.update_unique_rows)
        work = (*_work(*fwd, cols), *_work(*bwd, cols))
        reduced = (load.reduced_lookups, load.reduced_lookups * cols)
        held = (slice_.num_rows, slice_.num_cols, load.weights_bytes)
        sizes = (*held, *fwd, *_ratios(*fwd), *bwd, *_ratios(*bwd), table.num_features)
        logs = np.log1p(np.array(sizes, dtype=np.float64))  # bytes may go beyond int64
        flags = (
            table.weighted,
            table.data_type is not DataType.FP32,
            load.reduced_lookups > 0,
        )
        reuse = _lookup_reuse(
            table.ids, table.num_embeddings, load.batch_samples * table.lookups_per_sample
        )
        features_SF[row] = np.concatenate([work, reduced, logs, flags, reuse])
    return features_SF


def _work(bags: float, lookups: float, unique_rows: float, cols: int) -> tuple[float, ...]:
    """Counts, each followed by its elements."""
    return (bags, bags * cols, lookups, lookups * cols, unique_rows, unique_rows * cols)


def _ratios(bags: float, lookups: float, unique_rows: float) -> tuple[float, float]:
    """Lookups per bag and per distinct row; 0 where there are none."""
    return (
        lookups / bags if bags else 0.0,
        lookups / unique_rows if unique_rows else 0.0,
    )


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
