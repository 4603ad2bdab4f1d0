"""Table lists: every fault is one error with file, row and column; files read back equal."""

from __future__ import annotations

import json
import os

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from autoshard.distributions import IdDistribution
from autoshard.errors import InputError, UnsupportedError
from autoshard.table_io import SUFFIXES, read_tables, write_tables
from autoshard.tables import BagLengths, DataType, PoolingType, Table

HEADER = "name,num_embeddings,embedding_dim,pooling_factor"


def read_csv(tmp_path, text: str | bytes) -> tuple[Table, ...]:
    path = tmp_path / "tables.csv"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return read_tables(path)


def csv_error(tmp_path, text: str | bytes) -> str:
    with pytest.raises(InputError) as caught:
        read_csv(tmp_path, text)
    message = str(caught.value)
    assert "tables.csv" in message
    assert "\n" not in message
    return message


def test_minimal_csv(tmp_path):
    tables = read_csv(tmp_path, f"{HEADER}\na,206000000,64,1.5\nb,1,1,0\n")
    assert tables == (
        Table(name="a", num_embeddings=206_000_000, embedding_dim=64, pooling_factor=1.5),
        Table(name="b", num_embeddings=1, embedding_dim=1, pooling_factor=0.0),
    )


def test_all_csv_columns(tmp_path):
    (law, measured) = read_csv(
        tmp_path,
        f"{HEADER},feature_names,data_type,pooling,weighted,zipf_exponent,zipf_shift,"
        "bucket_rows,bucket_shares,bag_lengths\n"
        "a,10,4,2,x|y,fp16,mean,true,1.1,3,,,poisson\n"
        "b,10,4,2,,,,,,,1|9,0.25|0.75,\n",
    )
    assert law == Table(
        name="a",
        num_embeddings=10,
        embedding_dim=4,
        pooling_factor=2.0,
        feature_names=("x", "y"),
        data_type=DataType.FP16,
        pooling=PoolingType.MEAN,
        weighted=True,
        ids=IdDistribution(zipf_exponent=1.1, zipf_shift=3.0),
        bag_lengths=BagLengths.POISSON,
    )
    assert measured.ids == IdDistribution(bucket_rows=(1, 9), bucket_shares=(0.25, 0.75))
    assert measured.feature_names == ("b",)


@pytest.mark.parametrize(
    "text",
    [
        f"\ufeff{HEADER}\na,5,4,1\n",
        f"{HEADER}\r\na,5,4,1\r\n",
        f"\n{HEADER}\n\na,5,4,1\n\n\n",
        " name , num_embeddings,embedding_dim ,pooling_factor\na, 5 ,4 , 1\n",
        '"name","num_embeddings","embedding_dim","pooling_factor"\n"a","5","4","1"',
    ],
    ids=["bom", "crlf", "empty lines", "spaces", "quotes"],
)
def test_csv_dialects(tmp_path, text):
    assert read_csv(tmp_path, text) == (
        Table(name="a", num_embeddings=5, embedding_dim=4, pooling_factor=1.0),
    )


def test_quoted_name_with_comma_and_quote(tmp_path):
    (table,) = read_csv(tmp_path, f'{HEADER}\n"user, ""new""",5,4,1\n')
    assert table.name == 'user, "new"'


@pytest.mark.parametrize("count", [2**53 + 1, 2**61 + 7])
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_counts_above_double_precision_keep_every_digit(tmp_path, count, suffix):
    path = tmp_path / f"t{suffix}"
    write_tables(path, [Table(name="a", num_embeddings=count, embedding_dim=4, pooling_factor=1)])
    assert read_tables(path)[0].num_embeddings == count


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("", "blank"),
        ("  ", "blank"),
        ("nan", "not a number"),
        ("inf", "not a number"),
        ("-5", "negative"),
        ("0", "out of range"),
        ("1.5", "whole number"),
        ("1e6", "write 1000000"),
        ("1000000.0", "write 1000000"),
        ("1_000", "not a number"),
        ("many", "not a number"),
        ("٣", "not a number"),
        ("9" * 30, "out of range"),
        ("9" * 5000, "out of range"),
        (str(2**62 + 1), "out of range"),
    ],
)
def test_bad_counts_name_line_and_column(tmp_path, cell, words):
    message = csv_error(tmp_path, f"{HEADER}\nok,5,4,1\nbad,{cell},4,1\n")
    assert "line 3, column 'num_embeddings'" in message
    assert words in message
    assert len(message) < 400


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("nan", "not finite"),
        ("-inf", "not finite"),
        ("1e400", "not finite"),
        ("-1", "negative"),
        ("", "blank"),
        ("x", "not a number"),
        ("1_0", "not a number"),
        ("١.٥", "not a number"),
        ("１", "not a number"),
    ],
)
def test_bad_pooling_factors(tmp_path, cell, words):
    message = csv_error(tmp_path, f"{HEADER}\nbad,5,4,{cell}\n")
    assert "line 2, column 'pooling_factor'" in message
    assert words in message


