"""The runtime's kernels on borrowed memory, one kind per way of holding tables.

What is timed is what `autoshard.runtime` counts as compute: a forward looks up, a backward
runs the fused optimizer, and, where replicas exchange rows, sums the gradients per row.
Everything that arrives from other ranks was drawn beforehand.

Shapes: F=features of one kernel, B=samples that it looks up, C=padded columns of all
features, D=columns of one feature, L=ids, N=rows from all ranks.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from autoshard.measure.arena import Arena
from autoshard.problem import TrainingConfig
from autoshard.runtime.bags import Bags
from autoshard.runtime.kernels import EmbeddingKernel, KernelKey, kernel_key
from autoshard.runtime.row_space import RowLookup, RowSpace
from autoshard.shards import (
    ShardingType,
    ShardSlice,
    optimizer_state_bytes,
    padded_cols,
    replica_exchange,
)
from autoshard.tables import DataType
from autoshard.workloads.batches import draw_kernel_batch

GRADIENT_BOUND = 1e-3
_DTYPES = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
}


@dataclass(frozen=True, kw_only=True)
class Bench:
    """What all kernels of a set have in common."""

    training: TrainingConfig
    """With the batch size of one rank."""
    world_size: int
    """Ranks whose batches a shard serves, and that hold the same replicas."""
    num_batches: int
    device: torch.device
    arena: Arena
    generator: np.random.Generator

    @property
    def batch_size(self) -> int:
        """Samples of one rank."""
        return self.training.batch_size

    @property
    def num_samples(self) -> int:
        """Samples of all ranks."""
        return self.batch_size * self.world_size


class Kernel(Protocol):
    """One kernel with its batches."""

    slices: tuple[ShardSlice, ...]
    kernel: EmbeddingKernel

    def forward(self, batch: int) -> tuple[object, Tensor]:
        """Pool the rows of batch number `batch`: what `backward` takes, and float32 [B, C]."""

    def backward(self, looked_up: object) -> None:
        """Run what follows a forward, up to the fused optimizer."""


def make_kernels(slices: Sequence[ShardSlice], bench: Bench) -> Iterator[Kernel]:
    """Group slices into kernels as the runtime does, in its order."""
    sliced: dict[KernelKey, list[ShardSlice]] = {}
    by_bag: dict[KernelKey, list[ShardSlice]] = {}
    by_row: dict[tuple[KernelKey, int], list[ShardSlice]] = {}
    for slice_ in slices:
        key = kernel_key(slice_.table, slice_.num_cols, bench.training.optimizer)
        if slice_.sharding_type is not ShardingType.DATA_PARALLEL:
            sliced.setdefault(key, []).append(slice_)
        elif replica_exchange(slice_.table, bench.training, bench.world_size).by_bag:
            by_bag.setdefault(key, []).append(slice_)
        else:
            by_row.setdefault((key, slice_.num_cols), []).append(slice_)
    for key, group in sliced.items():
        yield SlicedKernel(key, group, bench)
    for key, group in by_bag.items():
        yield BagReplicaKernel(key, group, bench)
    for (key, _), group in by_row.items():
        yield RowReplicaKernel(key, group, bench)


class SlicedKernel:
    """Shards that look up, and update, the samples of all ranks."""

    def __init__(self, key: KernelKey, slices: Sequence[ShardSlice], bench: Bench) -> None:
        """Build the kernel and draw its batches."""
        self.slices = tuple(slices)
        self.kernel = EmbeddingKernel(
            key,
            num_rows_T=[s.num_rows for s in slices],
            embedding_dim_T=[s.num_cols for s in slices],
            table_of_feature_F=[i for i, s in enumerate(slices) for _ in s.table.feature_names],
            training=bench.training,
            device=bench.device,
            host_buffers=_borrowed(key, slices, bench),
        )
        _fill(self.kernel, len(slices))
        self._gradient_BC = self.kernel.pad(
            _gradient(bench.num_samples, self.kernel.num_cols, bench.device)
        )
        self.inputs = [
            _draw_bags(slices, bench.num_samples, bench) for _ in range(bench.num_batches)
        ]

    def forward(self, batch: int) -> tuple[Bags, Tensor]:
        """See `Kernel`."""
        bags = replace(self.inputs[batch])
        return bags, self.kernel.lookup(bags, training=True)

    def backward(self, looked_up: object) -> None:
        """See `Kernel`."""
        assert isinstance(looked_up, Bags)
        self.kernel.update(looked_up, self._gradient_BC)


class BagReplicaKernel(SlicedKernel):
    """Replicas that look up this rank's samples, and update with the bags of all ranks."""

    def __init__(self, key: KernelKey, slices: Sequence[ShardSlice], bench: Bench) -> None:
        """Build the kernel and draw its batches; this rank's samples are the first of all."""
        super().__init__(key, slices, bench)
        self.local_inputs = [_first_samples(bags, bench.batch_size) for bags in self.inputs]

    def forward(self, batch: int) -> tuple[Bags, Tensor]:
        """See `Kernel`."""
        output = self.kernel.lookup(replace(self.local_inputs[batch]), training=False)
        return replace(self.inputs[batch]), output


