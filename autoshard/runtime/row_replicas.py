"""`data_parallel` by row: ranks exchange the rows that they touched.

Every rank holds the table and looks up its own batch. Each sums its gradients per row,
sends (rows, sums) to all others, and applies the optimizer to what all ranks sent, in
rank order: the same numbers in the same order everywhere, so replicas stay bit-equal.
Used where this is less than ids and bags (`autoshard.shards.replica_exchange`), and hence
never in a world of one. What happens within a rank is `autoshard.runtime.row_space`'s.

Shapes: B=samples of this rank, U=distinct rows here, N=rows from all ranks, D=true columns
of one table, R=ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from autoshard.runtime.collectives import Parcel, Received, empty_parcel, offsets
from autoshard.runtime.initialization import initialize_rows
from autoshard.runtime.kernels import KernelKey, kernel_key
from autoshard.runtime.layout import PlacedTable
from autoshard.runtime.row_space import RowLookup, RowSpace
from autoshard.runtime.sharding import IdsMessage, LocalShard, MethodState, RankContext
from autoshard.runtime.timing import Compute
from autoshard.shards import ShardingType, ShardSlice


@dataclass(eq=False)
class _Lookup:
    """One kernel's part of a step."""

    ids: RowLookup
    output: Tensor | None = None


class RowReplicas:
    """See the module's first lines."""

    exchanges_ids = False
    exchanges_outputs = False

    def __init__(self, tables: Sequence[PlacedTable], context: RankContext) -> None:
        """Allocate a replica of every table."""
        self._context = context
        groups: dict[tuple[KernelKey, int], list[PlacedTable]] = {}
        for placed in tables:
            dim = placed.table.embedding_dim
            kind = (kernel_key(placed.table, dim, context.training.optimizer), dim)
            groups.setdefault(kind, []).append(placed)
        self._spaces = [self._allocate(kind[0], group) for kind, group in groups.items()]
        self.entries = tuple(
            entry for group in groups.values() for placed in group for entry in placed.entries
        )
        first = offsets([space.num_features for space in self._spaces])
        self._slices = [slice(*pair) for pair in pairwise(first)]
        self.num_announced = len(self._spaces)

    def _allocate(self, key: KernelKey, tables: Sequence[PlacedTable]) -> RowSpace:
        context = self._context
        space = RowSpace(
            key,
            [placed.table for placed in tables],
            training=context.training,
            device=context.device,
        )
        for index, table in enumerate(space.tables):
            initialize_rows(space.weights(index), table, seed=context.seed)
        return space

    def send_ids(self, state: MethodState) -> list[IdsMessage]:
        """No ids, but how many distinct rows of each kernel this rank touches."""
        ids = state.ids
        state.values["lookups"] = lookups = [
            _Lookup(
                space.prepare(
                    ids.values[entries],
                    ids.lengths_EB[entries],
                    None if ids.weights is None else ids.weights[entries],
                )
            )
            for space, entries in zip(self._spaces, self._slices, strict=True)
        ]
        counts = [0] * len(lookups)
        if state.training:
            # The kernel's backward would sort the ids; here it is done ahead of it.
            with self._context.input_recorder.compute(Compute.BACKWARD):
                for lookup in lookups:
                    lookup.ids.find_rows()
            counts = [lookup.ids.rows_U.numel() for lookup in lookups]
        return [IdsMessage([], counts)] * self._context.world_size

    def lookup(self, state: MethodState, ids: Received) -> None:
        """Pool the local batch."""
        with self._context.recorder.compute(Compute.FORWARD):
            for space, lookup in zip(self._spaces, state.values["lookups"], strict=True):
                lookup.output = space.kernel.lookup(lookup.ids.bags, training=False)

    def send_outputs(self, state: MethodState) -> Parcel:
        """Nothing: outputs are already where they are needed."""
        return empty_parcel(self._context.world_size, torch.float32, self._context.device)

    def pooled(self, state: MethodState, outputs: Received) -> list[Tensor]:
        """The kernels' outputs, cut into entries."""
        pooled: list[Tensor] = []
        for space, lookup in zip(self._spaces, state.values["lookups"], strict=True):
            unpadded = space.kernel.unpad(lookup.output)
            pooled.extend(unpadded.split(space.embedding_dim, dim=1))
        return pooled

    def send_gradients(self, state: MethodState, gradients: Sequence[Tensor]) -> Parcel:
        """Per kernel, the touched rows and the sum of each row's gradients."""
        lookups: list[_Lookup] = state.values["lookups"]
        per_space = [gradients[entries] for entries in self._slices]
        stacked = [torch.stack(list(part)).div_(self._context.world_size) for part in per_space]
        with self._context.recorder.compute(Compute.BACKWARD):
            sums = [
                lookup.ids.row_gradients(part)
                for lookup, part in zip(lookups, stacked, strict=True)
            ]
        parts = [
            part
            for lookup, sums_UD in zip(lookups, sums, strict=True)
            for part in (lookup.ids.rows_U.view(torch.float32), sums_UD.flatten())
        ]
        sizes = [sum(self._part_sizes(counts)) for counts in state.announced_RN]
        own_size = sizes[self._context.rank]
        sent = torch.cat(parts * self._context.world_size)
        return Parcel(sent, [own_size] * self._context.world_size, sizes)

    def update(self, state: MethodState, gradients: Received) -> None:
        """Apply the optimizer once to every row that any rank touched."""
        received = [
            flat.split(self._part_sizes(counts))
            for flat, counts in zip(gradients.pieces, state.announced_RN, strict=True)
        ]
        for index, space in enumerate(self._spaces):
            rows_N = torch.cat([parts[2 * index] for parts in received]).view(torch.int64)
            if not rows_N.numel():
                continue
            bags, gradient = space.spread(rows_N, [parts[2 * index + 1] for parts in received])
            with self._context.recorder.compute(Compute.BACKWARD):
                space.kernel.update(bags, gradient)

    def local_shards(self) -> tuple[LocalShard, ...]:
        """All replicated tables, whole."""
        return tuple(
            LocalShard(
                table,
                ShardSlice.whole(table, ShardingType.DATA_PARALLEL).on(self._context.rank),
                space.weights(index),
                space.optimizer_states(index),
            )
            for space in self._spaces
            for index, table in enumerate(space.tables)
        )

    def allocated_bytes(self) -> int:
        """Bytes of weights and optimizer state on this rank."""
        return sum(space.kernel.allocated_bytes() for space in self._spaces)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use another learning rate from the next update on."""
        for space in self._spaces:
            space.kernel.set_learning_rate(learning_rate)

    def _part_sizes(self, counts: Sequence[int]) -> list[int]:
        """Elements of the parts of one rank's gradient parcel: rows and sums by turns."""
        return [
            size
            for space, count in zip(self._spaces, counts, strict=True)
            for size in (2 * count, count * space.embedding_dim)
        ]