@pytest.mark.parametrize(
    ("columns", "cells", "words"),
    [
        ("data_type", "fp23", "column 'data_type': unknown value; got: 'fp23'"),
        ("data_type", "fp23", "did you mean 'fp32'?"),
        ("pooling", "max", "allowed: sum, mean"),
        ("weighted", "yes", "true or false"),
        ("weighted", "1", "true or false"),
        ("feature_names", "x||y", "item 2 of the list is blank"),
        ("feature_names", "x|x", "column 'feature_names': feature 'x' is named twice"),
        ("bucket_rows,bucket_shares", "1|2,0.5", "column 'bucket_rows'"),
        ("bucket_rows,bucket_shares", "1|2,0.5|0.4", "column 'bucket_shares'"),
        ("bucket_rows,bucket_shares", "1|2.5,0.5|0.5", "column 'bucket_rows': not a whole"),
        ("bucket_rows", "1", "differ in length"),
        ("zipf_exponent,bucket_rows,bucket_shares", "1,5,1", "either the zipf_ columns"),
        ("zipf_exponent", "-1", "column 'zipf_exponent': negative"),
        ("bag_lengths", "fixed", "constant, poisson"),
    ],
)
def test_bad_optional_cells(tmp_path, columns, cells, words):
    message = csv_error(tmp_path, f"{HEADER},{columns}\na,5,4,1,{cells}\n")
    assert "line 2" in message
    assert words in message


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is empty"),
        ("\n \n", "is empty"),
        (f"{HEADER}\n", "lists no tables"),
        ("name,num_embeddings,embedding_dim\n", "missing column 'pooling_factor'"),
        (f"{HEADER},pooling_facto\n", "did you mean 'pooling_factor'?"),
        (f"{HEADER},colour\n", "unknown column 'colour'"),
        (f"{HEADER},\n", "name column 5, or remove it"),
        (f"{HEADER},name\n", "column 'name' occurs twice"),
        (HEADER.replace(",", ";") + "\n", "separate the columns with commas"),
        (f"{HEADER}\na,1,1\n", "line 2: the row has 3 cells, the header has 4"),
        (f"{HEADER}\na,1,1,1,1\n", "line 2: the row has 5 cells, the header has 4"),
        (f'{HEADER}\n"a,1,1,1\n', "line 2: not CSV"),
        (f"{HEADER}\na,1,1,1\nb,1,1,1\na,2,2,2\n", "line 4, column 'name': duplicate"),
        (f"{HEADER}\na,1,1,1\nb,1,1,1\na,2,2,2\n", "first used in line 2"),
        (f'{HEADER}\n"a\nb",1,1,1\n', "invisible characters (U+000A)"),
        (f"{HEADER}\n,1,1,1\n", "line 2, column 'name': the cell is blank"),
        (f"{HEADER}\n{'n' * 300},1,1,1\n", "300 characters"),
        (b"\x89PNG\r\n\x1a\n\xff\xfe", "not a text file"),
        (b"a\0b", "not a text file"),
    ],
)
def test_bad_csv_files(tmp_path, text, words):
    assert words in csv_error(tmp_path, text)


