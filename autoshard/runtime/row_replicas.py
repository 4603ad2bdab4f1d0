"""`data_parallel` by row: ranks exchange the rows that they touched.

Every rank holds the table and looks up its own batch. Each sums its gradients per row,
sends (rows, sums) to all others, and applies the optimizer to what all ranks sent, in
rank order: the same numbers in the same order everywhere, so replicas stay bit-equal.
Used where this is less than ids and bags (`autoshard.shards.replica_exchange`), and hence
never in a world of one.

Tables of equal dimension and kind share one kernel whose rows are laid end to end. All
its features address that one row space, so any list of rows can be spread over them.

Shapes: F=features of a kernel, B=samples of this rank, U=distinct rows here, N=rows from
all ranks, D=true columns of one table, L=ids, R=ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from autoshard.runtime.bags import Bags
from autoshard.runtime.collectives import Parcel, Received, empty_parcel, offsets
from autoshard.runtime.initialization import initialize_rows
from autoshard.runtime.kernels import EmbeddingKernel, KernelKey, kernel_key
from autoshard.runtime.layout import PlacedTable
from autoshard.runtime.sharding import IdsMessage, LocalShard, MethodState, RankContext
from autoshard.runtime.timing import Compute
from autoshard.shards import ShardingType, ShardSlice


@dataclass(eq=False)
class _Lookup:
    """One kernel's part of a step."""

    bags: Bags
    unique_rows_U: Tensor | None = None
    """None where no gradients follow."""
    order_L: Tensor | None = None
    """Sorts the ids by row."""
    start_U: Tensor | None = None
    """Where each distinct row starts among the sorted ids."""
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
        self._replicas = [_Replica(kind[0], group, context) for kind, group in groups.items()]
        self.entries = tuple(
            entry for group in groups.values() for placed in group for entry in placed.entries
        )
        first = offsets([replica.kernel.num_features for replica in self._replicas])
        self._slices = [slice(*pair) for pair in pairwise(first)]
        self.num_announced = len(self._replicas)

    def send_ids(self, state: MethodState) -> list[IdsMessage]:
        """No ids, but how many distinct rows of each kernel this rank touches."""
        state.values["lookups"] = lookups = [
            replica.prepare(state, entries)
            for replica, entries in zip(self._replicas, self._slices, strict=True)
        ]
        counts = [0] * len(lookups)
        if state.training:
            # The kernel's backward would sort the ids; here it is done ahead of it.
            with self._context.input_recorder.compute(Compute.BACKWARD):
                for lookup in lookups:
                    _deduplicate(lookup)
            counts = [_unique_rows(lookup).numel() for lookup in lookups]
        return [IdsMessage([], counts)] * self._context.world_size

    def lookup(self, state: MethodState, ids: Received) -> None:
        """Pool the local batch."""
        with self._context.recorder.compute(Compute.FORWARD):
            for replica, lookup in zip(self._replicas, state.values["lookups"], strict=True):
                lookup.output = replica.kernel.lookup(lookup.bags, training=False)

    def send_outputs(self, state: MethodState) -> Parcel:
        """Nothing: outputs are already where they are needed."""
        return empty_parcel(self._context.world_size, torch.float32, self._context.device)

    def pooled(self, state: MethodState, outputs: Received) -> list[Tensor]:
        """The kernels' outputs, cut into entries."""
        pooled: list[Tensor] = []
        for replica, lookup in zip(self._replicas, state.values["lookups"], strict=True):
            unpadded = replica.kernel.unpad(lookup.output)
            pooled.extend(unpadded.split(replica.embedding_dim, dim=1))
        return pooled

    def send_gradients(self, state: MethodState, gradients: Sequence[Tensor]) -> Parcel:
        """Per kernel, the touched rows and the sum of each row's gradients."""
        lookups: list[_Lookup] = state.values["lookups"]
        per_replica = [gradients[entries] for entries in self._slices]
        stacked = [torch.stack(list(part)).div_(self._context.world_size) for part in per_replica]
        with self._context.recorder.compute(Compute.BACKWARD):
            sums = [
                _row_gradients(replica, lookup, part)
                for replica, lookup, part in zip(self._replicas, lookups, stacked, strict=True)
            ]
        parts = [
            part
            for lookup, sums_UD in zip(lookups, sums, strict=True)
            for part in (_unique_rows(lookup).view(torch.float32), sums_UD.flatten())
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
        for index, replica in enumerate(self._replicas):
            rows_N = torch.cat([parts[2 * index] for parts in received]).view(torch.int64)
            replica.apply(rows_N, [parts[2 * index + 1] for parts in received])

    def local_shards(self) -> tuple[LocalShard, ...]:
        """All replicated tables, whole."""
        return tuple(shard for replica in self._replicas for shard in replica.local_shards())

    def allocated_bytes(self) -> int:
        """Bytes of weights and optimizer state on this rank."""
        return sum(replica.kernel.allocated_bytes() for replica in self._replicas)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use another learning rate from the next update on."""
        for replica in self._replicas:
            replica.kernel.set_learning_rate(learning_rate)

    def _part_sizes(self, counts: Sequence[int]) -> list[int]:
        """Elements of the parts of one rank's gradient parcel: rows and sums by turns."""
        return [
            size
            for replica, count in zip(self._replicas, counts, strict=True)
            for size in (2 * count, count * replica.embedding_dim)
        ]


class _Replica:
    """Tables of equal dimension and kind in one kernel, their rows laid end to end."""

    def __init__(self, key: KernelKey, tables: Sequence[PlacedTable], context: RankContext) -> None:
        self._context = context
        self._tables = [placed.table for placed in tables]
        self.embedding_dim = tables[0].table.embedding_dim
        self.first_row = offsets([placed.table.num_embeddings for placed in tables])
        self._base_F = [
            self.first_row[index] for index, placed in enumerate(tables) for _ in placed.entries
        ]
        self.kernel = EmbeddingKernel(
            key,
            num_rows_T=[self.first_row[-1]],
            embedding_dim_T=[self.embedding_dim],
            table_of_feature_F=[0] * len(self._base_F),
            training=context.training,
            device=context.device,
        )
        weights = self.kernel.weights(0)
        for index, placed in enumerate(tables):
            rows = slice(*self.first_row[index : index + 2])
            initialize_rows(weights[rows], placed.table, seed=context.seed)

    def prepare(self, state: MethodState, entries: slice) -> _Lookup:
        """Map the ids of this kernel's entries to its rows."""
        values = state.ids.values[entries]
        lengths_FB = state.ids.lengths_EB[entries]
        rows_L = torch.cat([v + base for v, base in zip(values, self._base_F, strict=True)])
        weights_L = None
        if self.kernel.key.weighted:
            assert state.ids.weights is not None  # checked when the ids were gathered
            weights_L = torch.cat(state.ids.weights[entries])
        return _Lookup(Bags(rows_L, lengths_FB, weights_L))

    def local_shards(self) -> list[LocalShard]:
        """The whole tables."""
        states = self.kernel.optimizer_states(0)
        shards = []
        for index, table in enumerate(self._tables):
            rows = slice(*self.first_row[index : index + 2])
            replica = ShardSlice.whole(table, ShardingType.DATA_PARALLEL)
            shards.append(
                LocalShard(
                    table,
                    replica.on(self._context.rank),
                    self.kernel.weights(0)[rows],
                    {name: state[rows] for name, state in states.items()},
                )
            )
        return shards

    def apply(self, rows_N: Tensor, sums: Sequence[Tensor]) -> None:
        """Run the fused optimizer once on each of the given rows.

        Each row becomes a bag of one id whose output gradient is the row's sum. The bags
        are dealt out to the kernel's features in turn, which all address the same rows,
        so that the sums, one after the other, already are the output gradient.

        Args:
            rows_N: int64; a row that several ranks touched occurs several times.
            sums: float32, flat pieces that together hold [N, D].
        """
        num_rows, num_features = rows_N.numel(), self.kernel.num_features
        if not num_rows:
            return
        bags = -(-num_rows // num_features)
        missing = bags * num_features - num_rows
        filler = sums[0].new_zeros(missing * self.embedding_dim)
        gradient = torch.cat([*sums, filler]).view(bags, num_features * self.embedding_dim)
        padded = self.kernel.pad(gradient)
        lengths = torch.ones(num_features, bags, dtype=torch.int64, device=rows_N.device)
        lengths[num_features - missing :, -1] = 0
        values = torch.cat([rows_N[feature::num_features] for feature in range(num_features)])
        with self._context.recorder.compute(Compute.BACKWARD):
            self.kernel.update(Bags(values, lengths), padded)


def _deduplicate(lookup: _Lookup) -> None:
    """Sort the ids and find where each distinct row starts."""
    sorted_L, lookup.order_L = torch.sort(lookup.bags.values_L, stable=True)
    lookup.unique_rows_U, counts_U = torch.unique_consecutive(sorted_L, return_counts=True)
    lookup.start_U = counts_U.cumsum(0) - counts_U


def _unique_rows(lookup: _Lookup) -> Tensor:
    assert lookup.unique_rows_U is not None  # training with more than one rank
    return lookup.unique_rows_U


def _row_gradients(replica: _Replica, lookup: _Lookup, gradient_FBD: Tensor) -> Tensor:
    """Sum the gradients of each distinct row, float32 [U, D].

    The lookup turned round: a row pools the output gradients of the bags that it occurs
    in, with the weights that it had there.
    """
    assert lookup.order_L is not None
    assert lookup.start_U is not None
    bags = lookup.bags
    gradient = gradient_FBD.reshape(-1, replica.embedding_dim)
    if not bags.values_L.numel():
        return gradient.new_zeros(0, replica.embedding_dim)
    bag_L = torch.repeat_interleave(bags.lengths_FB.flatten(), output_size=bags.values_L.numel())
    weights = None if bags.weights_L is None else bags.weights_L[lookup.order_L]
    return torch.nn.functional.embedding_bag(
        bag_L[lookup.order_L], gradient, lookup.start_U, mode="sum", per_sample_weights=weights
    )
