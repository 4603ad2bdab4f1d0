"""The geometry of sliced tables: which rank holds which rectangle and gets which ids.

Worked out from the plan alone, in plain Python, and hence equal on every rank.

A *stream* is a list of bags that the local batch yields: all ids of an entry, or those of
its ids that fall into one slice of rows (a *bucket*). Ranks are sent streams; a stream
that several features need, because one rank holds several slices of columns, is sent
once. A *feature* is what a kernel looks up: one stream in one shard.

Streams are numbered: first the entries of tables with whole rows, then for each bucket
the entries of tables with split rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from autoshard.problem import Optimizer
from autoshard.runtime.kernels import KernelKey, kernel_key
from autoshard.runtime.layout import Entry, PlacedTable
from autoshard.shards import Shard
from autoshard.tables import Table


@dataclass(frozen=True)
class Feature:
    """One stream looked up in one shard."""

    table: Table
    shard: Shard
    key: KernelKey
    """Which kernel of its rank the shard belongs to."""
    entry: int
    """Position among the entries."""
    stream: int
    """Position among the streams of its rank."""


@dataclass(frozen=True)
class RankSlices:
    """One rank's part."""

    streams: tuple[int, ...]
    """Numbers of the streams that every rank sends it, in this order."""
    features: tuple[Feature, ...]
    """In the order of its output columns; features of one kernel stand together."""

    @property
    def num_cols(self) -> int:
        """Output columns, without padding."""
        return sum(feature.shard.num_cols for feature in self.features)


class SliceGeometry:
    """All ranks' parts."""

    def __init__(
        self, tables: Sequence[PlacedTable], world_size: int, optimizer: Optimizer
    ) -> None:
        """Work it out.

        Args:
            tables: with shards that tile them, cut along rows or along columns.
            world_size: number of ranks.
            optimizer: decides which shards may share a kernel.
        """
        cuts = [_row_cuts(placed) for placed in tables]
        self.entries: tuple[Entry, ...] = tuple(
            entry
            for is_split in (False, True)
            for placed, rows in zip(tables, cuts, strict=True)
            if (len(rows) > 1) == is_split
            for entry in placed.entries
        )
        """Those of tables with whole rows, then those of tables with split rows."""
        split = [(placed, rows) for placed, rows in zip(tables, cuts, strict=True) if len(rows) > 1]
        self.bucket_starts: list[list[int]] = [rows for p, rows in split for _ in p.entries]
        """Per entry of a table with split rows, the first row of each of its buckets."""
        self.num_whole = len(self.entries) - len(self.bucket_starts)
        self.ranks = [
            self._rank_slices(rank, list(zip(tables, cuts, strict=True)), optimizer)
            for rank in range(world_size)
        ]
        self.assembly: list[list[list[tuple[int, int]]]] = [[] for _ in self.entries]
        """Per entry, per slice of columns from left to right, where its summands come from:
        (rank, position among the rank's features), by rows."""
        places: list[dict[int, list[tuple[int, int, int]]]] = [{} for _ in self.entries]
        for rank, slices in enumerate(self.ranks):
            for index, feature in enumerate(slices.features):
                shard = feature.shard
                at = places[feature.entry].setdefault(shard.col_offset, [])
                at.append((shard.row_offset, rank, index))
        for entry, by_column in enumerate(places):
            for _, summands in sorted(by_column.items()):
                self.assembly[entry].append([(rank, at) for _, rank, at in sorted(summands)])

    def is_weighted(self, stream: int) -> bool:
        """Whether a stream carries weights."""
        return self.entries[self._entry_of(stream)].table.weighted

    def _entry_of(self, stream: int) -> int:
        if stream < self.num_whole:
            return stream
        return self.num_whole + (stream - self.num_whole) % len(self.bucket_starts)

    def _rank_slices(
        self, rank: int, tables: Sequence[tuple[PlacedTable, list[int]]], optimizer: Optimizer
    ) -> RankSlices:
        entry_of = {id(entry): index for index, entry in enumerate(self.entries)}
        by_kernel: dict[KernelKey, list[tuple[Table, Shard, int, int]]] = {}
        for placed, rows in tables:
            for shard in placed.shards:
                if shard.rank != rank:
                    continue
                key = kernel_key(placed.table, shard.num_cols, optimizer)
                for entry in placed.entries:
                    index = stream = entry_of[id(entry)]
                    if len(rows) > 1:
                        stream += rows.index(shard.row_offset) * len(self.bucket_starts)
                    by_kernel.setdefault(key, []).append((placed.table, shard, index, stream))
        position: dict[int, int] = {}
        features = [
            Feature(table, shard, key, entry, position.setdefault(stream, len(position)))
            for key, parts in by_kernel.items()
            for table, shard, entry, stream in parts
        ]
        return RankSlices(tuple(position), tuple(features))


def _row_cuts(placed: PlacedTable) -> list[int]:
    """Where the table's slices of rows begin, in order; [0] where rows are whole."""
    return sorted({shard.row_offset for shard in placed.shards})
