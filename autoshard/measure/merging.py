"""Reads measured rows of several files together, and makes one compact file of a run's parts.

Behind `store`, which writes the parts; `machine_groups` merges runs of many machines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from autoshard.errors import InputError
from autoshard.measure.loading import check_columns
from autoshard.measure.part_coverage import union_of_plans
from autoshard.measure.schema import RowKind, arrow_schema
from autoshard.measure.store import measurement_files, read_part, write_rows

#: Numbers alone do not name a collective: each world size and kind counts from 0.
ROW_ORDER = ("protocol", "index", "repeat", "pass", "key")


@dataclass(frozen=True)
class RowsRead:
    """Rows of one kind, with what their files say about them."""

    rows: pa.Table
    metadata: dict[str, Any]
    """`environments` and `protocols` by fingerprint, and what was `planned`."""


def read_together(files: Sequence[Path]) -> dict[RowKind, RowsRead]:
    """All rows of files, by kind, in the order of the files.

    Raises:
        InputError: a file is torn or foreign, or its columns are not usable.
    """
    tables: dict[RowKind, list[pa.Table]] = {}
    told: dict[RowKind, dict[str, Any]] = {}
    for path in files:
        rows, metadata = read_part(path)
        kind = RowKind(metadata["kind"])
        check_columns(path, rows, kind)
        rows = rows.select(arrow_schema(kind).names).replace_schema_metadata(None)
        tables.setdefault(kind, []).append(rows)
        known = told.setdefault(kind, {"environments": {}, "protocols": {}, "planned": []})
        for name in ("environments", "protocols"):
            known[name].update(metadata.get(name, {}))
        known["planned"] = union_of_plans([*known["planned"], *metadata.get("planned", [])])
    return {kind: RowsRead(pa.concat_tables(tables[kind]), told[kind]) for kind in tables}


def merge_parts(source: str | Path | Sequence[str | Path], destination: str | Path) -> int:
    """Merge folders of parts, or files, into one compact file for shipping.

    Args:
        source: folder(s) or file(s) of one kind.
        destination: a .parquet file outside of the folders.

    Returns:
        The number of rows.

    Raises:
        InputError: nothing to merge, mixed kinds, a torn file, or a row that occurs twice.
    """
    destination = Path(destination)
    files = measurement_files(source)
    if any(destination.parent.resolve() == f.parent.resolve() for f in files if "part-" in f.name):
        raise InputError(
            f"{destination} lies in a folder of parts", remedy="write the merged file elsewhere"
        )
    found = read_together(files)
    if len(found) != 1:
        raise InputError(
            "measurements of several kinds cannot be merged",
            got=", ".join(sorted(kind.value for kind in found)),
        )
    ((kind, read),) = found.items()
    whole = read.rows.sort_by([(name, "ascending") for name in ROW_ORDER[:-1]])
    keys = whole["key"].to_pylist()
    if len(set(keys)) != len(keys):
        raise InputError(
            "a row occurs twice in what is to be merged", remedy="name each part only once"
        )
    write_rows(destination, kind, whole, read.metadata)
    return len(keys)
