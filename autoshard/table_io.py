"""Reads and writes table lists: the start of every flow.

A table list is CSV, JSON or Parquet, chosen by the suffix, with the columns of
`table_cells.COLUMNS`. JSON is a list of objects, or an object whose "tables" is one.
Every fault is one `InputError` that names the file, the row as a person counts it (line
of a CSV file with the header as line 1, index in a JSON list from 0, row of a Parquet
file from 1) and the column.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from autoshard.errors import InputError, UnsupportedError, quoted
from autoshard.files import parse_json, read_text, write_atomically, write_text
from autoshard.table_cells import (
    COLUMNS,
    LIST_SEPARATOR,
    REQUIRED_COLUMNS,
    CellError,
    check_columns,
    check_name,
    parse_table,
)
from autoshard.tables import Table, check_tables

SUFFIXES = (".csv", ".json", ".parquet")
#: A raw record: where it stands, and its cells by column.
Record = tuple[str, dict[str, Any]]


def read_tables(path: str | Path) -> tuple[Table, ...]:
    """Read a table list.

    Args:
        path: a file that ends in .csv, .json or .parquet.

    Returns:
        The tables in file order, at least one.

    Raises:
        InputError: the file cannot be read, or something in it is wrong.
    """
    path = Path(path)
    suffix = _suffix(path)
    if path.is_dir():
        raise InputError(f"table list {path} is a folder", allowed="a file")
    reader = {".csv": _read_csv, ".json": _read_json, ".parquet": _read_parquet}[suffix]
    tables: list[Table] = []
    position_of: dict[str, str] = {}
    for position, record in reader(path):
        table = parse_table(record, f"{path}, {position}")
        if table.name in position_of:
            raise InputError(
                f"{path}, {position}, column 'name': duplicate table name {table.name!r}, "
                f"first used in {position_of[table.name]}",
                remedy="give each table its own name",
            )
        position_of[table.name] = position
        tables.append(table)
    if not tables:
        raise InputError(f"{path} lists no tables", remedy="give at least one table")
    return tuple(tables)


def write_tables(path: str | Path, tables: Iterable[Table]) -> None:
    """Write a table list that `read_tables` reads back as equal tables.

    Args:
        path: a file that ends in .csv, .json or .parquet; replaced atomically.
        tables: at least one.

    Raises:
        InputError: a wrong suffix, no tables, or a name that cannot be written.
        UnsupportedError: a feature name with a `|` in CSV.
    """
    path = Path(path)
    suffix = _suffix(path)
    tables = check_tables(tables)
    for table in tables:
        for name in (table.name, *table.feature_names):
            try:
                check_name(name)
            except CellError as error:
                raise InputError(
                    f"table {table.name!r}: {error.what}", got=error.got, allowed=error.allowed
                ) from error
    records = [_record(table) for table in tables]
    if suffix == ".csv":
        write_text(path, _csv_text(records))
    elif suffix == ".json":
        write_text(path, json.dumps(records, indent=2, ensure_ascii=False) + "\n")
    else:
        write_atomically(path, lambda temporary: _write_parquet(temporary, records))


def _suffix(path: Path) -> str:
    suffix = path.suffix.lower()
    if suffix not in SUFFIXES:
        raise InputError(
            f"the kind of table list {path} is not known",
            got=f"suffix {path.suffix!r}",
            allowed=", ".join(SUFFIXES),
            remedy="rename or convert the file",
        )
    return suffix


def _read_csv(path: Path) -> Iterable[Record]:
    text = read_text(path, "table list").removeprefix("\ufeff")
    if "\0" in text:
        raise InputError(f"table list {path} is not a text file", got="a zero byte")
    reader = csv.reader(io.StringIO(text), strict=True)
    columns: list[str] | None = None
    while True:
        line = reader.line_num + 1
        try:
            cells = next(reader)
        except StopIteration:
            break
        except csv.Error as error:
            raise InputError(f"{path}, line {line}: not CSV", got=str(error)) from error
        if not any(cell.strip() for cell in cells) and len(cells) < 2:
            continue  # an empty line
        if columns is None:
            columns = [cell.strip() for cell in cells]
            check_columns(columns, f"{path}, line {line}")
            continue
        if len(cells) != len(columns):
            raise InputError(
                f"{path}, line {line}: the row has {len(cells)} cells, "
                f"the header has {len(columns)}",
                remedy="put names that hold a comma in double quotes",
            )
        yield f"line {line}", dict(zip(columns, cells, strict=True))
    if columns is None:
        raise InputError(
            f"table list {path} is empty", remedy=f"begin with {','.join(REQUIRED_COLUMNS)}"
        )


def _read_json(path: Path) -> Iterable[Record]:
    text = read_text(path, "table list").removeprefix("\ufeff")
    if not text.strip():
        raise InputError(f"table list {path} is empty", allowed="a JSON list of objects")
    # Pairs rather than a dict, so that a key given twice is seen.
    value = parse_json(text, path, "table list", object_pairs_hook=_Pairs)
    if isinstance(value, _Pairs):
        keys = [key for key, _ in value]
        if "version" in keys:
            raise InputError(f"{path} is a plan, not a table list", remedy="give a table list")
        if keys != ["tables"]:
            raise InputError(
                f"table list {path} is not usable",
                got=f"an object with {', '.join(keys) or 'no keys'}",
                allowed='a list of objects, or {"tables": [...]}',
            )
        value = value[0][1]
    if not isinstance(value, list) or isinstance(value, _Pairs):
        raise InputError(
            f"table list {path} is not usable",
            got=quoted(value),
            allowed='a list of objects, or {"tables": [...]}',
        )
    for index, pairs in enumerate(value):
        if not isinstance(pairs, _Pairs):
            raise InputError(
                f"{path}, index {index}: not an object",
                got=quoted(pairs),
                allowed=f"an object with {', '.join(REQUIRED_COLUMNS)}",
            )
        check_columns([key for key, _ in pairs], f"{path}, index {index}")
        yield f"index {index}", dict(pairs)


class _Pairs(list[tuple[str, Any]]):
    """A JSON object as its key-value pairs, in order."""


def _read_parquet(path: Path) -> Iterable[Record]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if not path.exists():
        raise InputError(f"table list {path} does not exist", remedy="check the path")
    try:
        with pq.ParquetFile(path) as file:
            check_columns(file.schema_arrow.names, f"{path}")
            content = file.read()
    except (pa.ArrowException, OSError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"table list {path} is not a Parquet file", got=str(error)) from error
    cells = {name: content.column(name).to_pylist() for name in content.column_names}
    for row in range(content.num_rows):
        yield f"row {row + 1}", {name: column[row] for name, column in cells.items()}


def _record(table: Table) -> dict[str, Any]:
    """The cells of a table, without those at their defaults."""
    record: dict[str, Any] = {
        "name": table.name,
        "num_embeddings": table.num_embeddings,
        "embedding_dim": table.embedding_dim,
        "pooling_factor": float(table.pooling_factor),
    }
    default = Table(name=table.name, num_embeddings=1, embedding_dim=1, pooling_factor=0)
    if table.feature_names != default.feature_names:
        record["feature_names"] = list(table.feature_names)
    for column in ("data_type", "pooling", "bag_lengths"):
        if getattr(table, column) is not getattr(default, column):
            record[column] = getattr(table, column).value
    if table.weighted:
        record["weighted"] = True
    if table.ids != default.ids:
        record.update(table.ids.to_json())
    return record


def _csv_text(records: list[dict[str, Any]]) -> str:
    columns = [column for column in COLUMNS if any(column in record for record in records)]
    stream = io.StringIO()
    writer = csv.writer(stream, lineterminator="\n")
    writer.writerow(columns)
    for record in records:
        for feature in record.get("feature_names", ()):
            if LIST_SEPARATOR in feature:
                raise UnsupportedError(
                    f"feature {feature!r} cannot be written as CSV",
                    got=f"a name with {LIST_SEPARATOR!r}, which separates names",
                    remedy="write .json or .parquet",
                )
        writer.writerow([_csv_cell(record.get(column)) for column in columns])
    return stream.getvalue()


def _csv_cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, list):
        return LIST_SEPARATOR.join(_csv_cell(item) for item in value)
    return str(value)


def _write_parquet(path: Path, records: list[dict[str, Any]]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    text, count, number = pa.string(), pa.int64(), pa.float64()
    types = {
        **dict.fromkeys(("name", "data_type", "pooling", "bag_lengths"), text),
        **dict.fromkeys(("num_embeddings", "embedding_dim"), count),
        **dict.fromkeys(("pooling_factor", "zipf_exponent", "zipf_shift"), number),
        "weighted": pa.bool_(),
        "feature_names": pa.list_(text),
        "bucket_rows": pa.list_(count),
        "bucket_shares": pa.list_(number),
    }
    schema = pa.schema([(column, types[column]) for column in COLUMNS])
    pq.write_table(pa.Table.from_pylist(records, schema=schema), path)