@dataclass(frozen=True)
class _RowInput:
    """One batch of a `RowReplicaKernel`."""

    lookup: RowLookup
    gradient_FBD: Tensor
    update: Bags
    """One bag per row that a rank touched."""
    update_gradient: Tensor


class RowReplicaKernel:
    """Replicas of one dimension that sum gradients per row, and update the rows of all ranks."""

    def __init__(self, key: KernelKey, slices: Sequence[ShardSlice], bench: Bench) -> None:
        """Build the kernel and draw its batches."""
        self.slices = tuple(slices)
        self.space = RowSpace(
            key,
            [s.table for s in slices],
            training=bench.training,
            device=bench.device,
            host_buffers=_borrowed(key, slices, bench),
        )
        self.kernel = self.space.kernel
        _fill(self.kernel, 1)
        self.inputs = [self._draw(bench) for _ in range(bench.num_batches)]

    def _draw(self, bench: Bench) -> _RowInput:
        space, batch_size = self.space, bench.batch_size
        lookups = [self._lookup(bench) for _ in range(bench.world_size)]
        for lookup in lookups:
            lookup.find_rows()
        rows_N = torch.cat([lookup.rows_U for lookup in lookups])
        update, update_gradient = Bags(rows_N, rows_N.view(1, -1)), rows_N.float()
        if rows_N.numel():
            sums = _gradient(rows_N.numel(), space.embedding_dim, bench.device)
            update, update_gradient = space.spread(rows_N, [sums.flatten()])
        gradient = _gradient(space.num_features * batch_size, space.embedding_dim, bench.device)
        return _RowInput(
            lookups[0],
            gradient.view(space.num_features, batch_size, space.embedding_dim),
            update,
            update_gradient,
        )

    def _lookup(self, bench: Bench) -> RowLookup:
        bags = _draw_bags(self.slices, bench.batch_size, bench)
        counts = bags.lengths_FB.sum(dim=1).tolist()
        weights = None if bags.weights_L is None else bags.weights_L.split(counts)
        return self.space.prepare(bags.values_L.split(counts), bags.lengths_FB, weights)

    def forward(self, batch: int) -> tuple[_RowInput, Tensor]:
        """See `Kernel`."""
        drawn = self.inputs[batch]
        own = replace(drawn, lookup=RowLookup(replace(drawn.lookup.bags)))
        return own, self.kernel.lookup(own.lookup.bags, training=False)

    def backward(self, looked_up: object) -> None:
        """See `Kernel`. Updates the rows drawn for all ranks; sums up this rank's own as well."""
        assert isinstance(looked_up, _RowInput)
        looked_up.lookup.find_rows()
        looked_up.lookup.row_gradients(looked_up.gradient_FBD)
        self.kernel.update(replace(looked_up.update), looked_up.update_gradient)


def _borrowed(
    key: KernelKey, slices: Sequence[ShardSlice], bench: Bench
) -> dict[str, Tensor] | None:
    """The arena's memory for all tables of one kernel; on CUDA, kernels allocate their own."""
    if bench.device.type != "cpu":
        return None
    shapes = [(s.num_rows, padded_cols(s.num_cols)) for s in slices]
    optimizer = bench.training.optimizer
    buffers = {
        "weights": bench.arena.weights(sum(r * c for r, c in shapes), _DTYPES[key.data_type])
    }
    if state := sum(optimizer_state_bytes(optimizer, r, c) // 4 for r, c in shapes):
        buffers["momentum1"] = bench.arena.state(state)
    return buffers


def _fill(kernel: EmbeddingKernel, num_tables: int) -> None:
    """Usable weights where no arena lends them."""
    if kernel.device.type != "cpu":
        for index in range(num_tables):
            kernel.weights(index).uniform_(-0.05, 0.05)


def _gradient(rows: int, cols: int, device: torch.device) -> Tensor:
    return torch.empty(rows, cols, device=device).uniform_(-GRADIENT_BOUND, GRADIENT_BOUND)


def _draw_bags(slices: Sequence[ShardSlice], num_samples: int, bench: Bench) -> Bags:
    batch = draw_kernel_batch(slices, num_samples, bench.generator)
    lengths = torch.from_numpy(np.diff(batch.offsets))
    weights = None
    if batch.weights is not None:
        weights = torch.from_numpy(batch.weights).to(bench.device)
    return Bags(
        values_L=torch.from_numpy(batch.values).to(bench.device),
        lengths_FB=lengths.view(-1, num_samples).to(bench.device),
        weights_L=weights,
    )


def _first_samples(bags: Bags, count: int) -> Bags:
    """The first `count` samples of every feature."""
    is_first_FB = torch.zeros_like(bags.lengths_FB, dtype=torch.bool)
    is_first_FB[:, :count] = True
    chosen_L = torch.repeat_interleave(is_first_FB.flatten(), bags.lengths_FB.flatten())
    return Bags(
        values_L=bags.values_L[chosen_L],
        lengths_FB=bags.lengths_FB[:, :count].contiguous(),
        weights_L=None if bags.weights_L is None else bags.weights_L[chosen_L],
    )
