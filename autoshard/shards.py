"""Shards: rectangles of a table, and what one shard asks of a rank.

`ShardLoad` is the one place where a shard's bytes and traffic are worked out;
the memory ledger, the features, the communication volumes and the masks all
read them from here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import Any

from autoshard.distributions import expected_unique_rows
from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.tables import Table

#: The embedding kernels read rows in vectors of 4 elements (FBGEMM 1.8).
KERNEL_ALIGNMENT = 4
ID_BYTES = 8
LENGTH_BYTES = 8
#: Pooled outputs and their gradients travel as fp32.
OUTPUT_BYTES = 4


class ShardingType(Enum):
    """TorchRec's sharding types."""

    DATA_PARALLEL = "data_parallel"
    TABLE_WISE = "table_wise"
    ROW_WISE = "row_wise"
    TABLE_ROW_WISE = "table_row_wise"
    COLUMN_WISE = "column_wise"
    TABLE_COLUMN_WISE = "table_column_wise"

    @property
    def splits_rows(self) -> bool:
        """Whether a shard holds some rows of the table, with all columns."""
        return self in (ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE)

    @property
    def splits_columns(self) -> bool:
        """Whether a shard holds some columns of the table, with all rows."""
        return self in (ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE)


@dataclass(frozen=True)
class Shard:
    """Rows [row_offset, row_offset + num_rows) × columns [col_offset, …) on one rank."""

    rank: int
    row_offset: int
    col_offset: int
    num_rows: int
    num_cols: int

    def to_json(self) -> dict[str, int]:
        """The shard as a plain dictionary."""
        return {
            "rank": self.rank,
            "row_offset": self.row_offset,
            "col_offset": self.col_offset,
            "num_rows": self.num_rows,
            "num_cols": self.num_cols,
        }


@dataclass(frozen=True)
class ShardSlice:
    """A shard before it has a rank: a table, how it is split, and which part this is."""

    table: Table
    sharding_type: ShardingType
    row_offset: int
    col_offset: int
    num_rows: int
    num_cols: int

    @classmethod
    def whole(
        cls, table: Table, sharding_type: ShardingType = ShardingType.TABLE_WISE
    ) -> ShardSlice:
        """All of `table`."""
        return cls(table, sharding_type, 0, 0, table.num_embeddings, table.embedding_dim)

    def on(self, rank: int) -> Shard:
        """This slice, placed on `rank`."""
        return Shard(rank, self.row_offset, self.col_offset, self.num_rows, self.num_cols)

    @property
    def row_share(self) -> float:
        """Share of the table's rows, and so of its lookups, that this slice serves."""
        return self.num_rows / self.table.num_embeddings