def test_line_numbers_count_quoted_line_breaks(tmp_path):
    message = csv_error(tmp_path, f'{HEADER}\n"a\r\nb",1,1,1\n')
    assert "line 2" in message
    path_text = f'{HEADER}\nok,"1\n",1,1\nbad,x,1,1\n'
    assert "line 4, column 'num_embeddings'" in csv_error(tmp_path, path_text)


def write_json(tmp_path, value) -> str:
    path = tmp_path / "tables.json"
    path.write_text(value if isinstance(value, str) else json.dumps(value))
    return path


GOOD = {"name": "a", "num_embeddings": 5, "embedding_dim": 4, "pooling_factor": 1}


def test_json_forms(tmp_path):
    expected = (Table(name="a", num_embeddings=5, embedding_dim=4, pooling_factor=1.0),)
    assert read_tables(write_json(tmp_path, [GOOD])) == expected
    assert read_tables(write_json(tmp_path, {"tables": [GOOD]})) == expected
    assert read_tables(write_json(tmp_path, "\ufeff" + json.dumps([GOOD]))) == expected


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("", "is empty"),
        ("{", "is not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[]", "lists no tables"),
        ("3", "allowed: a list of objects"),
        ({"table": []}, "an object with table"),
        ({"tables": {"a": 1}}, "allowed: a list of objects"),
        ({"version": 1, "tables": []}, "is a plan"),
        ([GOOD, 3], "index 1: not an object"),
        ([{**GOOD, "num_embeddings": 1.0}], "index 0, column 'num_embeddings'"),
        ([{**GOOD, "num_embeddings": True}], "not a number"),
        ([{**GOOD, "num_embeddings": [1]}], "not a number"),
        ([{**GOOD, "num_embeddings": None}], "blank"),
        ([{**GOOD, "name": 3}], "column 'name': not text"),
        ([{**GOOD, "pooling_factor": float("nan")}], "not finite"),
        ([{**GOOD, "pooling_factor": 10**400}], "not finite"),
        ([{**GOOD, "feature_names": 3}], "not a list"),
        ([{**GOOD, "feature_names": {"x": 1}}], "not text"),
        ([{**GOOD, "data_type": {"x": 1}}], "unknown value"),
        ([{**GOOD, "poling": "sum"}], "did you mean 'pooling'?"),
        ([GOOD, GOOD], "index 1, column 'name': duplicate table name 'a', first used in index 0"),
        ('[{"name": "a", "name": "b"}]', "column 'name' occurs twice"),
        ('[{"name": "a", "num_embeddings": ' + "9" * 5000 + "}]", "is not usable"),
    ],
)
def test_bad_json(tmp_path, value, words):
    with pytest.raises(InputError, match=r"tables\.json") as caught:
        read_tables(write_json(tmp_path, value))
    assert words in str(caught.value)


def test_bad_parquet(tmp_path):
    path = tmp_path / "tables.parquet"

    def error(columns) -> str:
        pq.write_table(columns if isinstance(columns, pa.Table) else pa.table(columns), path)
        with pytest.raises(InputError, match=r"tables\.parquet") as caught:
            read_tables(path)
        return str(caught.value)

    good = {"name": ["a", "b"], "num_embeddings": [5, 6], "embedding_dim": [4, 4]}
    assert "missing column 'pooling_factor'" in error(good)
    good["pooling_factor"] = [1.0, 2.0]
    assert "row 1, column 'num_embeddings': not a whole number" in error(
        {**good, "num_embeddings": [5.0, 6.0]}
    )
    assert "row 2, column 'num_embeddings': the cell is blank" in error(
        {**good, "num_embeddings": pa.array([5, None])}
    )
    assert "row 2, column 'name': duplicate" in error({**good, "name": ["a", "a"]})
    assert "row 1, column 'name': not text" in error({**good, "name": [b"a", b"b"]})
    assert "row 2, column 'pooling_factor': not finite" in error(
        {**good, "pooling_factor": [1.0, float("nan")]}
    )
    assert "out of range" in error(
        {**good, "num_embeddings": pa.array([2**63, 1], type=pa.uint64())}
    )
    assert "lists no tables" in error(pa.table(good).slice(0, 0))
    names = [*pa.table(good).column_names, "name"]
    doubled = pa.table([*pa.table(good).columns, pa.array(["a", "b"])], names=names)
    assert "occurs twice" in error(doubled)
    frame = pd.DataFrame(good, index=[3, 7])
    frame.to_parquet(path)
    with pytest.raises(InputError, match="index=False"):
        read_tables(path)
    path.write_text("not parquet")
    with pytest.raises(InputError, match="not a Parquet file"):
        read_tables(path)


