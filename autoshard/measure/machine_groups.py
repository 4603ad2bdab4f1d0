"""Puts runs of many machines together: one folder for each group of rows that may be mixed.

Rows answer the same question if they are of one kind of hardware, one set of versions and one
setting; rows of different groups never meet in a file. `loading` and `cost_net` read a group's
folder like that of a single run.
"""

from __future__ import annotations

import glob
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa

from autoshard.errors import InputError, listed
from autoshard.files import make_folder, write_text
from autoshard.measure.loading import SETTING_COLUMNS
from autoshard.measure.merging import ROW_ORDER, RowsRead, read_together
from autoshard.measure.part_coverage import PartCoverage, part_coverage
from autoshard.measure.schema import RowKind
from autoshard.measure.store import part_paths, write_rows

ENVIRONMENT_FILE = "environment.json"
_FINGERPRINTS = ("hardware_fingerprint", "software_fingerprint")
_GROUP_COLUMNS: dict[RowKind, tuple[str, ...]] = {
    RowKind.KERNELS: (*_FINGERPRINTS, *SETTING_COLUMNS[RowKind.KERNELS], "optimizer"),
    RowKind.COLLECTIVES: (*_FINGERPRINTS, *SETTING_COLUMNS[RowKind.COLLECTIVES]),
}
#: What kernels and collectives of one folder have in common.
_SHARED_COLUMNS = (*_FINGERPRINTS, "device", "threads")


@dataclass(frozen=True, kw_only=True)
class MergedRows:
    """The rows of one kind in a group's folder."""

    kind: RowKind
    num_rows: int
    num_sets: int
    """Different shard sets, or collectives."""
    coverage: tuple[PartCoverage, ...]
    """For each protocol, which parts of the run are there."""


@dataclass(frozen=True, kw_only=True)
class MergedGroup:
    """One folder that was written."""

    folder: Path
    described: Mapping[str, Any]
    """What `environment.json` holds."""
    rows: tuple[MergedRows, ...]

    @property
    def is_complete(self) -> bool:
        """Whether no row is missing, as far as the files say what was planned."""
        return all(c.is_complete for rows in self.rows for c in rows.coverage)


@dataclass(frozen=True, kw_only=True)
class Merged:
    """What `merge_by_machine` did."""

    groups: tuple[MergedGroup, ...]
    num_files: int
    num_dropped: int
    """Rows that occurred more than once, with the same values."""


def merge_by_machine(
    sources: Sequence[str | Path], out_dir: str | Path, *, require_complete: bool = False
) -> Merged:
    """Merge runs of many machines into one folder per group of rows that may be mixed.

    Nothing is written before everything is checked; every file is written atomically, and the
    same rows give the same bytes, in whatever order they are named.

    Args:
        sources: output folders of measuring runs, folders of parts, Parquet files, or patterns
            with `*`, `?` or `**` for them. What else a pattern matches is skipped.
        out_dir: gets `<group>/kernels.parquet`, `collectives.parquet` and `environment.json`.
            The group's name begins with eight digits of the hardware's fingerprint.
        require_complete: refuse to merge while rows are missing.

    Raises:
        InputError: nothing found, a torn or foreign file, or a row that occurs twice with
            different values; rows are missing, if they must not.
    """
    files = source_files(sources)
    read = read_together(files)
    num_dropped = 0
    groups: dict[RowKind, dict[tuple[Any, ...], RowsRead]] = {}
    for kind, found in read.items():
        rows, dropped = _without_duplicates(found, kind)
        num_dropped += dropped
        groups[kind] = _grouped(rows, kind)
    folders = sorted(_folders(groups).items())
    written = [_described(Path(out_dir) / name, parts) for name, parts in folders]
    if require_complete and (lacking := [g for g in written if not g.is_complete]):
        raise InputError(
            "rows are missing",
            got=listed(
                f"{group.folder.name}: {rows.kind.value}, {coverage}"
                for group in lacking
                for rows in group.rows
                for coverage in rows.coverage
                if not coverage.is_complete
            ),
            remedy="measure the missing parts, or merge without require_complete",
        )
    for group, (_, parts) in zip(written, folders, strict=True):
        make_folder(group.folder)
        for kind, part in parts.items():
            write_rows(group.folder / f"{kind.value}.parquet", kind, part.rows, part.metadata)
        text = json.dumps(group.described, indent=1, sort_keys=True) + "\n"
        write_text(group.folder / ENVIRONMENT_FILE, text)
    return Merged(groups=tuple(written), num_files=len(files), num_dropped=num_dropped)


