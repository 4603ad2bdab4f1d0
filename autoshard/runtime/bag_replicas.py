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

import torch
from torch import Tensor

from autoshard.runtime.collectives import Parcel, Received, empty_parcel
from autoshard.runtime.kernel_groups import KernelGroups
from autoshard.runtime.kernels import KernelKey, kernel_key
from autoshard.runtime.layout import Entry, PlacedTable
from autoshard.runtime.sharding import IdsMessage, LocalShard, MethodState, RankContext
from autoshard.runtime.slicing import Feature
from autoshard.runtime.streams import gather_streams, pack_weights


class BagReplicas:
    """See the module's first lines."""

    num_announced = 0
    exchanges_ids = True
    exchanges_outputs = False

    def __init__(self, tables: Sequence[PlacedTable], context: RankContext) -> None:
        """Allocate a replica of every table."""
        self._context = context
        optimizer = context.training.optimizer
        by_kernel: dict[KernelKey, list[PlacedTable]] = {}
        for placed in tables:
            key = kernel_key(placed.table, placed.table.embedding_dim, optimizer)
            by_kernel.setdefault(key, []).append(placed)
        features: list[Feature] = []
        entries: list[Entry] = []
        for key, members in by_kernel.items():
            for placed in members:
                own = next(shard for shard in placed.shards if shard.rank == context.rank)
                for entry in placed.entries:
                    at = len(entries)
                    features.append(Feature(placed.table, own, key, entry=at, stream=at))
                    entries.append(entry)
        self.entries = tuple(entries)
        self._kernels = KernelGroups(features, context)
        self._weighted_E = [entry.table.weighted for entry in entries]
        self._dims_E = [entry.table.embedding_dim for entry in entries]

    def send_ids(self, state: MethodState) -> list[IdsMessage]:
        """Everything to everybody, where gradients follow."""
        ids = state.ids
        parts = [ids.lengths_EB.flatten(), *ids.values]
        if ids.weights is not None:
            pairs = zip(ids.weights, self._weighted_E, strict=True)
            parts += pack_weights([weights for weights, is_weighted in pairs if is_weighted])
        state.values["own"] = own = torch.cat(parts)
        return [IdsMessage([own] if state.training else [])] * self._context.world_size

    def lookup(self, state: MethodState, ids: Received) -> None:
        """Pool the local batch."""
        batch_size = state.batch_sizes_R[self._context.rank]
        if state.training:
            state.values["ids"] = ids
        own = gather_streams([state.values.pop("own")], [batch_size], self._weighted_E)
        state.values["output"] = self._kernels.lookup(self._kernels.pick(own), training=False)

    def send_outputs(self, state: MethodState) -> Parcel:
        """Nothing: outputs are already where they are needed."""
        return empty_parcel(self._context.world_size, torch.float32, self._context.device)

    def pooled(self, state: MethodState, outputs: Received) -> list[Tensor]:
        """The kernels' outputs, cut into entries."""
        return list(state.values.pop("output").unsafe_split_with_sizes(self._dims_E, dim=1))

    def send_gradients(self, state: MethodState, gradients: Sequence[Tensor]) -> Parcel:
        """All bags' gradients to everybody."""
        world_size = self._context.world_size
        own = torch.cat(list(gradients), dim=1).flatten()
        own.div_(world_size)
        return Parcel(
            own.repeat(world_size),
            [own.numel()] * world_size,
            [size * sum(self._dims_E) for size in state.batch_sizes_R],
        )

    def update(self, state: MethodState, gradients: Received) -> None:
        """Run the fused backward on the bags of all ranks."""
        ids = state.values.pop("ids")
        gathered = gather_streams(ids.pieces, state.batch_sizes_R, self._weighted_E)
        gradient_GC = gradients.joined().view(-1, sum(self._dims_E))
        self._kernels.update(self._kernels.pick(gathered), gradient_GC)

    def local_shards(self) -> tuple[LocalShard, ...]:
        """All replicated tables, whole."""
        return self._kernels.local_shards()

    def allocated_bytes(self) -> int:
        """Bytes of weights and optimizer state on this rank."""
        return self._kernels.allocated_bytes()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use another learning rate from the next update on."""
        self._kernels.set_learning_rate(learning_rate)
