"""A shard set timed as one would without autoshard: plain FBGEMM, everything made anew.

For every set tables are allocated and initialised at random, a batch is drawn, and the median of
a few iterations is taken; then all of it is dropped. Only the ids are drawn by autoshard: they
belong to the shard set, not to the way of measuring it.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoshard.measure.sampling import ShardSet
from autoshard.shards import ShardSlice, padded_cols
from autoshard.workloads.batches import draw_kernel_batch

WARMUP_ITERATIONS = 2
TIMED_ITERATIONS = 7
_WEIGHT_BOUND = 0.05
_LEARNING_RATE = 1e-4


def measure_naively(shard_set: ShardSet, seed: int) -> tuple[float, float]:
    """Median forward and backward of a set without replicas, ms.

    Args:
        shard_set: every shard sees the samples of all ranks.
        seed: of weights, ids and gradients.
    """
    torch.manual_seed(seed)
    generator = np.random.default_rng(seed)
    # One kernel takes tables of one data type, either all with weights per id or none.
    groups: dict[tuple[bool, str], list[ShardSlice]] = {}
    for slice_ in shard_set.slices:
        key = (slice_.table.weighted, slice_.table.data_type.value)
        groups.setdefault(key, []).append(slice_)
    kernels = [
        (_build(slices, data_type), *_draw(slices, shard_set.num_samples, generator))
        for (_, data_type), slices in groups.items()
    ]
    forwards_ms, backwards_ms = [], []
    for iteration in range(WARMUP_ITERATIONS + TIMED_ITERATIONS):
        started_s = time.perf_counter()
        outputs = [tbe(*inputs) for tbe, inputs, _ in kernels]
        forward_s = time.perf_counter()
        for output, (_, _, gradient) in zip(outputs, kernels, strict=True):
            output.backward(gradient)
        ended_s = time.perf_counter()
        if iteration >= WARMUP_ITERATIONS:
            forwards_ms.append(1e3 * (forward_s - started_s))
            backwards_ms.append(1e3 * (ended_s - forward_s))
    return statistics.median(forwards_ms), statistics.median(backwards_ms)


def _build(slices: list[ShardSlice], data_type: str) -> Any:
    """A kernel with weights of its own and row-wise Adagrad."""
    from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
    from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
        BoundsCheckMode,
        EmbeddingLocation,
        PoolingMode,
    )
    from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
        ComputeDevice,
        SplitTableBatchedEmbeddingBagsCodegen,
    )

    tbe = SplitTableBatchedEmbeddingBagsCodegen(
        [
            (s.num_rows, padded_cols(s.num_cols), EmbeddingLocation.HOST, ComputeDevice.CPU)
            for s in slices
        ],
        feature_table_map=[
            table for table, slice_ in enumerate(slices) for _ in slice_.table.feature_names
        ],
        optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        learning_rate=_LEARNING_RATE,
        weights_precision=SparseType(data_type),
        output_dtype=SparseType.FP32,
        pooling_mode=PoolingMode.SUM,
        bounds_check_mode=BoundsCheckMode.NONE,
        stochastic_rounding=False,
        device=torch.device("cpu"),
    )
    tbe.init_embedding_weights_uniform(-_WEIGHT_BOUND, _WEIGHT_BOUND)
    return tbe


def _draw(
    slices: list[ShardSlice], num_samples: int, generator: np.random.Generator
) -> tuple[tuple[Tensor, Tensor, Tensor | None], Tensor]:
    """What a kernel takes for one batch (ids, offsets, weights), and its output's gradient."""
    batch = draw_kernel_batch(slices, num_samples, generator)
    weights = None if batch.weights is None else torch.from_numpy(batch.weights)
    num_cols = sum(padded_cols(s.num_cols) * s.table.num_features for s in slices)
    inputs = (torch.from_numpy(batch.values), torch.from_numpy(batch.offsets), weights)
    return inputs, torch.randn(num_samples, num_cols) * 1e-3
