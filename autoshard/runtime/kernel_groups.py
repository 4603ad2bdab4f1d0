"""All kernels of one rank that look up the same gathered streams, side by side.

Features that may share a kernel stand together; the columns of the kernels' outputs,
one kernel after the other, are in the features' order.

Shapes: F=features of one kernel, G=samples, C=true columns of all features.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from autoshard.runtime.bags import Bags
from autoshard.runtime.initialization import initialize_rows
from autoshard.runtime.kernels import EmbeddingKernel
from autoshard.runtime.sharding import LocalShard, RankContext
from autoshard.runtime.slicing import Feature
from autoshard.runtime.streams import GatheredStreams
from autoshard.runtime.timing import Compute


class KernelGroups:
    """See the module's first lines."""

    def __init__(self, features: Sequence[Feature], context: RankContext) -> None:
        """Allocate and initialize the features' shards."""
        self._context = context
        self._groups = [
            _Group(list(members), context)
            for _, members in groupby(features, key=lambda feature: feature.key)
        ]

    def pick(self, gathered: GatheredStreams) -> list[Bags]:
        """What each kernel is to look up."""
        return [group.pick(gathered) for group in self._groups]

    def lookup(self, bags: Sequence[Bags], *, training: bool) -> Tensor:
        """The sums over all bags, without padding, float32 [G, C].

        Args:
            bags: as `pick` gave them.
            training: whether `update` of the same bags will follow.
        """
        with self._context.recorder.compute(Compute.FORWARD):
            outputs = [
                group.kernel.lookup(own, training=training)
                for group, own in zip(self._groups, bags, strict=True)
            ]
        unpadded = [g.kernel.unpad(out) for g, out in zip(self._groups, outputs, strict=True)]
        return unpadded[0] if len(unpadded) == 1 else torch.cat(unpadded, dim=1)

    def update(self, bags: Sequence[Bags], gradient_GC: Tensor) -> None:
        """Run the fused backward on the gradient of the sums of `bags`."""
        parts = gradient_GC.split([group.kernel.num_cols for group in self._groups], dim=1)
        padded = [g.kernel.pad(part) for g, part in zip(self._groups, parts, strict=True)]
        with self._context.recorder.compute(Compute.BACKWARD):
            for group, own, gradient in zip(self._groups, bags, padded, strict=True):
                group.kernel.update(own, gradient)

    def local_shards(self) -> tuple[LocalShard, ...]:
        """All shards, in the order of the kernels."""
        return tuple(shard for group in self._groups for shard in group.local_shards())

    def allocated_bytes(self) -> int:
        """Bytes of weights and optimizer state."""
        return sum(group.kernel.allocated_bytes() for group in self._groups)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use another learning rate from the next update on."""
        for group in self._groups:
            group.kernel.set_learning_rate(learning_rate)


class _Group:
    """The shards of one kernel."""

    def __init__(self, features: Sequence[Feature], context: RankContext) -> None:
        self._held = list(dict.fromkeys((f.table, f.shard) for f in features))
        self.streams = [feature.stream for feature in features]
        first, last = self.streams[0], self.streams[-1]
        self._is_run = self.streams == list(range(first, last + 1))
        self.kernel = EmbeddingKernel(
            features[0].key,
            num_rows_T=[shard.num_rows for _, shard in self._held],
            embedding_dim_T=[shard.num_cols for _, shard in self._held],
            table_of_feature_F=[self._held.index((f.table, f.shard)) for f in features],
            training=context.training,
            device=context.device,
        )
        for index, (table, shard) in enumerate(self._held):
            initialize_rows(
                self.kernel.weights(index),
                table,
                seed=context.seed,
                row_offset=shard.row_offset,
                col_offset=shard.col_offset,
            )

    def pick(self, gathered: GatheredStreams) -> Bags:
        """This kernel's features out of its rank's streams."""
        weights = gathered.weights(self.streams) if self.kernel.key.weighted else None
        rows = slice(self.streams[0], self.streams[-1] + 1) if self._is_run else self.streams
        return Bags(gathered.values(self.streams), gathered.lengths_SG[rows], weights)

    def local_shards(self) -> list[LocalShard]:
        """What the kernel holds."""
        return [
            LocalShard(
                table, shard, self.kernel.weights(index), self.kernel.optimizer_states(index)
            )
            for index, (table, shard) in enumerate(self._held)
        ]
