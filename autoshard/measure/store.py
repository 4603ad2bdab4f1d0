"""Writes measured rows to Parquet part files, so that a killed run can be continued.

A folder holds parts of one run, of one kind. Parts appear whole or not at all; the rows
of finished parts are never measured again; a file that is no part is an error rather
than lost data. `merging` makes compact files of folders, `loading` reads both.
"""

from __future__ import annotations

import dataclasses
import fcntl
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self, TypeVar

import pyarrow as pa
import pyarrow.parquet as pq

from autoshard.errors import InputError
from autoshard.files import canonical_json, write_atomically
from autoshard.measure.environment import Environment
from autoshard.measure.schema import LATER_COLUMNS, RowKind, arrow_schema

_METADATA_KEY = b"autoshard.measure"
_T = TypeVar("_T")
_FORMAT_VERSION = 1
_PART_NAME = re.compile(r"part-([0-9]{6})\.parquet")
_ZSTD_LEVEL = 12
#: All different shard sets of a file stand once, in one page that is compressed as a whole: the
#: text of a table that many sets hold, or of a set that was measured several times, costs little.
_DICTIONARY_BYTES = 2**30


def read_part(path: str | Path) -> tuple[pa.Table, dict[str, Any]]:
    """Read one part or merged file.

    Returns:
        Its rows, with the columns that earlier versions did not write, and its metadata:
        `kind`, `environments` and `protocols`.

    Raises:
        InputError: the file is missing, torn, or not one of measurements.
    """
    rows = _read(path, pq.read_table)
    metadata = _metadata_of(path, rows.schema)
    return _with_later_columns(rows, metadata["kind"]), metadata


def read_metadata(path: str | Path) -> dict[str, Any]:
    """Read the metadata of one part or merged file; see `read_part`."""
    return _metadata_of(path, _read(path, pq.read_schema))


def _read(path: str | Path, reader: Callable[[str | Path], _T]) -> _T:
    """What `reader` makes of a file, which may be missing or torn."""
    try:
        return reader(path)
    except FileNotFoundError as error:
        raise InputError(f"measurements {path} do not exist", remedy="check the path") from error
    except (pa.ArrowException, OSError) as error:
        raise InputError(
            f"measurements {path} cannot be read: torn, or not Parquet",
            got=str(error).splitlines()[0][:120],
            remedy="remove the file (its rows will be measured again), or restore it from a copy",
        ) from error


def _metadata_of(path: str | Path, schema: pa.Schema) -> dict[str, Any]:
    """The metadata in a file's schema, if it is one of measurements."""
    text = (schema.metadata or {}).get(_METADATA_KEY)
    try:
        metadata = json.loads(text) if text else None
    except ValueError:
        metadata = None
    if not isinstance(metadata, dict) or not {"version", "kind"} <= set(metadata):
        raise InputError(
            f"{path} is Parquet, but holds no measurements of autoshard",
            got=f"columns {', '.join(schema.names[:6])}",
            remedy="move it elsewhere",
        )
    if metadata["version"] != _FORMAT_VERSION:
        raise InputError(
            f"measurements {path} have another format",
            got=f"version {metadata['version']}",
            allowed=f"version {_FORMAT_VERSION}",
            remedy="measure again with this version",
        )
    return metadata


def _with_later_columns(rows: pa.Table, kind: str) -> pa.Table:
    """Fill in the columns that files of earlier versions lack, where the schema has them."""
    if kind not in {known.value for known in RowKind}:
        return rows
    schema = arrow_schema(RowKind(kind))
    for name, value in LATER_COLUMNS[RowKind(kind)].items():
        if name not in rows.column_names:
            place = min(schema.get_field_index(name), rows.num_columns)
            values = pa.array([value] * rows.num_rows, schema.field(name).type)
            rows = rows.add_column(place, schema.field(name), values)
    return rows


