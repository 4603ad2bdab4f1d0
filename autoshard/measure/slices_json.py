"""Shard sets as text: the inverse of `autoshard.shards.slice_to_json`.

A stored row names its shards completely, so that features of any later version can be
worked out from it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from autoshard.errors import InputError, quoted
from autoshard.files import canonical_json
from autoshard.shards import ShardingType, ShardSlice, slice_to_json
from autoshard.table_cells import parse_table
from autoshard.tables import Table

_INTEGERS = ("row_offset", "col_offset", "num_rows", "num_cols")


def slices_to_text(slices: Sequence[ShardSlice]) -> str:
    """A shard set as JSON."""
    return canonical_json([slice_to_json(slice_) for slice_ in slices])


def slices_from_text(text: str, where: str = "shard set") -> tuple[ShardSlice, ...]:
    """The inverse of `slices_to_text`.

    Args:
        text: the JSON.
        where: file and row, for errors.

    Raises:
        InputError: not JSON, or not a shard set.
    """
    try:
        values = json.loads(text)
    except (TypeError, ValueError) as error:
        raise InputError(f"{where}: the shard set is not JSON", got=quoted(text)) from error
    if not isinstance(values, list):
        raise InputError(f"{where}: the shard set is not a list", got=quoted(values))
    return tuple(_slice(value, where) for value in values)


def _slice(value: Any, where: str) -> ShardSlice:
    keys = {"table", "sharding_type", *_INTEGERS}
    if not isinstance(value, Mapping) or set(value) != keys:
        raise InputError(f"{where}: a shard is malformed", got=quoted(value), allowed=sorted(keys))
    table = _table(canonical_json(value["table"]), where)
    numbers = [value[key] for key in _INTEGERS]
    if any(isinstance(number, bool) or not isinstance(number, int) for number in numbers):
        raise InputError(f"{where}: a shard's place is not whole numbers", got=numbers)
    row_offset, col_offset, num_rows, num_cols = numbers
    if (
        min(row_offset, col_offset) < 0
        or min(num_rows, num_cols) < 1
        or row_offset + num_rows > table.num_embeddings
        or col_offset + num_cols > table.embedding_dim
    ):
        raise InputError(f"{where}: a shard lies outside of table {table.name!r}", got=numbers)
    try:
        sharding_type = ShardingType(value["sharding_type"])
    except ValueError as error:
        raise InputError(
            f"{where}: sharding_type is not known",
            got=value["sharding_type"],
            allowed=", ".join(t.value for t in ShardingType),
        ) from error
    return ShardSlice(table, sharding_type, row_offset, col_offset, num_rows, num_cols)


@lru_cache(maxsize=65_536)
def _table(text: str, where: str) -> Table:
    record = json.loads(text)
    if not isinstance(record, dict) or not isinstance(record.get("ids", {}), dict):
        raise InputError(f"{where}: a table is malformed", got=text[:80])
    return parse_table({**record, **record.pop("ids", {})}, where)
