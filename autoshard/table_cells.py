"""The columns of a table list, and how one cell becomes one value.

`table_io` reads files into records (column to raw cell); this file turns a record into
a `Table`. A raw cell is text in CSV and typed in JSON and Parquet; blank is None or "".
Counts are strict: whole numbers written as integers, never through a float, since a
float loses digits above 2^53 and hides what was meant ("1.5", "1e6", "1000000.0").
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, TypeVar

from autoshard.distributions import IdDistribution
from autoshard.errors import InputError, listed, quoted
from autoshard.number_text import DECIMAL, INTEGER, parse_float, parse_integer
from autoshard.suggestions import did_you_mean
from autoshard.tables import (
    MAX_COUNT,
    MAX_NAME_LENGTH,
    BagLengths,
    DataType,
    PoolingType,
    Table,
    hidden_characters,
)

REQUIRED_COLUMNS = ("name", "num_embeddings", "embedding_dim", "pooling_factor")
OPTIONAL_COLUMNS = (
    "feature_names",
    "data_type",
    "pooling",
    "weighted",
    "zipf_exponent",
    "zipf_shift",
    "bucket_rows",
    "bucket_shares",
    "bag_lengths",
)
COLUMNS = REQUIRED_COLUMNS + OPTIONAL_COLUMNS
#: Separates the items of a list in one CSV cell.
LIST_SEPARATOR = "|"

_EnumType = TypeVar("_EnumType", bound=Enum)


class CellError(Exception):
    """One cell is wrong; `table_io` adds file, row and column."""

    def __init__(self, what: str, got: object, allowed: str, remedy: str | None = None) -> None:
        super().__init__(what)
        self.what, self.got, self.allowed, self.remedy = what, quoted(got), allowed, remedy


def is_blank(cell: object) -> bool:
    """Whether a cell holds nothing."""
    return cell is None or (isinstance(cell, str) and not cell.strip())


def check_columns(columns: list[str], where: str) -> None:
    """Refuse a header with unknown, repeated or missing columns.

    Raises:
        InputError: the fault, with `where` and the column.
    """
    for position, column in enumerate(columns, start=1):
        if column not in COLUMNS:
            remedy = did_you_mean(column, COLUMNS)
            if column.startswith("__index_level_"):
                remedy = "write the file without the index of the data frame (index=False)"
            elif len(columns) == 1 and any(separator in column for separator in ";\t"):
                remedy = "separate the columns with commas"
            elif not column:
                remedy = f"name column {position}, or remove it"
            raise InputError(
                f"{where}: unknown column {quoted(column)}",
                allowed=", ".join(COLUMNS),
                remedy=remedy or "remove the column",
            )
        if column in columns[: position - 1]:
            raise InputError(
                f"{where}: column {column!r} occurs twice", remedy="keep one of the two"
            )
    if missing := [column for column in REQUIRED_COLUMNS if column not in columns]:
        raise InputError(
            f"{where}: missing column {', '.join(map(repr, missing))}",
            got=", ".join(columns) or "no columns",
            remedy=f"give every table {', '.join(REQUIRED_COLUMNS)}",
        )


def parse_table(record: Mapping[str, Any], where: str) -> Table:
    """Turn one record into a table.

    Args:
        record: raw cells by column; a column that is absent or blank takes its default.
        where: file and row, for errors.

    Raises:
        InputError: a cell is wrong, with `where` and its column.
    """
    values: dict[str, Any] = {}
    for column in COLUMNS:
        cell = record.get(column)
        if is_blank(cell):
            if column in REQUIRED_COLUMNS:
                raise InputError(f"{where}, column {column!r}: the cell is blank")
            continue
        try:
            values[column] = _PARSERS[column](cell)
        except CellError as error:
            raise InputError(
                f"{where}, column {column!r}: {error.what}",
                got=error.got,
                allowed=error.allowed,
                remedy=error.remedy,
            ) from error
    law = _split_off(values, ("zipf_exponent", "zipf_shift"))
    measured = _split_off(values, ("bucket_rows", "bucket_shares"))
    if measured and law:
        raise InputError(
            f"{where}, column {next(iter(law))!r}: a Zipf law beside measured buckets",
            remedy="give either the zipf_ columns or the bucket_ columns",
        )
    try:
        return Table(**values, ids=IdDistribution(**(measured or law)))
    except InputError as error:
        named = next((column for column in COLUMNS if column in error.what), None)
        column = f", column {named!r}" if named else ""
        raise InputError(
            f"{where}{column}: {error.what}",
            got=error.got,
            allowed=error.allowed,
            remedy=error.remedy,
        ) from error


def _split_off(values: dict[str, Any], columns: tuple[str, ...]) -> dict[str, Any]:
    """Take `columns` out of `values`; the ones that say anything."""
    taken = {column: values.pop(column) for column in columns if column in values}
    return {column: value for column, value in taken.items() if value}


def check_name(name: object) -> str:
    """A table or feature name that every format can hold.

    Raises:
        CellError: it is not text, blank, too long, or holds invisible characters.
    """
    if not isinstance(name, str):
        raise CellError("not text", name, "text", "put the name in quotes")
    if not name.strip():
        raise CellError("a name is blank", name, "a name with visible characters")
    if len(name) > MAX_NAME_LENGTH:
        raise CellError(
            f"a name of {len(name)} characters", name, f"at most {MAX_NAME_LENGTH} characters"
        )
    if hidden := hidden_characters(name):
        what = f"a name holds control or invisible characters ({listed(hidden)})"
        raise CellError(what, name, "printable text")
    return name


def _count(cell: object) -> int:
    allowed = "a whole number >= 1 written as an integer"
    value: object = cell
    if isinstance(cell, str):
        text = cell.strip()
        if INTEGER.fullmatch(text):
            digits = text.lstrip("+-").lstrip("0")
            if len(digits) > len(str(MAX_COUNT)):
                raise CellError("out of range", text, f"{allowed}, at most 2^62")
            value = parse_integer(text)
        elif DECIMAL.fullmatch(text):
            value = parse_float(text)
        else:
            raise CellError("not a number", cell, allowed)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CellError("not a number", cell, allowed)
    if isinstance(value, float):
        remedy = None
        if math.isfinite(value) and value.is_integer() and abs(value) < 2**53:
            remedy = f"write {int(value)}; decimals and exponents are refused for counts"
        raise CellError("not a whole number written as an integer", cell, allowed, remedy)
    if not 1 <= value <= MAX_COUNT:
        what = "negative" if value < 0 else "out of range"
        raise CellError(what, cell, f"{allowed}, at most 2^62")
    return value


def _number(cell: object) -> float:
    allowed = "a finite number >= 0"
    value: object = cell
    if isinstance(cell, str):
        try:
            value = parse_float(cell)
        except ValueError as error:
            is_infinite = cell.strip().lower().lstrip("+-")[:3] in ("nan", "inf")
            what = "not finite" if is_infinite else "not a number"
            raise CellError(what, cell, allowed) from error
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise CellError("not a number", cell, allowed)
    try:
        value = float(value)
    except OverflowError as error:
        raise CellError("not finite", cell, allowed) from error
    if not math.isfinite(value):
        raise CellError("not finite", cell, allowed)
    if value < 0:
        raise CellError("negative", cell, allowed)
    return value


def _flag(cell: object) -> bool:
    if isinstance(cell, bool):
        return cell
    if isinstance(cell, str) and cell.strip().lower() in ("true", "false"):
        return cell.strip().lower() == "true"
    raise CellError("not a truth value", cell, "true or false")


def _member_of(kind: type[_EnumType]) -> Callable[[object], _EnumType]:
    options = [member.value for member in kind]

    def parse(cell: object) -> _EnumType:
        name = cell.strip() if isinstance(cell, str) else cell
        if name not in options:
            raise CellError("unknown value", cell, ", ".join(options), did_you_mean(name, options))
        return kind(name)

    return parse


def _list_of(item: Callable[[object], Any]) -> Callable[[object], tuple[Any, ...]]:
    def parse(cell: object) -> tuple[Any, ...]:
        items = cell.split(LIST_SEPARATOR) if isinstance(cell, str) else cell
        if not isinstance(items, list | tuple):
            raise CellError("not a list", cell, f"a list (in CSV separated by {LIST_SEPARATOR!r})")
        for position, value in enumerate(items, start=1):
            if is_blank(value):
                raise CellError(f"item {position} of the list is blank", cell, "no blank items")
        return tuple(item(value) for value in items)

    return parse


def _feature_names(cell: object) -> tuple[str, ...]:
    names = _list_of(check_name)(cell)
    if repeated := [name for name in names if names.count(name) > 1]:
        raise CellError(f"feature {repeated[0]!r} is named twice", cell, "different names")
    return names


_PARSERS: dict[str, Callable[[object], Any]] = {
    "name": check_name,
    "num_embeddings": _count,
    "embedding_dim": _count,
    "pooling_factor": _number,
    "feature_names": _feature_names,
    "data_type": _member_of(DataType),
    "pooling": _member_of(PoolingType),
    "weighted": _flag,
    "zipf_exponent": _number,
    "zipf_shift": _number,
    "bucket_rows": _list_of(_count),
    "bucket_shares": _list_of(_number),
    "bag_lengths": _member_of(BagLengths),
}
