"""Measures tables from a user's own lookups: a Parquet file with one row per sample.

Each feature is one column of id lists (`list<int>`), or of single ids; a null is an
empty bag. The file is read one feature and one piece at a time, so that it may be larger
than memory; what is kept is one count per distinct id of one table.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InputError
from autoshard.suggestions import did_you_mean
from autoshard.tables import MAX_COUNT, BagLengths, Table, check_tables
from autoshard.workloads.registry import register_workload
from autoshard.workloads.reuse_counts import IdCounter, measured_distribution

if TYPE_CHECKING:
    import pyarrow as pa
    import pyarrow.parquet as pq

IntArray = NDArray[np.int64]

#: Samples that are read at once.
BATCH_ROWS = 65_536


@register_workload("trace")
def trace_tables(
    path: str | Path,
    *,
    tables: Sequence[Table] | None = None,
    embedding_dims: int | Mapping[str, int] | None = None,
    features: Sequence[str] | None = None,
) -> tuple[Table, ...]:
    """Measure pooling factors, rows, reuse and bag lengths from a trace.

    Args:
        path: a Parquet file.
        tables: tables whose features are columns of the file; other columns are not
            read. They keep all but what is measured; their rows are known, so larger ids
            are refused. Without it, every feature is a table of its own name with as
            many rows as its largest id + 1.
        embedding_dims: without `tables`, the dimension of all tables or of each by name.
        features: without `tables`, the columns to read; by default all.

    Returns:
        The tables in the given order, or in the order of the columns.

    Raises:
        InputError: the file cannot be read, a column does not hold ids, an id is
            negative, null or too large (with feature and row, the first sample being
            row 1), or the options do not fit.
    """
    path = Path(path)
    with _open(path) as file:
        columns = file.schema_arrow.names
        if tables is not None:
            if embedding_dims is not None or features is not None:
                raise InputError(
                    "tables already say which features and dimensions there are",
                    remedy="leave out embedding_dims and features",
                )
            tables = check_tables(tables)
            for table in tables:
                for feature in table.feature_names:
                    _check_column(path, feature, columns, f"table {table.name!r}: ")
            return tuple(_measure(path, file, table, table.num_embeddings) for table in tables)
        names = columns if features is None else list(features)
        for feature in names:
            _check_column(path, feature, columns, "")
        dims = _dims(names, embedding_dims)
        return check_tables(
            _measure(
                path,
                file,
                Table(name=name, num_embeddings=1, embedding_dim=dims[name], pooling_factor=0.0),
                None,
            )
            for name in names
        )


def _open(path: Path) -> pq.ParquetFile:
    import pyarrow as pa
    import pyarrow.parquet as pq

    if path.is_dir():
        raise InputError(f"trace {path} is a folder", allowed="a Parquet file")
    try:
        file = pq.ParquetFile(path)
    except FileNotFoundError as error:
        raise InputError(f"trace {path} does not exist", remedy="check the path") from error
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"trace {path} is not a Parquet file", got=str(error)) from error
    if not file.metadata.num_rows:
        raise InputError(f"trace {path} holds no samples", remedy="give at least one row")
    return file


def _check_column(path: Path, feature: str, columns: Sequence[str], prefix: str) -> None:
    if (occurrences := list(columns).count(feature)) != 1:
        what = "is no column" if not occurrences else "is more than one column"
        raise InputError(
            f"{prefix}feature {feature!r} {what} of trace {path}",
            allowed=", ".join(columns),
            remedy=did_you_mean(feature, columns) if not occurrences else None,
        )


def _dims(
    names: Sequence[str], embedding_dims: int | Mapping[str, int] | None
) -> Mapping[str, int]:
    if embedding_dims is None:
        raise InputError(
            "a trace says nothing about dimensions",
            remedy="give embedding_dims, or tables that have them",
        )
    if not isinstance(embedding_dims, Mapping):
        return dict.fromkeys(names, embedding_dims)
    if missing := [name for name in names if name not in embedding_dims]:
        raise InputError("embedding_dims lacks features", got=", ".join(missing))
    return embedding_dims


def _measure(path: Path, file: pq.ParquetFile, table: Table, rows: int | None) -> Table:
    """The table as measured; `rows` are known, or found when None."""
    counter = IdCounter()
    shortest, longest, total = MAX_COUNT, 0, 0
    for feature in table.feature_names:
        for first_row, lengths_B, values in _bags(path, file, feature):
            _check_ids(path, table, feature, first_row, lengths_B, values, rows)
            counter.add(values)
            shortest = min(shortest, int(lengths_B.min()))
            longest = max(longest, int(lengths_B.max()))
            total += values.size
    ids, counts = counter.result()
    if rows is None:
        rows = int(ids[-1]) + 1 if ids.size else 1
    return dataclasses.replace(
        table,
        num_embeddings=rows,
        pooling_factor=total / (file.metadata.num_rows * table.num_features),
        ids=measured_distribution(counts),
        bag_lengths=BagLengths.CONSTANT if longest - shortest <= 1 else BagLengths.POISSON,
    )


def _bags(
    path: Path, file: pq.ParquetFile, feature: str
) -> Iterator[tuple[int, IntArray, IntArray]]:
    """Pieces of a column: number of the first row, ids per bag, ids."""
    import pyarrow as pa

    where = f"trace {path}, feature {feature!r}"
    kind = file.schema_arrow.field(feature).type
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    is_list = is_list or pa.types.is_fixed_size_list(kind)
    if not pa.types.is_integer(kind.value_type if is_list else kind):
        raise InputError(
            f"{where} does not hold ids",
            got=f"a column of {kind}",
            allowed="lists of integers, or integers",
            remedy="name the features to read",
        )
    first_row = 1
    try:
        for batch in file.iter_batches(batch_size=BATCH_ROWS, columns=[feature]):
            lengths_B, values = _flatten(batch.column(0), is_list, f"{where}, row", first_row)
            yield first_row, lengths_B, values
            first_row += batch.num_rows
    except (pa.ArrowException, OSError) as error:
        raise InputError(f"{where} cannot be read", got=str(error)) from error


def _flatten(
    bags: pa.Array, is_list: bool, where_row: str, first_row: int
) -> tuple[IntArray, IntArray]:
    import pyarrow as pa
    import pyarrow.compute as pc

    if is_list:
        lengths_B = pc.fill_null(pc.list_value_length(bags), 0).to_numpy(zero_copy_only=False)
        values = bags.flatten()
    else:
        lengths_B = pc.is_valid(bags).to_numpy(zero_copy_only=False)
        values = bags.drop_null()
    lengths_B = lengths_B.astype(np.int64)
    if values.null_count:
        bag = _bag_of(lengths_B, int(np.argmax(values.is_null().to_numpy(zero_copy_only=False))))
        raise InputError(
            f"{where_row} {first_row + bag}: a null among the ids",
            remedy="leave the id out; an empty or null bag is fine",
        )
    if pa.types.is_uint64(values.type):
        unsigned = values.to_numpy(zero_copy_only=False)
        if unsigned.size and unsigned.max() >= 2**63:
            bag = _bag_of(lengths_B, int(unsigned.argmax()))
            raise InputError(
                f"{where_row} {first_row + bag}: an id is out of range",
                got=int(unsigned.max()),
                allowed="0 to 2^62 - 1",
            )
    return lengths_B, values.cast(pa.int64()).to_numpy(zero_copy_only=False)


def _check_ids(
    path: Path,
    table: Table,
    feature: str,
    first_row: int,
    lengths_B: IntArray,
    values: IntArray,
    rows: int | None,
) -> None:
    if not values.size:
        return
    limit = MAX_COUNT if rows is None else rows
    for position, wrong, remedy in (
        (int(values.argmin()), values.min() < 0, "remove it; leave a bag empty for no id"),
        (
            int(values.argmax()),
            values.max() >= limit,
            "hash the ids into the table" if rows is None else "correct num_embeddings or the ids",
        ),
    ):
        if wrong:
            row = first_row + _bag_of(lengths_B, position)
            raise InputError(
                f"trace {path}, table {table.name!r}, feature {feature!r}, row {row}: "
                "an id is out of range",
                got=int(values[position]),
                allowed=f"0 to {limit - 1}",
                remedy=remedy,
            )


def _bag_of(lengths_B: IntArray, position: int) -> int:
    return int(np.searchsorted(np.cumsum(lengths_B), position, side="right"))