def source_files(sources: Sequence[str | Path]) -> list[Path]:
    """The measurement files behind folders, files and patterns, each once, in order.

    Raises:
        InputError: a source does not exist or holds no measurements.
    """
    files: dict[Path, Path] = {}
    for source in map(str, sources):
        is_pattern = glob.has_magic(source) and not Path(source).exists()
        # pathlib has no patterns for absolute paths
        places = sorted(glob.glob(source, recursive=True)) if is_pattern else [source]  # noqa: PTH207
        found = [file for place in places for file in _files_of(Path(place), strict=not is_pattern)]
        if not found:
            raise InputError(
                f"{source} holds no measurements",
                got=f"{len(places)} match(es)" if is_pattern else None,
                remedy="name output folders of experiments.measure, such as 'multirun/measure/*/*'",
            )
        files.update((file.resolve(), file) for file in found)
    if not files:
        raise InputError("there is nothing to merge", remedy="sources='[runs/a,runs/b]'")
    return [files[place] for place in sorted(files)]


def _files_of(place: Path, *, strict: bool) -> list[Path]:
    """Files of a run's folder; its parts rather than what was once merged of them."""
    if place.is_file():
        return [place] if strict or place.suffix == ".parquet" else []
    if not place.is_dir():
        raise InputError(f"{place} does not exist", remedy="check the path")
    if any(place.glob("part-*.parquet")):
        return part_paths(place)
    files: list[Path] = []
    for kind in RowKind:
        folder, merged = place / kind.value, place / f"{kind.value}.parquet"
        parts = part_paths(folder) if folder.is_dir() else []
        files.extend(parts or ([merged] if merged.is_file() else []))
    return files


def _without_duplicates(read: RowsRead, kind: RowKind) -> tuple[RowsRead, int]:
    """Sort, and keep the first of rows that are the same to the last digit, but for the clock."""
    order = [*_FINGERPRINTS, *ROW_ORDER, "measured_at"]
    rows = read.rows.sort_by([(name, "ascending") for name in order])
    names = rows.select(["key", *_FINGERPRINTS]).to_pandas()
    occurs_again = names.duplicated().to_numpy()
    for place in np.flatnonzero(names.duplicated(keep=False).to_numpy() & occurs_again):
        first, second = (rows.slice(int(row), 1).to_pylist()[0] for row in (place - 1, place))
        # Texts, since a NaN equals itself there. Simulated rows repeat at any time of day.
        differing = [name for name in first if repr(first[name]) != repr(second[name])]
        if set(differing) - {"measured_at"}:
            raise InputError(
                f"row {first['key']} of {kind.value} occurs twice with different values",
                got=", ".join(f"{n} {first[n]} and {second[n]}" for n in differing[:4]),
                remedy="the same was measured twice on equal machines: name one of the two, and "
                "measure collectives once per machine, not once per optimizer",
            )
    kept = rows.filter(pa.array(~occurs_again))
    return RowsRead(kept, read.metadata), int(occurs_again.sum())


