"""The splitting rule: whole, else the fewest column parts, else the fewest row parts."""

from __future__ import annotations

import itertools

import pytest

from autoshard.errors import InfeasibleError
from autoshard.problem import ShardingProblem, TrainingConfig
from autoshard.shards import ShardingType, ShardSlice, fixed_rank_bytes, shard_load
from autoshard.splitting import default_slices, describe_bytes_by_rank, free_capacity_bytes
from autoshard.tables import Table
from autoshard.topology import GIB, Topology


def table(name: str = "t", rows: int = 10_000, dim: int = 64) -> Table:
    return Table(name=name, num_embeddings=rows, embedding_dim=dim, pooling_factor=1.0)


def problem_of(tables: list[Table], rooms: list[int], reserved_bytes: int = 0) -> ShardingProblem:
    """Ranks that have `rooms` bytes for shards."""
    training = TrainingConfig(batch_size=1)
    roomless = ShardingProblem(
        tables=tuple(tables), topology=Topology.uniform(1, 0), training=training
    )
    fixed = sum(fixed_rank_bytes(roomless).values()) + reserved_bytes
    topology = Topology(
        world_size=len(rooms),
        hbm_bytes=tuple(room + fixed for room in rooms),
        reserved_bytes=reserved_bytes,
    )
    return ShardingProblem(tables=tuple(tables), topology=topology, training=training)


def need(slice_: ShardSlice, world_size: int) -> int:
    return shard_load(slice_, TrainingConfig(batch_size=1), world_size).memory_bytes


def spans(slices: tuple[ShardSlice, ...]) -> list[tuple[int, int, int, int]]:
    return [(s.row_offset, s.num_rows, s.col_offset, s.num_cols) for s in slices]


def test_room_is_memory_less_reserve_and_fixed_bytes() -> None:
    problem = problem_of([table()], [100, 0], reserved_bytes=12345)
    assert free_capacity_bytes(problem) == [100, 0]


def test_a_table_that_just_fits_stays_whole_and_one_byte_less_splits_columns() -> None:
    whole = need(ShardSlice.whole(table()), 4)
    (kept,) = default_slices(problem_of([table()], [whole, 0, 0, 0]))
    assert kept == ShardSlice.whole(table())
    halves = default_slices(problem_of([table()], [whole - 1] * 4))
    assert spans(halves) == [(0, 10_000, 0, 32), (0, 10_000, 32, 32)]
    assert {s.sharding_type for s in halves} == {ShardingType.COLUMN_WISE}


def test_columns_are_cut_into_the_fewest_parts_that_fit() -> None:
    third = need(ShardSlice(table(), ShardingType.COLUMN_WISE, 0, 0, 10_000, 24), 8)
    parts = default_slices(problem_of([table()], [third] * 8))
    # 16 vectors in 3 parts: 5, 5 and 6 of them.
    assert spans(parts) == [(0, 10_000, 0, 20), (0, 10_000, 20, 20), (0, 10_000, 40, 24)]
    assert len(default_slices(problem_of([table()], [third - 1] * 8))) == 4


def test_a_remainder_below_a_vector_stays_with_the_last_part() -> None:
    odd = table(dim=11)
    whole = need(ShardSlice.whole(odd), 2)
    parts = default_slices(problem_of([odd], [whole - 1] * 2))
    assert spans(parts) == [(0, 10_000, 0, 4), (0, 10_000, 4, 7)]


@pytest.mark.parametrize("dim", [1, 4, 7])
def test_a_table_of_one_vector_is_cut_into_rows(dim: int) -> None:
    narrow = table(dim=dim, rows=10_001)
    whole = need(ShardSlice.whole(narrow), 3)
    parts = default_slices(problem_of([narrow], [whole - 1] * 3))
    assert spans(parts) == [(0, 5_000, 0, dim), (5_000, 5_001, 0, dim)]
    assert {s.sharding_type for s in parts} == {ShardingType.ROW_WISE}


