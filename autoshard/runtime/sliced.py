"""Tables cut into rectangles that lie on one rank each: five sharding types, one mechanism.

Whole tables, slices of rows and slices of columns differ in their geometry only. Each
rank sends the ids of its local batch to the holders of the rows that they name; a holder
pools the bags of all ranks, in one kernel call per kind of table, and sends every rank
the sums for its own samples. Slices of columns are put side by side where they arrive,
slices of rows are added up. Gradients travel the same way back, to every holder.

Shapes: E=entries, B=samples of this rank, G=samples of all ranks, R=ranks, S=streams of a
rank, F=features of a rank, C=true columns of all features of a rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.runtime.bucketize import RowBucketizer
from autoshard.runtime.collectives import Parcel, Received
from autoshard.runtime.kernel_groups import KernelGroups
from autoshard.runtime.layout import PlacedTable
from autoshard.runtime.sharding import IdsMessage, LocalShard, MethodState, RankContext
from autoshard.runtime.slicing import Feature, SliceGeometry
from autoshard.runtime.streams import gather_streams, pack_weights


class Sliced:
    """See the module's first lines."""

    num_announced = 0
    exchanges_ids = True
    exchanges_outputs = True

    def __init__(self, tables: Sequence[PlacedTable], context: RankContext) -> None:
        """Allocate the shards of this rank, and no others."""
        self._context = context
        self._geometry = geometry = SliceGeometry(
            tables, context.world_size, context.training.optimizer
        )
        self.entries = geometry.entries
        self._bucketizer = RowBucketizer(
            self.entries[geometry.num_whole :], geometry.bucket_starts, context.device
        )
        self._slices_R = geometry.ranks
        self._own = geometry.ranks[context.rank]
        self._widths_R = [[f.shard.num_cols for f in slices.features] for slices in self._slices_R]
        self._cols_R = [sum(widths) for widths in self._widths_R]
        self._columns_R = [[_columns_of(f) for f in slices.features] for slices in self._slices_R]
        self._sent_streams = torch.tensor(
            [stream for slices in self._slices_R for stream in slices.streams],
            dtype=torch.int64,
            device=context.device,
        )
        self._weighted_streams_R = [
            [stream for stream in slices.streams if geometry.is_weighted(stream)]
            for slices in self._slices_R
        ]
        self._weighted_S = [geometry.is_weighted(stream) for stream in self._own.streams]
        self._kernels = KernelGroups(self._own.features, context)

    def send_ids(self, state: MethodState) -> list[IdsMessage]:
        """Cut the batch into streams, and send each rank those that it holds rows of."""
        ids, whole = state.ids, self._geometry.num_whole
        lengths_SB = ids.lengths_EB
        values, weights = ids.values, ids.weights or []
        if whole < len(self.entries):
            split_weights = None if ids.weights is None else weights[whole:]
            cut = self._bucketizer(lengths_SB[whole:], values[whole:], split_weights)
            lengths_SB = torch.cat([lengths_SB[:whole], cut.lengths_SB])
            values = [*values[:whole], *cut.values]
            weights = [*weights[:whole], *cut.weights]
        lengths_SB = lengths_SB[self._sent_streams]
        messages = []
        first = 0
        for slices, heavy in zip(self._slices_R, self._weighted_streams_R, strict=True):
            last = first + len(slices.streams)
            parts = [lengths_SB[first:last].flatten(), *(values[s] for s in slices.streams)]
            if weights:
                parts += pack_weights([weights[s] for s in heavy])
            messages.append(IdsMessage(parts))
            first = last
        return messages

    def lookup(self, state: MethodState, ids: Received) -> None:
        """Bring the ids from rank-major to feature-major order and pool them."""
        if not self._own.features:
            return
        gathered = gather_streams(ids.pieces, state.batch_sizes_R, self._weighted_S)
        state.values["bags"] = bags = self._kernels.pick(gathered)
        state.values["output"] = self._kernels.lookup(bags, training=state.training)

    def send_outputs(self, state: MethodState) -> Parcel:
        """Each rank's rows of the pooled outputs."""
        own_cols = self._cols_R[self._context.rank]
        batch_size = state.batch_sizes_R[self._context.rank]
        return Parcel(
            self._output(state).reshape(-1),
            [size * own_cols for size in state.batch_sizes_R],
            [batch_size * cols for cols in self._cols_R],
        )

    def pooled(self, state: MethodState, outputs: Received) -> list[Tensor]:
        """Put slices of columns side by side and add up slices of rows."""
        batch_size = state.batch_sizes_R[self._context.rank]
        parts_RF = [
            # Not views to autograd, so that they can be handed out as they are.
            flat.view(batch_size, sum(widths)).unsafe_split_with_sizes(widths, dim=1)
            if widths
            else ()
            for flat, widths in zip(outputs.pieces, self._widths_R, strict=True)
        ]
        pooled = []
        for blocks in self._geometry.assembly:
            columns = []
            for (rank, feature), *others in blocks:
                total = parts_RF[rank][feature]
                for other_rank, other in others:
                    total.add_(parts_RF[other_rank][other])
                columns.append(total)
            pooled.append(columns[0] if len(columns) == 1 else torch.cat(columns, dim=1))
        return pooled

    def send_gradients(self, state: MethodState, gradients: Sequence[Tensor]) -> Parcel:
        """To each rank, the columns that it holds, of every sample."""
        batch_size = state.batch_sizes_R[self._context.rank]
        sizes = [batch_size * cols for cols in self._cols_R]
        flat = torch.empty(sum(sizes), device=self._context.device)
        for part, widths, columns in zip(
            flat.split(sizes), self._widths_R, self._columns_R, strict=True
        ):
            targets = part.view(batch_size, sum(widths)).split(widths, dim=1) if widths else ()
            for target, (entry, own) in zip(targets, columns, strict=True):
                torch.div(gradients[entry][:, own], self._context.world_size, out=target)
        own_cols = self._cols_R[self._context.rank]
        return Parcel(flat, sizes, [size * own_cols for size in state.batch_sizes_R])

    def update(self, state: MethodState, gradients: Received) -> None:
        """Run the fused backward on the gradients of all ranks' samples."""
        own_cols = self._cols_R[self._context.rank]
        if own_cols:
            gradient_GC = gradients.joined().view(-1, own_cols)
            self._kernels.update(state.values.pop("bags"), gradient_GC)

    def local_shards(self) -> tuple[LocalShard, ...]:
        """The rectangles on this rank."""
        return self._kernels.local_shards()

    def allocated_bytes(self) -> int:
        """Bytes of weights and optimizer state on this rank."""
        return self._kernels.allocated_bytes()

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use another learning rate from the next update on."""
        self._kernels.set_learning_rate(learning_rate)

    def _output(self, state: MethodState) -> Tensor:
        """The sums over the bags of all ranks, [G, C]; taken out of `state`."""
        if not self._own.features:
            return torch.empty(sum(state.batch_sizes_R), 0, device=self._context.device)
        output: Tensor = state.values.pop("output")
        return output


def _columns_of(feature: Feature) -> tuple[int, slice]:
    """Which columns of which entry's output a feature makes."""
    shard = feature.shard
    return feature.entry, slice(shard.col_offset, shard.col_offset + shard.num_cols)
