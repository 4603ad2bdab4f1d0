"""What a sharding type must do to take part in a step, and which ones there are.

A step runs the methods of every `ShardingMethod` in the order below, on every rank, and
sends the parcels of all methods in one collective per phase:

    lengths ─► ids ─► lookup ─► outputs ─► (dense layers) ─► gradients ─► update

A new sharding type is one file with one class, one line in `METHODS` and its rows in
`autoshard.runtime.capabilities`. Methods keep nothing of a step in themselves: it lives
in a `MethodState`, so that several batches can be under way at once.

Shapes: E=entries, B=samples of this rank, R=ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from autoshard.problem import TrainingConfig
from autoshard.runtime.collectives import Parcel
from autoshard.runtime.ids import EntryIds
from autoshard.runtime.layout import Entry, PlacedTable
from autoshard.runtime.timing import Recorder
from autoshard.shards import ShardingType


@dataclass(frozen=True, kw_only=True)
class RankContext:
    """Where a method runs."""

    rank: int
    world_size: int
    device: torch.device
    training: TrainingConfig
    seed: int
    recorder: Recorder


@dataclass
class MethodState:
    """What one method remembers of one step."""

    ids: EntryIds
    training: bool
    """Whether gradients will follow."""
    batch_sizes_R: list[int] = field(default_factory=list)
    values: dict[str, Any] = field(default_factory=dict)
    """The method's own notes."""


class ShardingMethod(Protocol):
    """One sharding type's part of a step on one rank."""

    entries: tuple[Entry, ...]
    """What it looks up from the local batch, in its own order, the same on every rank."""
    num_lengths_R: list[int]
    """Elements of the lengths parcel that this rank gets from each other rank."""

    def send_lengths(self, state: MethodState | None) -> list[Tensor]:
        """int64 per destination rank; zeros of the right size where there is no batch."""

    def send_ids(self, state: MethodState, lengths: list[Tensor]) -> Parcel:
        """Read the lengths of every source rank; send ids (and weights) as int64."""

    def lookup(self, state: MethodState, ids: list[Tensor]) -> None:
        """Run the forward kernels on the ids of every source rank."""

    def send_outputs(self, state: MethodState) -> Parcel:
        """Send pooled outputs as float32."""

    def pooled(self, state: MethodState, outputs: list[Tensor]) -> list[Tensor]:
        """Per entry, the pooled output of the local batch, float32 [B, embedding_dim]."""

    def send_gradients(self, state: MethodState, gradients: Sequence[Tensor]) -> Parcel:
        """Take the gradient of each entry's output, already divided by R; send as float32."""

    def update(self, state: MethodState, gradients: list[Tensor]) -> None:
        """Run the backward kernels with the fused optimizer."""

    def held_tables(self) -> tuple[str, ...]:
        """Names of the tables that this rank holds, whole or in part."""

    def table_weights(self, name: str) -> Tensor:
        """A view of the weights of a held table."""

    def optimizer_state(self, name: str) -> Tensor | None:
        """A view of the optimizer state of a held table; None if the optimizer has none."""

    def allocated_bytes(self) -> int:
        """Bytes of weights and optimizer state on this rank."""


MethodFactory = Callable[[Sequence[PlacedTable], RankContext], ShardingMethod]


def method_factories() -> dict[ShardingType, MethodFactory]:
    """The registered sharding types, in the order in which parcels are packed."""
    from autoshard.runtime.data_parallel import DataParallel
    from autoshard.runtime.table_wise import TableWise

    return {ShardingType.DATA_PARALLEL: DataParallel, ShardingType.TABLE_WISE: TableWise}


def empty_parcel(context: RankContext, dtype: torch.dtype) -> Parcel:
    """Nothing to anybody."""
    nothing = torch.empty(0, dtype=dtype, device=context.device)
    return Parcel([nothing] * context.world_size, [0] * context.world_size)
