"""`table_row_wise` over several nodes: partial sums are added up before they leave the node.

The slices of rows of a table lie on the ranks of one node. Sent as they are, every one of
them would send its partial sums across to every rank of every other node. Instead, rank
l of a node gets from its neighbours the partial sums of the samples of all ranks that are
number l on their nodes, adds them up, and sends each of those its own: one sum crosses
instead of one per slice. Gradients cross once, to the rank with the same number, which
hands them to its neighbours.

Shapes: E=entries, B=samples of this rank, G=samples of all ranks, K=columns of all entries
of this node, R=ranks.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.runtime.collectives import Collectives, Parcel, Received
from autoshard.runtime.layout import PlacedTable
from autoshard.runtime.sharding import MethodState, RankContext
from autoshard.runtime.sliced import Sliced
from autoshard.runtime.timing import Phase


class NodeSliced(Sliced):
    """See the module's first lines."""

    def __init__(self, tables: Sequence[PlacedTable], context: RankContext) -> None:
        """Allocate the shards of this rank, and no others."""
        super().__init__(tables, context)
        assert context.node is not None  # `build_methods` asks for this class only with nodes
        self._neighbours: Collectives = context.node
        self._num_local = num_local = self._neighbours.world_size
        self._node, self._number = divmod(context.rank, num_local)
        node_of = {id(p.table): p.shards[0].rank // num_local for p in tables}
        num_nodes = context.world_size // num_local
        self._entries_N = [
            [i for i, entry in enumerate(self.entries) if node_of[id(entry.table)] == node]
            for node in range(num_nodes)
        ]
        self._node_widths_N = [
            [self.entries[i].table.embedding_dim for i in own] for own in self._entries_N
        ]
        self._node_cols_N = [sum(widths) for widths in self._node_widths_N]
        self._own_entries = self._entries_N[self._node]
        held = [feature.entry for feature in self._own.features]
        self._position = [self._own_entries.index(entry) for entry in held]
        self._holds_all_once = held == self._own_entries

    def send_outputs(self, state: MethodState) -> Parcel:
        """Add up within the node; send each rank of the own number its samples."""
        ranks = range(self._context.world_size)
        cols = self._node_cols_N[self._node]
        sizes_R = state.batch_sizes_R
        by_rank = self._in_node_order(self._output(state), sum(sizes_R)).split(sizes_R)
        of_number = [
            [by_rank[rank].flatten() for rank in ranks if rank % self._num_local == number]
            for number in range(self._num_local)
        ]
        sizes = [sum(part.numel() for part in parts) for parts in of_number]
        parcel = Parcel(
            torch.cat([part for parts in of_number for part in parts]),
            sizes,
            [sizes[self._number]] * self._num_local,
        )
        (partial,) = self._neighbours.exchange(Phase.NODE_OUTPUTS, torch.float32, [parcel])
        total = partial.pieces[0]
        for piece in partial.pieces[1:]:
            total.add_(piece)
        return Parcel(
            total,
            [size * cols if self._is_peer(rank) else 0 for rank, size in enumerate(sizes_R)],
            self._sizes_from_peers(state, self._node_cols_N),
        )

    def pooled(self, state: MethodState, outputs: Received) -> list[Tensor]:
        """Cut what the peers on all nodes sent into entries."""
        batch_size = state.batch_sizes_R[self._context.rank]
        pooled: dict[int, Tensor] = {}
        for node, (own, widths) in enumerate(
            zip(self._entries_N, self._node_widths_N, strict=True)
        ):
            flat = outputs.pieces[node * self._num_local + self._number]
            if own:
                parts = flat.view(batch_size, sum(widths)).split(widths, dim=1)
                pooled.update(zip(own, parts, strict=True))
        return [pooled[entry] for entry in range(len(self.entries))]

    def send_gradients(self, state: MethodState, gradients: Sequence[Tensor]) -> Parcel:
        """To the peer on each node, the columns of that node's tables."""
        parts = [
            torch.cat([gradients[entry] for entry in own], dim=1).flatten()
            for own in self._entries_N
            if own
        ]
        flat = torch.cat(parts).div_(self._context.world_size)
        cols = self._node_cols_N[self._node]
        return Parcel(
            flat,
            self._sizes_from_peers(state, self._node_cols_N),
            [
                size * cols if self._is_peer(rank) else 0
                for rank, size in enumerate(state.batch_sizes_R)
            ],
        )

    def update(self, state: MethodState, gradients: Received) -> None:
        """Hand the gradients round the node, then run the fused backward."""
        cols = self._node_cols_N[self._node]
        own = gradients.joined()
        of_number = [
            sum(state.batch_sizes_R[number :: self._num_local]) * cols
            for number in range(self._num_local)
        ]
        parcel = Parcel(own.repeat(self._num_local), [own.numel()] * self._num_local, of_number)
        (handed,) = self._neighbours.exchange(Phase.NODE_GRADIENTS, torch.float32, [parcel])
        pieces: list[Tensor] = [own] * self._context.world_size
        for number, flat in enumerate(handed.pieces):
            ranks = range(number, self._context.world_size, self._num_local)
            sizes = [state.batch_sizes_R[rank] * cols for rank in ranks]
            for rank, piece in zip(ranks, flat.split(sizes), strict=True):
                pieces[rank] = piece
        gradient_GK = torch.cat(pieces).view(sum(state.batch_sizes_R), cols)
        if not self._holds_all_once:
            widths = self._node_widths_N[self._node]
            parts = gradient_GK.split(widths, dim=1) if widths else ()
            held = [parts[position] for position in self._position]
            gradient_GK = torch.cat(held, dim=1) if held else gradient_GK
        if self._own.features:
            self._kernels.update(state.values.pop("bags"), gradient_GK)

    def _in_node_order(self, output_GC: Tensor, num_samples: int) -> Tensor:
        """This rank's partial sums of all entries of its node; zero where it holds no rows."""
        if self._holds_all_once:
            return output_GC
        widths = self._node_widths_N[self._node]
        total_GK = output_GC.new_zeros(num_samples, sum(widths))
        columns = total_GK.split(widths, dim=1) if widths else ()
        for position, part in (
            zip(
                self._position,
                output_GC.split(self._widths_R[self._context.rank], dim=1),
                strict=True,
            )
            if self._position
            else ()
        ):
            columns[position].add_(part)
        return total_GK

    def _is_peer(self, rank: int) -> bool:
        """Whether `rank` has this rank's number on its node."""
        return rank % self._num_local == self._number

    def _sizes_from_peers(self, state: MethodState, cols_N: Sequence[int]) -> list[int]:
        """Elements for this rank's samples that travel between it and each rank."""
        batch_size = state.batch_sizes_R[self._context.rank]
        return [
            batch_size * cols_N[rank // self._num_local] if self._is_peer(rank) else 0
            for rank in range(self._context.world_size)
        ]
