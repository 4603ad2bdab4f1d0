"""`table_wise`: one rank holds the whole table and looks it up for everybody.

Each rank sends the ids of its local batch to the tables' owners; an owner pools the bags
of all ranks in one kernel call per kind of table and sends every rank the rows of its
own samples. Gradients travel the same way back.

Shapes: E=entries of one owner, B=samples of this rank, G=samples of all ranks,
D=true columns of one owner, R=ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.runtime.collectives import Parcel, offsets
from autoshard.runtime.initialization import initialize_rows
from autoshard.runtime.kernels import EmbeddingKernel, KernelKey, kernel_key, mean_weights
from autoshard.runtime.layout import Entry, PlacedTable
from autoshard.runtime.sharding import MethodState, RankContext
from autoshard.runtime.timing import Compute
from autoshard.tables import PoolingType


class TableWise:
    """See the module's first lines."""

    def __init__(self, tables: Sequence[PlacedTable], context: RankContext) -> None:
        """Allocate the tables of this rank, and no others."""
        self._context = context
        grouped = [
            _kernel_order([t for t in tables if t.ranks[0] == rank], context)
            for rank in range(context.world_size)
        ]
        self._entries_of_rank: list[list[Entry]] = [
            [entry for group in groups.values() for table in group for entry in table.entries]
            for groups in grouped
        ]
        self._dims_of_rank = [
            [entry.table.embedding_dim for entry in entries] for entries in self._entries_of_rank
        ]
        self.entries = tuple(entry for entries in self._entries_of_rank for entry in entries)
        self._first_entry = offsets([len(entries) for entries in self._entries_of_rank])
        self._groups = [_Group(key, group, context) for key, group in grouped[context.rank].items()]
        self._own = self._entries_of_rank[context.rank]
        self._capacity = context.training.batch_size
        self.num_lengths_R = [len(self._own) * self._capacity] * context.world_size

    def send_lengths(self, state: MethodState | None) -> list[Tensor]:
        """Every bag's length, padded to the plan's batch size so that sizes are known."""
        sent = []
        for rank, entries in enumerate(self._entries_of_rank):
            padded = torch.zeros(
                len(entries), self._capacity, dtype=torch.int64, device=self._context.device
            )
            if state is not None:
                lengths_EB = state.ids.lengths_EB[self._slice(rank)]
                padded[:, : lengths_EB.shape[1]] = lengths_EB
            sent.append(padded.flatten())
        return sent

    def send_ids(self, state: MethodState, lengths: list[Tensor]) -> Parcel:
        """The ids of each owner's entries, then the weights of its weighted ones."""
        state.values["lengths"] = lengths_R = [
            flat.view(len(self._own), self._capacity)[:, :size]
            for flat, size in zip(lengths, state.batch_sizes_R, strict=True)
        ]
        state.values["counts"] = counts_R = [lengths_EB.sum(1).tolist() for lengths_EB in lengths_R]
        sent = []
        for rank, entries in enumerate(self._entries_of_rank):
            parts = state.ids.values[self._slice(rank)]
            if state.ids.weights is not None:
                weights = state.ids.weights[self._slice(rank)]
                parts = [*parts, *_packed(weights, entries)]
            sent.append(
                torch.cat(parts)
                if parts
                else torch.empty(0, dtype=torch.int64, device=self._context.device)
            )
        sizes = [sum(counts) + _packed_size(counts, self._own) for counts in counts_R]
        return Parcel(sent, sizes)

    def lookup(self, state: MethodState, ids: list[Tensor]) -> None:
        """Bring the ids from rank-major to entry-major order and pool them."""
        counts_R: list[list[int]] = state.values["counts"]
        values_RE = [
            flat[: sum(counts)].split(counts) for flat, counts in zip(ids, counts_R, strict=True)
        ]
        weights_RE = [
            _unpacked(flat[sum(counts) :], counts, self._own)
            for flat, counts in zip(ids, counts_R, strict=True)
        ]
        lengths_EG = torch.cat(state.values["lengths"], dim=1)
        inputs = []
        start = 0
        for group in self._groups:
            positions = range(start, start + group.kernel.num_features)
            start = positions.stop
            lengths = lengths_EG[positions.start : positions.stop]
            values = torch.cat([values_E[e] for e in positions for values_E in values_RE])
            weights = None
            if group.kernel.key.weighted:
                weights = torch.cat([weights_E[e] for e in positions for weights_E in weights_RE])
                weights = group.pooling_weights(weights, lengths)
            inputs.append((values, lengths, weights))
        with self._context.recorder.compute(Compute.FORWARD):
            state.values["outputs"] = [
                group.kernel.lookup(values, lengths, weights, training=state.training)
                for group, (values, lengths, weights) in zip(self._groups, inputs, strict=True)
            ]

    def send_outputs(self, state: MethodState) -> Parcel:
        """Each rank's rows of the pooled outputs."""
        outputs: list[Tensor] = state.values["outputs"]
        with torch.no_grad():
            unpadded = [
                group.kernel.unpad(output)
                for group, output in zip(self._groups, outputs, strict=True)
            ]
        sent = (
            [part.flatten() for part in torch.cat(unpadded, dim=1).split(state.batch_sizes_R)]
            if unpadded
            else [torch.empty(0, device=self._context.device)] * self._context.world_size
        )
        batch_size = state.batch_sizes_R[self._context.rank]
        return Parcel(sent, [batch_size * sum(dims) for dims in self._dims_of_rank])

    def pooled(self, state: MethodState, outputs: list[Tensor]) -> list[Tensor]:
        """Cut what every owner sent into entries."""
        batch_size = state.batch_sizes_R[self._context.rank]
        pooled: list[Tensor] = []
        for flat, dims in zip(outputs, self._dims_of_rank, strict=True):
            pooled.extend(flat.view(batch_size, sum(dims)).split(dims, dim=1) if dims else ())
        return pooled

    def send_gradients(self, state: MethodState, gradients: Sequence[Tensor]) -> Parcel:
        """Each owner's columns of the output gradients."""
        sent = []
        for rank, entries in enumerate(self._entries_of_rank):
            parts = list(gradients[self._slice(rank)])
            sent.append(
                torch.cat(parts, dim=1).flatten()
                if entries
                else torch.empty(0, device=self._context.device)
            )
        own_cols = sum(self._dims_of_rank[self._context.rank])
        return Parcel(sent, [size * own_cols for size in state.batch_sizes_R])

    def update(self, state: MethodState, gradients: list[Tensor]) -> None:
        """Run the fused backward on the gradients of all ranks' samples."""
        if not self._groups:
            return
        own_cols = sum(self._dims_of_rank[self._context.rank])
        gradient_GD = torch.cat(gradients).view(-1, own_cols)
        parts = gradient_GD.split([group.kernel.num_cols for group in self._groups], dim=1)
        padded = [g.kernel.pad(part) for g, part in zip(self._groups, parts, strict=True)]
        with self._context.recorder.compute(Compute.BACKWARD):
            for group, output, gradient in zip(
                self._groups, state.values["outputs"], padded, strict=True
            ):
                group.kernel.update(output, gradient)

    def held_tables(self) -> tuple[str, ...]:
        """Names of the tables on this rank."""
        return tuple(name for group in self._groups for name in group.names)

    def table_weights(self, name: str) -> Tensor:
        """[num_embeddings, embedding_dim]."""
        kernel, index = self._find(name)
        return kernel.weights(index)

    def optimizer_state(self, name: str) -> Tensor | None:
        """[num_embeddings] or [num_embeddings, embedding_dim]; None for SGD."""
        kernel, index = self._find(name)
        return kernel.optimizer_state(index)

    def allocated_bytes(self) -> int:
        """Bytes of weights and optimizer state on this rank."""
        return sum(group.kernel.allocated_bytes() for group in self._groups)

    def _slice(self, rank: int) -> slice:
        return slice(self._first_entry[rank], self._first_entry[rank + 1])

    def _find(self, name: str) -> tuple[EmbeddingKernel, int]:
        for group in self._groups:
            if name in group.names:
                return group.kernel, group.names.index(name)
        raise KeyError(name)


