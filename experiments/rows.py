"""Result rows of a long experiment: appended one by one, so that a killed run goes on."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pandas as pd

from autoshard.errors import InputError
from autoshard.files import fingerprint, read_whole_lines, write_atomically


class RowFile:
    """A JSON-lines file of rows, each with a key; rows that are there are not made again."""

    def __init__(self, path: Path, identity: Mapping[str, Any]) -> None:
        """Open or continue a file.

        Args:
            path: `….jsonl`.
            identity: whatever decides the rows; a file of another identity is refused.

        Raises:
            InputError: the file belongs to another configuration, or is damaged.
        """
        self.path = path
        self.rows: dict[str, dict[str, Any]] = {}
        mark = fingerprint(dict(identity))
        if path.exists():
            self._read(mark)
        else:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"identity": mark}) + "\n", encoding="utf-8")

    def _read(self, mark: str) -> None:
        try:
            records = [json.loads(line) for line in read_whole_lines(self.path)]
            found = records[0]["identity"] if records else None
            rows = {str(record["key"]): record["row"] for record in records[1:]}
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{self.path} is damaged", remedy="choose another output folder"
            ) from error
        if found is None:
            self.path.write_text(json.dumps({"identity": mark}) + "\n", encoding="utf-8")
        elif found != mark:
            raise InputError(
                f"{self.path} belongs to a run with another configuration",
                remedy="choose another output folder, or repeat the old configuration",
            )
        self.rows = rows

    def __contains__(self, key: str) -> bool:
        return key in self.rows

    def add(self, key: str, row: Mapping[str, Any]) -> None:
        """Append a row."""
        self.rows[key] = dict(row)
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"key": key, "row": dict(row)}) + "\n")

    def frame(self) -> pd.DataFrame:
        """All rows."""
        return pd.DataFrame(list(self.rows.values()))

    def write_parquet(self) -> Path:
        """Write all rows beside the file as Parquet, atomically."""
        target = self.path.with_suffix(".parquet")
        write_atomically(target, lambda path: self.frame().to_parquet(path, index=False))
        return target