def test_pandas_parquet_is_read(tmp_path):
    frame = pd.DataFrame([GOOD]).astype({"name": "category"})
    frame.to_parquet(tmp_path / "t.parquet", index=False)
    assert read_tables(tmp_path / "t.parquet")[0].num_embeddings == 5


def test_bad_paths(tmp_path):
    for name in ("tables.txt", "tables", "tables.csv.gz"):
        with pytest.raises(InputError, match="is not known"):
            read_tables(tmp_path / name)
        with pytest.raises(InputError, match="is not known"):
            write_tables(tmp_path / name, [])
    for suffix in SUFFIXES:
        with pytest.raises(InputError, match="does not exist"):
            read_tables(tmp_path / f"missing{suffix}")
        folder = tmp_path / f"folder{suffix}"
        folder.mkdir()
        with pytest.raises(InputError, match="is a folder"):
            read_tables(folder)


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads every file")
@pytest.mark.parametrize("suffix", SUFFIXES)
def test_unreadable(tmp_path, suffix):
    path = tmp_path / f"t{suffix}"
    path.write_text("x")
    path.chmod(0)
    with pytest.raises(InputError, match="Permission denied"):
        read_tables(path)


def test_write_refuses_what_it_cannot_hold(tmp_path):
    good = Table(name="a", num_embeddings=1, embedding_dim=1, pooling_factor=1)
    with pytest.raises(InputError, match="empty"):
        write_tables(tmp_path / "t.csv", [])
    with pytest.raises(InputError, match="duplicate"):
        write_tables(tmp_path / "t.csv", [good, good])
    piped = Table(
        name="a", num_embeddings=1, embedding_dim=1, pooling_factor=1, feature_names=("x|y",)
    )
    with pytest.raises(UnsupportedError, match="parquet"):
        write_tables(tmp_path / "t.csv", [piped])
    # What no file can hold cannot become a table in the first place.
    for name in ("a\nb", "\ud800", "\x1b[31m"):
        with pytest.raises(InputError, match="printable text"):
            Table(name=name, num_embeddings=1, embedding_dim=1, pooling_factor=1)
    assert not list(tmp_path.iterdir())


names = st.text(
    st.characters(exclude_categories=("C", "Zl", "Zp"), exclude_characters="|"),
    min_size=1,
    max_size=20,
).filter(str.strip)
numbers = st.floats(0, 1e12)
laws = st.builds(IdDistribution, zipf_exponent=numbers, zipf_shift=numbers)


@st.composite
def measured(draw):
    rows = draw(st.lists(st.integers(1, 2**40), min_size=1, max_size=5))
    weights = draw(st.lists(st.integers(1, 9), min_size=len(rows), max_size=len(rows)))
    return IdDistribution(
        bucket_rows=tuple(rows), bucket_shares=tuple(w / sum(weights) for w in weights)
    )


tables = st.lists(
    st.builds(
        Table,
        name=names,
        num_embeddings=st.integers(1, 2**62),
        embedding_dim=st.integers(1, 4096),
        pooling_factor=numbers,
        feature_names=st.lists(names, max_size=3, unique=True).map(tuple),
        data_type=st.sampled_from(DataType),
        pooling=st.sampled_from(PoolingType),
        weighted=st.booleans(),
        ids=laws | measured(),
        bag_lengths=st.sampled_from(BagLengths),
    ),
    min_size=1,
    max_size=4,
    unique_by=lambda table: table.name,
).map(tuple)


@pytest.mark.parametrize("suffix", SUFFIXES)
@settings(
    max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(tables=tables)
def test_round_trip(tmp_path, suffix, tables):
    path = tmp_path / f"t{suffix}"
    write_tables(path, tables)
    assert read_tables(path) == tables