class _Group:
    """The tables of one kernel."""

    def __init__(self, key: KernelKey, tables: Sequence[PlacedTable], context: RankContext) -> None:
        self.names = [placed.table.name for placed in tables]
        self._pooling_E = [placed.table.pooling for placed in tables for _ in placed.entries]
        self.kernel = EmbeddingKernel(
            key,
            num_rows_T=[placed.table.num_embeddings for placed in tables],
            embedding_dim_T=[placed.table.embedding_dim for placed in tables],
            table_of_feature_F=[t for t, placed in enumerate(tables) for _ in placed.entries],
            training=context.training,
            device=context.device,
        )
        for index, placed in enumerate(tables):
            initialize_rows(self.kernel.weights(index), placed.table, seed=context.seed)

    def pooling_weights(self, weights_L: Tensor, lengths_EG: Tensor) -> Tensor:
        """Weights with which the kernel's weighted sum pools as the tables ask."""
        counts = lengths_EG.sum(1).tolist()
        parts = zip(self._pooling_E, weights_L.split(counts), lengths_EG, strict=True)
        return torch.cat(
            [
                mean_weights(weights, lengths) if pooling is PoolingType.MEAN else weights
                for pooling, weights, lengths in parts
            ]
        )


def _kernel_order(
    tables: Sequence[PlacedTable], context: RankContext
) -> dict[KernelKey, list[PlacedTable]]:
    """Tables by kernel, kernels by first appearance in the plan."""
    groups: dict[KernelKey, list[PlacedTable]] = {}
    for placed in tables:
        groups.setdefault(kernel_key(placed.table, context.training.optimizer), []).append(placed)
    return groups


def _packed(weights: Sequence[Tensor], entries: Sequence[Entry]) -> list[Tensor]:
    """The weights of weighted entries as int64, two float32 in each."""
    parts = [w for w, entry in zip(weights, entries, strict=True) if entry.table.weighted]
    if not parts:
        return []
    flat = torch.cat(parts)
    return [torch.nn.functional.pad(flat, (0, flat.numel() % 2)).view(torch.int64)]


def _packed_size(counts: Sequence[int], entries: Sequence[Entry]) -> int:
    weighted = sum(c for c, entry in zip(counts, entries, strict=True) if entry.table.weighted)
    return -(-weighted // 2)


def _unpacked(packed: Tensor, counts: Sequence[int], entries: Sequence[Entry]) -> list[Tensor]:
    """Per entry, its weights; empty for entries that are not weighted."""
    sizes = [c if entry.table.weighted else 0 for c, entry in zip(counts, entries, strict=True)]
    return list(packed.view(torch.float32)[: sum(sizes)].split(sizes))
