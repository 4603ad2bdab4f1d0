"""What moves between two plans, against counted elements."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.plan import ShardingPlan, TablePlan
from autoshard.plan_diff import diff_plans
from autoshard.problem import TrainingConfig
from autoshard.shards import Shard, ShardingType
from autoshard.tables import Table
from autoshard.topology import GIB, Topology

ROWS, COLS = 12, 8


def entry(name: str, kind: ShardingType, *shards: Shard, rows: int = ROWS) -> TablePlan:
    subject = Table(name=name, num_embeddings=rows, embedding_dim=COLS, pooling_factor=1.0)
    return TablePlan(subject, kind, shards)


def whole(name: str, rank: int, rows: int = ROWS) -> TablePlan:
    return entry(name, ShardingType.TABLE_WISE, Shard(rank, 0, 0, rows, COLS), rows=rows)


def plan_of(*entries: TablePlan, batch_size: int = 4) -> ShardingPlan:
    return ShardingPlan(
        topology=Topology.uniform(3, GIB),
        training=TrainingConfig(batch_size=batch_size),
        tables=entries,
    )


def test_equal_plans_in_any_order():
    split = entry("s", ShardingType.ROW_WISE, Shard(0, 0, 0, 6, COLS), Shard(1, 6, 0, 6, COLS))
    other = replace(split, shards=tuple(reversed(split.shards)))
    difference = diff_plans(plan_of(whole("a", 0), split), plan_of(other, whole("a", 0)))
    assert difference.is_empty
    assert difference.unmoved == 2
    assert difference.moved_bytes == 0


def test_tables_that_move_come_and_go():
    before = plan_of(whole("stays", 0), whole("moves", 0), whole("grows", 1), whole("gone", 1))
    after = plan_of(whole("new", 2), whole("stays", 0), whole("moves", 2), whole("grows", 1, 13))
    difference = diff_plans(before, after)
    (move,) = difference.moved
    assert (move.name, move.from_ranks, move.to_ranks) == ("moves", (0,), (2,))
    assert difference.moved_bytes == ROWS * COLS * 4
    assert difference.received_bytes == (0, 0, ROWS * COLS * 4)
    assert (difference.removed, difference.added) == (("gone",), ("new",))
    assert difference.changed == ("grows",)
    assert difference.unmoved == 1


def test_a_split_sends_only_what_is_not_there():
    halves = entry("t", ShardingType.COLUMN_WISE, Shard(0, 0, 0, ROWS, 4), Shard(1, 0, 4, ROWS, 4))
    difference = diff_plans(plan_of(whole("t", 0)), plan_of(halves))
    assert difference.received_bytes == (0, ROWS * 4 * 4, 0)


def test_settings_that_differ():
    difference = diff_plans(plan_of(whole("a", 0)), plan_of(whole("a", 0), batch_size=8))
    assert difference.settings == {"batch_size": (4, 8)}
    assert not difference.is_empty


@st.composite
def splits(draw) -> TablePlan:
    by_rows = draw(st.booleans())
    total = ROWS if by_rows else COLS
    cuts = [0, *sorted(draw(st.sets(st.integers(1, total - 1), max_size=2))), total]
    parts = zip(draw(st.permutations(range(3))), cuts, cuts[1:], strict=False)
    if by_rows:
        shards = [Shard(rank, low, 0, high - low, COLS) for rank, low, high in parts]
        return entry("t", ShardingType.ROW_WISE, *shards)
    shards = [Shard(rank, 0, low, ROWS, high - low) for rank, low, high in parts]
    return entry("t", ShardingType.COLUMN_WISE, *shards)


def owners(split: TablePlan) -> dict[tuple[int, int], int]:
    return {
        (row, col): shard.rank
        for shard in split.shards
        for row in range(shard.row_offset, shard.row_offset + shard.num_rows)
        for col in range(shard.col_offset, shard.col_offset + shard.num_cols)
    }


@settings(max_examples=100, deadline=None)
@given(splits(), splits())
def test_moved_bytes_equal_counted_elements(first, second):
    before, after = owners(first), owners(second)
    elements = sum(before[cell] != after[cell] for cell in after)
    assert diff_plans(plan_of(first), plan_of(second)).moved_bytes == elements * 4