def test_rows_are_cut_where_no_number_of_column_parts_fits() -> None:
    # Row-wise Adagrad's state stays with every column shard: rows are smaller in the end.
    deep = table(dim=8, rows=1_000_000)
    quarter = need(ShardSlice(deep, ShardingType.ROW_WISE, 0, 0, 250_000, 8), 4)
    parts = default_slices(problem_of([deep], [quarter] * 4))
    assert [s.num_rows for s in parts] == [250_000] * 4


def test_each_part_needs_a_rank_of_its_own() -> None:
    whole = need(ShardSlice.whole(table()), 2)
    with pytest.raises(InfeasibleError, match=r"'?t'? \("):
        default_slices(problem_of([table()], [whole - 1, 10]))


def test_uneven_ranks_hold_what_fits_them() -> None:
    whole = need(ShardSlice.whole(table()), 3)
    assert len(default_slices(problem_of([table()], [10, whole, 10]))) == 1
    half = need(ShardSlice(table(), ShardingType.COLUMN_WISE, 0, 0, 10_000, 32), 3)
    assert len(default_slices(problem_of([table()], [half, 10, half]))) == 2
    # The larger part of 16 vectors in 3 goes to the roomier rank.
    large = need(ShardSlice(table(), ShardingType.COLUMN_WISE, 0, 0, 10_000, 24), 3)
    small = need(ShardSlice(table(), ShardingType.COLUMN_WISE, 0, 0, 10_000, 20), 3)
    assert len(default_slices(problem_of([table()], [small, large, small]))) == 3


@pytest.mark.parametrize(("rows", "dim", "num_ranks"), [(7, 3, 5), (1000, 30, 7), (12_345, 128, 9)])
def test_parts_tile_the_table(rows: int, dim: int, num_ranks: int) -> None:
    odd = table(rows=rows, dim=dim)
    whole = need(ShardSlice.whole(odd), num_ranks)
    seen = set()
    for share in range(1, 40):
        try:
            parts = default_slices(problem_of([odd], [whole * share // 40] * num_ranks))
        except InfeasibleError:
            continue
        seen.add(len(parts))
        assert sum(p.num_rows * p.num_cols for p in parts) == rows * dim
        for one, other in itertools.pairwise(parts):
            by_rows = one.row_offset + one.num_rows == other.row_offset
            by_cols = one.col_offset + one.num_cols == other.col_offset
            assert by_rows != by_cols
    assert len(seen) > 1


def test_all_failing_tables_are_named_with_their_bytes() -> None:
    tables = [table("fits", rows=1), *(table(f"big{i}", rows=10**9 + i) for i in range(10))]
    with pytest.raises(InfeasibleError) as caught:
        default_slices(problem_of(tables, [need(ShardSlice.whole(tables[0]), 2)] * 2))
    message = str(caught.value)
    assert "10 table(s)" in message
    assert all(f"big{i} (242." in message for i in range(8))  # 10^9 × (64·4 + 4) / 2^30 GiB
    assert "and 2 more" in message
    assert "fits" not in message.split("remedy")[0].replace("fit, whole", "")
    assert caught.value.remedy is not None


def test_thousands_of_ranks_are_refused_without_trying_every_part_of_every_cut() -> None:
    tables = [table(f"t{index}", rows=10**12, dim=2**20) for index in range(3)]
    with pytest.raises(InfeasibleError, match=r"3 table\(s\) do not fit"):
        default_slices(problem_of(tables, [GIB] * 4096))


def test_no_room_even_for_what_every_rank_needs() -> None:
    problem = ShardingProblem(
        tables=(table(),),
        topology=Topology.uniform(2, GIB),
        training=TrainingConfig(batch_size=1, dense_bytes=2 * GIB),
    )
    with pytest.raises(InfeasibleError, match=r"no rank has room.*1\.000 GiB.*dense 2\.000 GiB"):
        default_slices(problem)


def test_equal_neighbours_are_described_together() -> None:
    text = describe_bytes_by_rank([GIB, GIB, 2 * GIB, GIB])
    assert text == "ranks 0-1: 1.000 GiB each, rank 2: 2.000 GiB, rank 3: 1.000 GiB"
    assert describe_bytes_by_rank([GIB * (i % 2) for i in range(40)]).endswith(", …")