def _grouped(read: RowsRead, kind: RowKind) -> dict[tuple[Any, ...], RowsRead]:
    """Rows by all that must not be mixed, each with its own part of the metadata."""
    columns = list(_GROUP_COLUMNS[kind])
    frame = read.rows.select(columns).to_pandas()
    groups = {}
    for values, places in frame.groupby(columns, sort=True, dropna=False).indices.items():
        rows = read.rows.take(pa.array(np.sort(places)))
        named = dict(zip(columns, values, strict=True))
        fingerprints = [named[name] for name in _FINGERPRINTS]
        protocols = sorted(set(rows["protocol"].to_pylist()))
        told = read.metadata
        groups[tuple(values)] = RowsRead(
            rows,
            {
                "environments": {
                    name: told["environments"][name]
                    for name in fingerprints
                    if name in told["environments"]
                },
                "protocols": {
                    name: told["protocols"][name] for name in protocols if name in told["protocols"]
                },
                "planned": [
                    plan
                    for plan in told["planned"]
                    if plan["protocol"] in protocols
                    and [plan[name] for name in _FINGERPRINTS] == fingerprints
                ],
            },
        )
    return groups


def _folders(
    groups: Mapping[RowKind, Mapping[tuple[Any, ...], RowsRead]],
) -> dict[str, dict[RowKind, RowsRead]]:
    """Which groups go into which folder: collectives beside the kernels that they go with."""
    kernels, collectives = (groups.get(kind, {}) for kind in RowKind)
    by_place: dict[tuple[Any, ...], list[tuple[Any, ...]]] = {}
    for values in collectives:
        by_place.setdefault(_shared(values, RowKind.COLLECTIVES), []).append(values)
    folders: dict[str, dict[RowKind, RowsRead]] = {}
    used = set()
    for values, read in kernels.items():
        hardware, software, device, cache, threads, workers, optimizer = values
        name = f"{hardware[:8]}-{device}-{optimizer}-{cache}-{workers}x{threads}-{software[:8]}"
        _put(folders, name, RowKind.KERNELS, read)
        # Collectives of two backends cannot lie in one file.
        fitting = by_place.get(_shared(values, RowKind.KERNELS), [])
        if len(fitting) == 1:
            _put(folders, name, RowKind.COLLECTIVES, collectives[fitting[0]])
            used.add(fitting[0])
    for values, read in collectives.items():
        if values not in used:
            hardware, software, device, backend, threads = values
            name = f"{hardware[:8]}-{device}-{backend}-collectives-{threads}-{software[:8]}"
            _put(folders, name, RowKind.COLLECTIVES, read)
    return folders


def _shared(values: tuple[Any, ...], kind: RowKind) -> tuple[Any, ...]:
    named = dict(zip(_GROUP_COLUMNS[kind], values, strict=True))
    return tuple(named[name] for name in _SHARED_COLUMNS)


def _put(
    folders: dict[str, dict[RowKind, RowsRead]], name: str, kind: RowKind, read: RowsRead
) -> None:
    folder = folders.setdefault(name, {})
    if kind in folder:  # two fingerprints that begin alike
        raise InputError(f"two groups of rows would be written into {name}")
    folder[kind] = read


def _described(folder: Path, parts: Mapping[RowKind, RowsRead]) -> MergedGroup:
    described: dict[str, Any] = {}
    merged = []
    for kind, read in parts.items():
        first = read.rows.slice(0, 1).to_pylist()[0]
        frame: pd.DataFrame = read.rows.select(["protocol", "index", "key"]).to_pandas()
        is_kernels = kind is RowKind.KERNELS
        num_sets = len(frame.drop_duplicates(["protocol", "index"] if is_kernels else ["key"]))
        coverage = part_coverage(frame, read.metadata["planned"])
        for name in _FINGERPRINTS:
            described[name] = first[name]
            described[name.removesuffix("_fingerprint")] = read.metadata["environments"].get(
                first[name]
            )
        described[kind.value] = {
            "num_rows": len(frame),
            "num_sets": num_sets,
            "settings": {
                name: first[name] for name in _GROUP_COLUMNS[kind] if name not in _FINGERPRINTS
            },
            "protocols": read.metadata["protocols"],
            "parts": [one.to_json() for one in coverage],
        }
        merged.append(
            MergedRows(kind=kind, num_rows=len(frame), num_sets=num_sets, coverage=coverage)
        )
    return MergedGroup(folder=folder, described=described, rows=tuple(merged))
