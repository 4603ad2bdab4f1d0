"""Which rank holds which part of a table: random and fixed placements of every sharding type."""

from __future__ import annotations

import random

from autoshard.shards import Shard, ShardingType
from autoshard.tables import Table
from autoshard.topology import Topology


def node_ranks(topology: Topology, node: int) -> list[int]:
    first = node * topology.local_world_size
    return list(range(first, first + topology.local_world_size))


def _eligible(kind: ShardingType, topology: Topology, node: int) -> list[int]:
    """The ranks that a table of this type may lie on, if it lies on one node on that one."""
    if kind in (ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE):
        return node_ranks(topology, node)
    return list(range(topology.world_size))


def _slices(table: Table, kind: ShardingType, cuts: list[int], ranks: list[int]) -> list[Shard]:
    """Rows or columns between consecutive `cuts`, on `ranks`."""
    if kind.splits_rows:
        bounds = [0, *cuts, table.num_embeddings]
        return [
            Shard(rank, low, 0, high - low, table.embedding_dim)
            for rank, low, high in zip(ranks, bounds, bounds[1:], strict=False)
        ]
    bounds = [0, *cuts, table.embedding_dim]
    return [
        Shard(rank, 0, low, table.num_embeddings, high - low)
        for rank, low, high in zip(ranks, bounds, bounds[1:], strict=False)
    ]


def _whole(table: Table, rank: int) -> Shard:
    return Shard(rank, 0, 0, table.num_embeddings, table.embedding_dim)


def random_shards(
    rng: random.Random, table: Table, kind: ShardingType, topology: Topology
) -> tuple[Shard, ...]:
    """Anything that a plan may hold.

    Slices are uneven and not in rank order, blocks of rows may be empty, fewer ranks than
    there are may take part, and a rank may hold several slices of columns.
    """
    everyone = list(range(topology.world_size))
    if kind is ShardingType.DATA_PARALLEL:
        return tuple(_whole(table, rank) for rank in _shuffled(rng, everyone))
    if kind is ShardingType.TABLE_WISE:
        return (_whole(table, rng.choice(everyone)),)
    node = rng.randrange(topology.world_size // topology.local_world_size)
    ranks = _eligible(kind, topology, node)
    if kind.splits_rows:
        ranks = _shuffled(rng, ranks)[: rng.randint(1, len(ranks))]
        cuts = sorted(rng.randint(0, table.num_embeddings) for _ in ranks[1:])
    else:
        count = rng.randint(1, min(table.embedding_dim, len(ranks) + 1))
        ranks = [rng.choice(ranks) for _ in range(count)]
        inner = list(range(1, table.embedding_dim))
        cuts = sorted(_shuffled(rng, inner)[: count - 1])
    return tuple(_shuffled(rng, _slices(table, kind, cuts, ranks)))


def spread_shards(table: Table, kind: ShardingType, topology: Topology) -> tuple[Shard, ...]:
    """One fixed placement of each type: over all ranks that it may have, backwards.

    Rows and columns are cut unevenly: each slice but the last holds one row or column.
    """
    if kind is ShardingType.DATA_PARALLEL:
        return tuple(_whole(table, rank) for rank in range(topology.world_size))
    ranks = _eligible(kind, topology, node=0)[::-1]
    if kind is ShardingType.TABLE_WISE:
        return (_whole(table, ranks[0]),)
    size = table.num_embeddings if kind.splits_rows else table.embedding_dim
    ranks = ranks[:size]
    return tuple(_slices(table, kind, list(range(1, len(ranks))), ranks))


def _shuffled(rng: random.Random, values: list) -> list:  # type: ignore[type-arg]
    """A shuffled copy, by draws that a property-based test can shrink."""
    left, taken = list(values), []
    while left:
        taken.append(left.pop(rng.randrange(len(left))))
    return taken
