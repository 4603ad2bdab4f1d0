"""Traces: measured by hand, in any piece size, with every bad id named by feature and row."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from autoshard.distributions import IdDistribution
from autoshard.errors import InputError
from autoshard.tables import BagLengths, Table
from autoshard.workloads import reuse_counts, traces
from autoshard.workloads.registry import make_workload
from autoshard.workloads.reuse_counts import IdCounter
from autoshard.workloads.traces import trace_tables


def write(tmp_path, columns, **options):
    path = tmp_path / "trace.parquet"
    pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path, **options)
    return path


HISTORY = [[3, 3, 3, 9], None, [], [0, 3]]
COLUMNS = {"history": pa.array(HISTORY), "user": pa.array([5, None, 5, 6])}


@pytest.mark.parametrize("batch_rows", [1, 3, 65_536])
@pytest.mark.parametrize("row_group_size", [1, 100])
@pytest.mark.parametrize(
    "kind", [pa.list_(pa.int64()), pa.large_list(pa.int32()), pa.list_(pa.uint64())]
)
def test_hand_made_trace(tmp_path, monkeypatch, batch_rows, row_group_size, kind):
    monkeypatch.setattr(traces, "BATCH_ROWS", batch_rows)
    columns = {**COLUMNS, "history": pa.array(HISTORY, type=kind)}
    path = write(tmp_path, columns, row_group_size=row_group_size)
    history, user = trace_tables(path, embedding_dims=16)
    # Row 3 occurs 4 times; rows 0 and 9 once.
    assert history == Table(
        name="history",
        num_embeddings=10,
        embedding_dim=16,
        pooling_factor=1.5,
        ids=IdDistribution(bucket_rows=(1, 2), bucket_shares=(4 / 6, 2 / 6)),
        bag_lengths=BagLengths.POISSON,
    )
    assert user == Table(
        name="user",
        num_embeddings=7,
        embedding_dim=16,
        pooling_factor=0.75,
        ids=IdDistribution(bucket_rows=(1, 1), bucket_shares=(2 / 3, 1 / 3)),
    )


def test_known_tables_keep_what_is_not_measured(tmp_path):
    path = write(tmp_path, {**COLUMNS, "label": [0.0, 1.0, 0.0, 1.0]})
    shared = Table(
        name="items",
        num_embeddings=1000,
        embedding_dim=8,
        pooling_factor=0,
        feature_names=("history", "user"),
        weighted=True,
    )
    (measured,) = trace_tables(path, tables=[shared])
    assert measured.num_embeddings == 1000
    assert measured.weighted
    assert measured.feature_names == ("history", "user")
    # 6 + 3 ids over 4 samples and 2 features; 3 occurs 4 times, 5 twice, 0, 6 and 9 once.
    assert measured.pooling_factor == 9 / 8
    assert measured.ids.bucket_rows == (1, 1, 3)
    assert measured.ids.bucket_shares == pytest.approx((4 / 9, 2 / 9, 3 / 9))


def test_feature_choice_and_dims_by_name(tmp_path):
    path = write(tmp_path, {**COLUMNS, "label": [0.0, 1.0, 0.0, 1.0]})
    (user,) = trace_tables(path, features=["user"], embedding_dims={"user": 4})
    assert (user.name, user.embedding_dim) == ("user", 4)
    assert make_workload("trace", path=path, features=["user"], embedding_dims=4) == (user,)


def test_empty_bags_only(tmp_path):
    path = write(tmp_path, {"x": pa.array([None, []], type=pa.list_(pa.int64()))})
    (table,) = trace_tables(path, embedding_dims=4)
    assert (table.num_embeddings, table.pooling_factor, table.ids) == (1, 0.0, IdDistribution())


def test_fixed_size_lists(tmp_path):
    kind = pa.list_(pa.int64(), 2)
    path = write(tmp_path, {"x": pa.array([[1, 2], None, [2, 2]], type=kind)})
    (table,) = trace_tables(path, embedding_dims=4)
    assert table.pooling_factor == 4 / 3
    assert table.ids.bucket_rows == (1, 1)


@pytest.mark.parametrize("batch_rows", [1, 65_536])
@pytest.mark.parametrize(
    ("bags", "words"),
    [
        (pa.array([[1], [], [2, -3]]), "feature 'x', row 3: an id is out of range; got: -3"),
        (pa.array([[1], None, [2, None]]), "feature 'x', row 3: a null among the ids"),
        (
            pa.array([[1], [7], [50, 2]]),
            "table 't', feature 'x', row 3: an id is out of range; got: 50",
        ),
        (pa.array([[1], [2**64 - 1]], type=pa.list_(pa.uint64())), "feature 'x', row 2"),
        (pa.array([[1.0]]), "a column of list<"),
        (pa.array(["1"]), "a column of string"),
        (pa.array([[[1]]]), "does not hold ids"),
    ],
)
def test_bad_ids_are_named(tmp_path, monkeypatch, bags, words, batch_rows):
    monkeypatch.setattr(traces, "BATCH_ROWS", batch_rows)
    known = Table(
        name="t", num_embeddings=50, embedding_dim=4, pooling_factor=0, feature_names=("x",)
    )
    with pytest.raises(InputError, match=r"trace\.parquet") as caught:
        trace_tables(write(tmp_path, {"x": bags}), tables=[known])
    assert words in str(caught.value)


def test_huge_ids_need_hashing(tmp_path):
    path = write(tmp_path, {"x": pa.array([[1], [2**62]])})
    with pytest.raises(InputError, match="hash the ids"):
        trace_tables(path, embedding_dims=4)
    (table,) = trace_tables(write(tmp_path, {"x": pa.array([[2**62 - 1]])}), embedding_dims=4)
    assert table.num_embeddings == 2**62


def test_bad_options(tmp_path):
    path = write(tmp_path, COLUMNS)
    known = Table(name="t", num_embeddings=5, embedding_dim=4, pooling_factor=0)
    for options, words in (
        ({}, "says nothing about dimensions"),
        ({"embedding_dims": {"user": 4}}, "lacks features; got: history"),
        ({"embedding_dims": 0}, "embedding_dim is out of range"),
        ({"embedding_dims": 4, "features": ["usr"]}, "did you mean 'user'?"),
        ({"embedding_dims": 4, "features": ["user", "user"]}, "duplicate"),
        ({"embedding_dims": 4, "features": []}, "empty"),
        ({"tables": [known]}, "table 't': feature 't' is no column"),
        ({"tables": [known], "embedding_dims": 4}, "leave out"),
    ):
        with pytest.raises(InputError) as caught:
            trace_tables(path, **options)
        assert words in str(caught.value)


def test_bad_files(tmp_path):
    with pytest.raises(InputError, match="does not exist"):
        trace_tables(tmp_path / "none.parquet", embedding_dims=4)
    with pytest.raises(InputError, match="is a folder"):
        trace_tables(tmp_path, embedding_dims=4)
    (tmp_path / "x.parquet").write_text("no")
    with pytest.raises(InputError, match="not a Parquet file"):
        trace_tables(tmp_path / "x.parquet", embedding_dims=4)
    with pytest.raises(InputError, match="holds no samples"):
        trace_tables(write(tmp_path, pa.table(COLUMNS).slice(0, 0)), embedding_dims=4)


@given(pieces=st.lists(st.lists(st.integers(0, 2**62)) | st.lists(st.integers(0, 5))))
def test_counter_counts(pieces):
    original, reuse_counts._MIN_MERGE_SIZE = reuse_counts._MIN_MERGE_SIZE, 3
    try:
        counter = IdCounter()
        for piece in pieces:
            counter.add(np.array(piece, dtype=np.int64))
        ids, counts = counter.result()
    finally:
        reuse_counts._MIN_MERGE_SIZE = original
    expected: dict[int, int] = {}
    for piece in pieces:
        for value in piece:
            expected[value] = expected.get(value, 0) + 1
    assert dict(zip(ids.tolist(), counts.tolist(), strict=True)) == expected
    assert ids.tolist() == sorted(expected)