def part_paths(folder: str | Path) -> list[Path]:
    """The parts in a folder, in order.

    Raises:
        InputError: the folder is missing, or holds a file that is no part.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise InputError(f"measurements folder {folder} does not exist", remedy="check the path")
    paths = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for path in paths:
        if not _PART_NAME.fullmatch(path.name):
            raise InputError(
                f"{path} does not belong into a folder of measurements",
                allowed="part-000000.parquet and so on",
                remedy="move it elsewhere",
            )
    return paths


def measurement_files(paths: str | Path | Sequence[str | Path]) -> list[Path]:
    """The files behind files and folders.

    Raises:
        InputError: a path is missing, or there is no file.
    """
    listed = [paths] if isinstance(paths, str | Path) else list(paths)
    files: list[Path] = []
    for path in map(Path, listed):
        files.extend(part_paths(path) if path.is_dir() else [path])
    if not files:
        raise InputError("there are no measurements", got=", ".join(map(str, listed)) or "no path")
    return files


@dataclass(frozen=True, kw_only=True)
class PlannedRows:
    """What a run set out to measure, so that those who merge its parts see what is missing."""

    part: int = 0
    num_parts: int = 1
    num_rows: int = 0
    """Of this part, once all are measured; a continued run may raise it."""
    num_rows_of_run: int = 0
    """Of all parts together."""


class PartStore:
    """The folder of one run, open for writing by one process at a time."""

    def __init__(
        self,
        folder: str | Path,
        kind: RowKind,
        *,
        environment: Environment,
        protocol: str,
        config: Mapping[str, Any],
        planned: PlannedRows | None = None,
        flush_rows: int = 100,
        flush_s: float = 5.0,
    ) -> None:
        """Open a folder, new or from an earlier run.

        Args:
            folder: created if missing.
            kind: of the rows.
            environment: of this process; its fingerprints must be those of earlier rows.
            protocol: fingerprint of what decides a row's meaning; likewise.
            config: what `protocol` is the fingerprint of, for readers.
            planned: told to readers, too.
            flush_rows: write a part once so many rows wait …
            flush_s: … or once the oldest waits so many seconds.

        Raises:
            InputError: another process writes there, a file is torn or foreign, or
                earlier rows are of another kind, protocol, machine or version.
        """
        self.folder, self.kind, self.protocol = Path(folder), kind, protocol
        self._environment, self._config, self._planned = environment, dict(config), planned
        self._flush_rows, self._flush_s = flush_rows, flush_s
        self._waiting: list[dict[str, Any]] = []
        self._oldest_s = 0.0
        self._lock = _lock_folder(self.folder)
        try:
            self.finished: set[str] = self._read_finished()
        except BaseException:
            self._lock.close()
            raise
        for leftover in self.folder.glob(".part-*.parquet.*"):
            leftover.unlink()  # of a writer that was killed; the lock says that none lives

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    def add(self, row: Mapping[str, Any]) -> None:
        """Keep a finished row, and write it soon."""
        if row["key"] in self.finished:
            raise RuntimeError(f"row {row['key']} was measured twice")
        self.finished.add(row["key"])
        if not self._waiting:
            self._oldest_s = time.monotonic()
        self._waiting.append(dict(row))
        self.flush_if_due()

    def flush_if_due(self) -> None:
        """Write a part if enough rows wait, or one waits long enough."""
        due = time.monotonic() - self._oldest_s >= self._flush_s
        if len(self._waiting) >= self._flush_rows or (self._waiting and due):
            self.flush()

    def flush(self) -> None:
        """Write all waiting rows as a new part."""
        if not self._waiting:
            return
        rows = pa.Table.from_pylist(self._waiting, schema=arrow_schema(self.kind))
        metadata: dict[str, Any] = {
            "environments": {
                self._environment.hardware_fingerprint: self._environment.hardware,
                self._environment.software_fingerprint: self._environment.software,
            },
            "commit": self._environment.commit,
            "protocols": {self.protocol: self._config},
        }
        if self._planned is not None:
            metadata["planned"] = [
                {
                    "protocol": self.protocol,
                    "hardware_fingerprint": self._environment.hardware_fingerprint,
                    "software_fingerprint": self._environment.software_fingerprint,
                    **dataclasses.asdict(self._planned),
                }
            ]
        write_rows(self.folder / f"part-{self._next_part:06d}.parquet", self.kind, rows, metadata)
        self._next_part += 1
        self._waiting.clear()

    def close(self) -> None:
        """Write what waits and let others in."""
        if not self._lock.closed:
            try:
                self.flush()
            finally:
                self._lock.close()

    def _read_finished(self) -> set[str]:
        self._next_part = 0
        finished: set[str] = set()
        for path in part_paths(self.folder):
            match = _PART_NAME.fullmatch(path.name)
            assert match is not None
            self._next_part = int(match[1]) + 1
            rows, metadata = read_part(path)
            if metadata["kind"] != self.kind.value:
                raise InputError(
                    f"{path} holds {metadata['kind']}, not {self.kind.value}",
                    remedy="choose another folder",
                )
            self._check_same_run(rows, metadata)
            finished.update(rows["key"].to_pylist())
        return finished

    def _check_same_run(self, rows: pa.Table, metadata: Mapping[str, Any]) -> None:
        """Refuse to continue what was begun with other settings, or elsewhere."""
        mine = self._environment
        for column, expected, described, known in (
            ("protocol", self.protocol, self._config, "protocols"),
            ("hardware_fingerprint", mine.hardware_fingerprint, mine.hardware, "environments"),
            ("software_fingerprint", mine.software_fingerprint, mine.software, "environments"),
        ):
            others = sorted(set(rows[column].to_pylist()) - {expected})
            if not others:
                continue
            before = _flat(metadata.get(known, {}).get(others[0], {}))
            now = _flat(described)
            raise InputError(
                f"the run in {self.folder} cannot be continued: "
                f"its {column.replace('_', ' ')} differs",
                got=", ".join(
                    f"{key} {now.get(key, 'none')} (was {before.get(key, 'none')})"
                    for key in sorted({*now, *before})
                    if now.get(key) != before.get(key)
                ),
                remedy="choose a new folder, or go back to the configuration, machine "
                "and versions that it was begun with",
            )


def _flat(value: Any, prefix: str = "") -> dict[str, Any]:
    """Nested mappings as one, with dotted keys."""
    if not isinstance(value, Mapping):
        return {prefix: value}
    flat: dict[str, Any] = {}
    for key, item in value.items():
        flat.update(_flat(item, f"{prefix}.{key}" if prefix else str(key)))
    return flat


def write_rows(
    path: str | Path, kind: RowKind, rows: pa.Table, metadata: Mapping[str, Any]
) -> None:
    """Write a part or merged file, atomically; any reader of Parquet reads it."""
    described = {**metadata, "version": _FORMAT_VERSION, "kind": kind.value}
    rows = rows.replace_schema_metadata({_METADATA_KEY: canonical_json(described).encode()})
    write_atomically(
        path,
        lambda temporary: pq.write_table(
            rows,
            temporary,
            row_group_size=max(rows.num_rows, 1),
            compression="zstd",
            compression_level=_ZSTD_LEVEL,
            use_dictionary=[f.name for f in rows.schema if not pa.types.is_floating(f.type)],
            dictionary_pagesize_limit=_DICTIONARY_BYTES,
        ),
    )


def _lock_folder(folder: Path) -> IO[str]:
    """Hold the folder until the returned file is closed, or this process ends."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w", encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"cannot write into {folder}", got=error.strerror, remedy="choose a writable folder"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        lock.close()
        raise InputError(
            f"another process measures into {folder}",
            remedy="wait for it, or choose another folder",
        ) from error
    return lock
