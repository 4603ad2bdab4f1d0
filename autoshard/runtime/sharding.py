"""What a way of holding tables must do to take part in a step, and which ways there are.

A step runs every `ShardingMethod` through the phases below, on every rank, and sends the
parcels of all methods in one collective per phase:

    ids ─► lookup ─► outputs ─► (dense layers) ─► gradients ─► update

There are four: `Sliced` for tables whose rectangles lie on one rank each (`table_wise`,
`row_wise`, `table_row_wise`, `column_wise`, `table_column_wise`), with `NodeSliced` for
`table_row_wise` over several nodes; for replicas (`data_parallel`) `BagReplicas` or
`RowReplicas`, whichever exchanges less. Methods keep nothing of a step in themselves: it
lives in a `MethodState`, so that several batches can be under way at once.

Shapes: E=entries, B=samples of this rank, R=ranks, N=announced numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from autoshard.problem import TrainingConfig
from autoshard.runtime.collectives import Collectives, Parcel, Received
from autoshard.runtime.ids import EntryIds
from autoshard.runtime.layout import Entry, PlacedTable
from autoshard.runtime.timing import Recorder
from autoshard.shards import Shard, ShardingType, replica_exchange
from autoshard.tables import Table


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Where a method runs."""

    rank: int
    world_size: int
    device: torch.device
    training: TrainingConfig
    seed: int
    recorder: Recorder
    """Of lookup and update."""
    input_recorder: Recorder
    """Of what happens before; another one where a second thread distributes the input."""
    node: Collectives | None = None
    """Of the ranks of this rank's node; None unless there are several nodes of several ranks."""


@dataclass(frozen=True, eq=False)
class LocalShard:
    """What one rank holds of a table, in the table's own coordinates."""

    table: Table
    shard: Shard
    weights: Tensor
    """A writable view [num_rows, num_cols], without padding columns."""
    optimizer_states: dict[str, Tensor]
    """Writable views, float32: `sum` for Adagrad [num_rows, num_cols] and row-wise Adagrad
    [num_rows]; `exp_avg` and `exp_avg_sq` [num_rows, num_cols] for Adam; none for SGD."""


@dataclass(frozen=True, eq=False)
class IdsMessage:
    """What one method has for one rank before the lookup."""

    parts: list[Tensor]
    """int64, one-dimensional, to be sent one after the other."""
    announced: Sequence[int] = ()
    """The method's `num_announced` numbers."""


@dataclass
class MethodState:
    """What one method remembers of one step."""

    ids: EntryIds
    training: bool
    """Whether gradients will follow."""
    batch_sizes_R: list[int] = field(default_factory=list)
    announced_RN: list[list[int]] = field(default_factory=list)
    """What every rank's method announced."""
    values: dict[str, Any] = field(default_factory=dict)
    """The method's own notes."""


class ShardingMethod(Protocol):
    """One way of holding tables, and its part of a step on one rank."""

    entries: tuple[Entry, ...]
    """What it looks up from the local batch, in its own order, the same on every rank."""
    num_announced: int
    """N: numbers that this rank tells each other rank ahead of any ids, beside their sizes."""
    exchanges_ids: bool
    """Whether ids ever travel."""
    exchanges_outputs: bool
    """Whether its pooled outputs travel; if not, its parcels of them are always empty."""

    def send_ids(self, state: MethodState) -> list[IdsMessage]:
        """Prepare the local batch; what each destination rank is to get, [R]."""

    def lookup(self, state: MethodState, ids: Received) -> None:
        """Run the forward kernels on the ids of every source rank."""

    def send_outputs(self, state: MethodState) -> Parcel:
        """Send pooled outputs as float32."""

    def pooled(self, state: MethodState, outputs: Received) -> list[Tensor]:
        """Per entry, the sums over the bags of the local batch, float32 [B, embedding_dim].

        The caller may write into them.
        """

    def send_gradients(self, state: MethodState, gradients: Sequence[Tensor]) -> Parcel:
        """Take the gradient of each entry's sums, to be divided by R; send as float32."""

    def update(self, state: MethodState, gradients: Received) -> None:
        """Run the backward kernels with the fused optimizer."""

    def local_shards(self) -> tuple[LocalShard, ...]:
        """What this rank holds."""

    def allocated_bytes(self) -> int:
        """Bytes of weights and optimizer state on this rank."""

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use another learning rate from the next update on."""


MethodFactory = Callable[[Sequence[PlacedTable], RankContext], ShardingMethod]


def build_methods(tables: Sequence[PlacedTable], context: RankContext) -> list[ShardingMethod]:
    """Build what holds `tables` on one rank; methods come in the same order on every rank."""
    from autoshard.runtime.bag_replicas import BagReplicas
    from autoshard.runtime.node_sliced import NodeSliced
    from autoshard.runtime.row_replicas import RowReplicas
    from autoshard.runtime.sliced import Sliced

    factories: list[MethodFactory] = [Sliced, NodeSliced, BagReplicas, RowReplicas]
    held: dict[MethodFactory, list[PlacedTable]] = {factory: [] for factory in factories}
    for placed in tables:
        if placed.sharding_type is not ShardingType.DATA_PARALLEL:
            in_node = placed.sharding_type is ShardingType.TABLE_ROW_WISE and context.node
            held[NodeSliced if in_node else Sliced].append(placed)
            continue
        exchange = replica_exchange(placed.table, context.training, context.world_size)
        held[BagReplicas if exchange.by_bag else RowReplicas].append(placed)
    return [factory(own, context) for factory, own in held.items() if own]
