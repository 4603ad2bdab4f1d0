"""`data_parallel` by bag: ranks exchange their ids and the gradients of their bags.

Every rank holds the table and looks up its own batch. Each sends its ids to all others
while it distributes its input, and its output gradients in the backward; with both, every
rank runs the fused update of the whole global batch: the same numbers in the same order
everywhere, so replicas stay bit-equal. Used where this is less than the rows that a batch
touches (`autoshard.shards.replica_exchange`).

Shapes: E=entries, B=samples of this rank, G=samples of all ranks, R=ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from autoshard.runtime.bags import Bags
from autoshard.runtime.collectives import Parcel, Received, empty_parcel
from autoshard.runtime.initialization import initialize_rows
from autoshard.runtime.kernels import EmbeddingKernel, KernelKey, kernel_key
from autoshard.runtime.layout import PlacedTable
from autoshard.runtime.sharding import IdsMessage, LocalShard, MethodState, RankContext
from autoshard.runtime.streams import GatheredStreams, gather_streams, pack_weights
from autoshard.runtime.timing import Compute
from autoshard.shards import ShardingType, ShardSlice


class BagReplicas:
    """See the module's first lines."""

    num_announced = 1
    exchanges_ids = True
    exchanges_outputs = False

    def __init__(self, tables: Sequence[PlacedTable], context: RankContext) -> None:
        """Allocate a replica of every table."""
        self._context = context
        optimizer = context.training.optimizer

        def key(placed: PlacedTable) -> KernelKey:
            return kernel_key(placed.table, placed.table.embedding_dim, optimizer)

        order = {kernel: index for index, kernel in enumerate(dict.fromkeys(map(key, tables)))}
        tables = sorted(tables, key=lambda placed: order[key(placed)])
        self.entries = tuple(entry for placed in tables for entry in placed.entries)
        self._groups: list[_Group] = []
        for kernel, members in groupby(tables, key=key):
            first = self._groups[-1].streams.stop if self._groups else 0
            self._groups.append(_Group(kernel, list(members), first, context))
        self._weighted_E = [entry.table.weighted for entry in self.entries]
        self._num_cols = sum(group.kernel.num_cols for group in self._groups)

    def send_ids(self, state: MethodState) -> list[IdsMessage]:
        """Everything to everybody, where gradients follow."""
        ids = state.ids
        parts = [ids.lengths_EB.flatten(), *ids.values]
        if ids.weights is not None:
            pairs = zip(ids.weights, self._weighted_E, strict=True)
            parts += pack_weights([weights for weights, is_weighted in pairs if is_weighted])
        state.values["own"] = own = torch.cat(parts)
        message = IdsMessage([own.numel()], [own]) if state.training else IdsMessage([0], [])
        return [message] * self._context.world_size

    def expect_ids(self, state: MethodState, announced: list[list[int]]) -> list[int]:
        """As many as announced."""
        return [size for (size,) in announced]

    def lookup(self, state: MethodState, ids: Received) -> None:
        """Pool the local batch."""
        batch_size = state.batch_sizes_R[self._context.rank]
        if state.training:
            state.values["ids"] = ids
        own = gather_streams([state.values.pop("own")], [batch_size], self._weighted_E)
        bags = [group.pick(own) for group in self._groups]
        with self._context.recorder.compute(Compute.FORWARD):
            state.values["outputs"] = [
                group.kernel.lookup(own_bags, training=False)
                for group, own_bags in zip(self._groups, bags, strict=True)
            ]

    def send_outputs(self, state: MethodState) -> Parcel:
        """Nothing: outputs are already where they are needed."""
        return empty_parcel(self._context.world_size, torch.float32, self._context.device)

    def pooled(self, state: MethodState, outputs: Received) -> list[Tensor]:
        """The kernels' outputs, cut into entries."""
        pooled: list[Tensor] = []
        for group, output in zip(self._groups, state.values.pop("outputs"), strict=True):
            pooled.extend(group.kernel.unpad(output).split(group.kernel.feature_dims, dim=1))
        return pooled

    def send_gradients(self, state: MethodState, gradients: Sequence[Tensor]) -> Parcel:
        """All bags' gradients to everybody."""
        world_size = self._context.world_size
        own = torch.cat(list(gradients), dim=1).flatten()
        own.div_(world_size)
        return Parcel(
            own.repeat(world_size),
            [own.numel()] * world_size,
            [size * self._num_cols for size in state.batch_sizes_R],
        )

    def update(self, state: MethodState, gradients: Received) -> None:
        """Run the fused backward on the bags of all ranks."""
        ids = state.values.pop("ids")
        gathered = gather_streams(ids.pieces, state.batch_sizes_R, self._weighted_E)
        bags = [group.pick(gathered) for group in self._groups]
        gradient_GC = gradients.joined().view(-1, self._num_cols)
        parts = gradient_GC.split([group.kernel.num_cols for group in self._groups], dim=1)
        padded = [g.kernel.pad(part) for g, part in zip(self._groups, parts, strict=True)]
        with self._context.recorder.compute(Compute.BACKWARD):
            for group, all_bags, gradient in zip(self._groups, bags, padded, strict=True):
                group.kernel.update(all_bags, gradient)

    def local_shards(self) -> tuple[LocalShard, ...]:
        """All replicated tables, whole."""
        return tuple(shard for group in self._groups for shard in group.local_shards())

    def allocated_bytes(self) -> int:
        """Bytes of weights and optimizer state on this rank."""
        return sum(group.kernel.allocated_bytes() for group in self._groups)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use another learning rate from the next update on."""
        for group in self._groups:
            group.kernel.set_learning_rate(learning_rate)


class _Group:
    """The tables of one kernel."""

    def __init__(
        self, key: KernelKey, tables: Sequence[PlacedTable], first: int, context: RankContext
    ) -> None:
        self._tables = [placed.table for placed in tables]
        self._rank = context.rank
        table_of_feature = [index for index, placed in enumerate(tables) for _ in placed.entries]
        self.streams = range(first, first + len(table_of_feature))
        self.kernel = EmbeddingKernel(
            key,
            num_rows_T=[table.num_embeddings for table in self._tables],
            embedding_dim_T=[table.embedding_dim for table in self._tables],
            table_of_feature_F=table_of_feature,
            training=context.training,
            device=context.device,
        )
        for index, table in enumerate(self._tables):
            initialize_rows(self.kernel.weights(index), table, seed=context.seed)

    def pick(self, gathered: GatheredStreams) -> Bags:
        """This kernel's features out of all streams."""
        weights = gathered.weights(self.streams) if self.kernel.key.weighted else None
        lengths_FG = gathered.lengths_SG[self.streams.start : self.streams.stop]
        return Bags(gathered.values(self.streams), lengths_FG, weights)

    def local_shards(self) -> list[LocalShard]:
        """The whole tables."""
        return [
            LocalShard(
                table,
                ShardSlice.whole(table, ShardingType.DATA_PARALLEL).on(self._rank),
                self.kernel.weights(index),
                self.kernel.optimizer_states(index),
            )
            for index, table in enumerate(self._tables)
        ]