def padded_cols(num_cols: int) -> int:
    """Columns as the kernel stores them: the next multiple of `KERNEL_ALIGNMENT`."""
    return -(-num_cols // KERNEL_ALIGNMENT) * KERNEL_ALIGNMENT


def optimizer_state_bytes(optimizer: Optimizer, num_rows: int, num_cols: int) -> int:
    """Bytes of fp32 optimizer state for `num_rows` × `num_cols` weights."""
    if optimizer is Optimizer.SGD:
        return 0
    if optimizer is Optimizer.ROWWISE_ADAGRAD:
        return num_rows * 4
    if optimizer is Optimizer.ADAGRAD:
        return num_rows * num_cols * 4
    return 2 * num_rows * num_cols * 4


@dataclass(frozen=True, kw_only=True)
class ShardLoad:
    """What a slice asks of the rank that holds it, in one training step."""

    weights_bytes: int
    optimizer_state_bytes: int
    input_bytes: int
    """Ids, offsets and weights that the kernel reads."""
    output_bytes: int
    """Pooled outputs that the kernel writes."""
    gradient_bytes: int
    """Incoming output gradients, and the kernel's sorted copy of the ids."""
    replica_bytes: int
    """Buffers for exchanging the touched rows of a replica; 0 unless data_parallel."""
    batch_samples: int
    """Samples that the lookup sees per step: one rank's for a replica, else all ranks'."""
    lookups: float
    """Ids that the lookup sees per step."""
    unique_rows: float
    """Expected distinct rows among them."""
    update_bags: float
    """Bags that the update sees per step: the lookup's, for a replica all ranks', or one per
    row that some rank touched."""
    update_lookups: float
    """Ids that the update sees."""
    update_unique_rows: float
    """Expected distinct rows among them."""
    reduced_lookups: float
    """Ids whose gradients are summed per row before the update; 0 unless a replica's ranks
    exchange rows."""
    send_ids_bytes_per_peer: float
    """What *each other* rank sends this slice's rank, as lengths, ids and weights."""
    send_output_bytes_per_peer: float
    """What this slice's rank sends *each other* rank as pooled outputs."""
    send_replica_bytes_per_peer: float
    """What every rank sends each other rank to keep replicas equal."""

    @property
    def memory_bytes(self) -> int:
        """All that this slice adds to its rank's ledger."""
        return (
            self.weights_bytes
            + self.optimizer_state_bytes
            + self.input_bytes
            + self.output_bytes
            + self.gradient_bytes
            + self.replica_bytes
        )


def shard_load(slice_: ShardSlice, training: TrainingConfig, world_size: int) -> ShardLoad:
    """Work out the load of one slice.

    Args:
        slice_: the part of a table.
        training: batch size per rank and optimizer.
        world_size: ranks that send batches.

    Returns:
        Exact integers for what is allocated; expectations for what depends on the ids.
    """
    table = slice_.table
    is_replica = slice_.sharding_type is ShardingType.DATA_PARALLEL
    samples = training.batch_size * (1 if is_replica else world_size)
    table_lookups = samples * table.lookups_per_sample
    lookups = table_lookups * slice_.row_share
    unique = expected_unique_rows(
        table.ids, table.num_embeddings, table_lookups, row_share=slice_.row_share
    )
    cols = padded_cols(slice_.num_cols)
    bags = samples * table.num_features
    id_bytes = ID_BYTES + (4 if table.weighted else 0)
    ids = math.ceil(lookups)
    output = bags * cols * OUTPUT_BYTES
    replica = 0
    send_ids, send_outputs, send_replica = 0.0, 0.0, 0.0
    update_bags, update_lookups, update_unique = float(bags), lookups, unique
    reduced_lookups = 0.0
    local_ids = training.batch_size * table.lookups_per_sample * slice_.row_share
    local_bags = training.batch_size * table.num_features
    if is_replica:
        exchange = replica_exchange(table, training, world_size)
        send_ids, send_replica = exchange.ids_bytes, exchange.gradients_bytes
        # Sent to and received from every rank.
        replica = 2 * math.ceil(send_ids + send_replica) * world_size
        update_unique = expected_unique_rows(
            table.ids, table.num_embeddings, world_size * lookups, row_share=1.0
        )
        if exchange.by_bag:
            update_bags, update_lookups = float(world_size * bags), world_size * lookups
        else:
            update_bags = update_lookups = world_size * unique
            reduced_lookups = lookups
    else:
        send_ids = local_ids * id_bytes + local_bags * LENGTH_BYTES
        send_outputs = float(local_bags * slice_.num_cols * OUTPUT_BYTES)
    return ShardLoad(
        weights_bytes=slice_.num_rows * cols * table.data_type.num_bytes,
        optimizer_state_bytes=optimizer_state_bytes(training.optimizer, slice_.num_rows, cols),
        input_bytes=ids * id_bytes + (bags + 1) * LENGTH_BYTES,
        output_bytes=output,
        gradient_bytes=output + ids * 2 * ID_BYTES,
        replica_bytes=replica,
        batch_samples=samples,
        lookups=lookups,
        unique_rows=unique,
        update_bags=update_bags,
        update_lookups=update_lookups,
        update_unique_rows=update_unique,
        reduced_lookups=reduced_lookups,
        send_ids_bytes_per_peer=send_ids,
        send_output_bytes_per_peer=send_outputs,
        send_replica_bytes_per_peer=send_replica,
    )


@dataclass(frozen=True, kw_only=True)
class ReplicaExchange:
    """What one rank tells each other rank of a replica's gradients, whichever is less.

    By row: the distinct rows that it touched and the sum of each row's gradients. By bag:
    its ids and the gradient of each bag, from which any rank can work out the rest. Rows
    are fewer for small tables, bags for large ones with long bags.
    """

    by_bag: bool
    ids_bytes: float
    """Sent before the lookup, as lengths, ids and weights."""
    gradients_bytes: float
    """Sent after the backward of the dense layers."""


def replica_exchange(table: Table, training: TrainingConfig, world_size: int) -> ReplicaExchange:
    """How the replicas of `table` are kept equal; nothing travels in a world of one."""
    if world_size == 1:
        return ReplicaExchange(by_bag=True, ids_bytes=0.0, gradients_bytes=0.0)
    lookups = training.batch_size * table.lookups_per_sample
    bags = training.batch_size * table.num_features
    row_bytes = table.embedding_dim * OUTPUT_BYTES
    unique = expected_unique_rows(table.ids, table.num_embeddings, lookups, row_share=1.0)
    by_row = unique * (ID_BYTES + row_bytes)
    ids = lookups * (ID_BYTES + (4 if table.weighted else 0)) + bags * LENGTH_BYTES
    by_bag = bags * row_bytes
    if ids + by_bag < by_row:
        return ReplicaExchange(by_bag=True, ids_bytes=ids, gradients_bytes=float(by_bag))
    return ReplicaExchange(by_bag=False, ids_bytes=0.0, gradients_bytes=by_row)


def fixed_rank_bytes(problem: ShardingProblem) -> dict[str, int]:
    """Bytes that every rank needs whatever the plan, by ledger line.

    `batches_in_flight` are the rank's own batches before their ids are distributed;
    `pooled_outputs` are the outputs of all tables for the rank's own samples, and
    their gradients.
    """
    batch_size = problem.training.batch_size
    ids = sum(
        math.ceil(batch_size * table.lookups_per_sample) * (ID_BYTES + (4 if table.weighted else 0))
        + batch_size * table.num_features * LENGTH_BYTES
        for table in problem.tables
    )
    outputs = sum(
        batch_size * table.num_features * table.embedding_dim * OUTPUT_BYTES
        for table in problem.tables
    )
    return {
        "batches_in_flight": ids * problem.training.batches_in_flight,
        "pooled_outputs": 2 * outputs,
        "dense": problem.training.dense_bytes,
    }


def slice_to_json(slice_: ShardSlice) -> dict[str, Any]:
    """A slice as a plain dictionary, for measurement rows."""
    return {
        "table": slice_.table.to_json(),
        "sharding_type": slice_.sharding_type.value,
        "row_offset": slice_.row_offset,
        "col_offset": slice_.col_offset,
        "num_rows": slice_.num_rows,
        "num_cols": slice_.num_cols,
    }
