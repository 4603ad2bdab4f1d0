"""Reads measured rows for training and reports, and refuses what must not be mixed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from numpy.typing import NDArray

from autoshard.errors import InputError
from autoshard.features import shard_features
from autoshard.measure.config import Collective, SimulatedDevice
from autoshard.measure.normalising import combine_passes, normalise_by_references
from autoshard.measure.schema import TRUST_COLUMNS, RowKind, arrow_schema
from autoshard.measure.slices_json import slices_from_text
from autoshard.measure.store import measurement_files, read_metadata, read_part
from autoshard.problem import TrainingConfig, parse_optimizer
from autoshard.shards import ShardSlice

#: Rows that differ here answer different questions. The optimizer is not among them: it
#: is a property of the workload, and stands in its own column.
SETTING_COLUMNS: dict[RowKind, tuple[str, ...]] = {
    RowKind.KERNELS: ("device", "cache", "threads", "concurrent_workers"),
    RowKind.COLLECTIVES: ("device", "backend", "threads"),
}


def load_kernel_rows(
    paths: str | Path | Sequence[str | Path],
    *,
    allow_mixed: bool = False,
) -> pd.DataFrame:
    """Read kernel measurements as they were taken; `load_kernel_measurements` combines them.

    Args:
        paths: part folder(s) or merged file(s).
        allow_mixed: accept rows of different machines, versions or settings. Simulated rows
            never mix with real ones.

    Returns:
        One row per shard set and pass, columns as in `schema.KERNEL_COLUMNS`, ordered by
        number, repeat and pass.

    Raises:
        InputError: a file is missing, torn or foreign; rows are mixed, occur twice, or do
            not say how they were measured.
    """
    return _load(paths, RowKind.KERNELS, allow_mixed=allow_mixed)


def load_kernel_measurements(
    paths: str | Path | Sequence[str | Path], *, allow_mixed: bool = False
) -> pd.DataFrame:
    """Read kernel measurements, less the machine's moods, with their passes combined.

    Returns:
        One row per measurement of a shard set; see `normalising.combine_passes`.

    Raises:
        InputError: as for `load_kernel_rows`.
    """
    rows = load_kernel_rows(paths, allow_mixed=allow_mixed)
    return combine_passes(normalise_by_references(rows))


def load_collective_rows(
    paths: str | Path | Sequence[str | Path], *, allow_mixed: bool = False
) -> pd.DataFrame:
    """Read measurements of collectives; see `load_kernel_rows`.

    Files that were written before the column `collective` hold all-to-alls.
    """
    return _load(paths, RowKind.COLLECTIVES, allow_mixed=allow_mixed)


def environments_in(paths: str | Path | Sequence[str | Path]) -> dict[str, Any]:
    """What files say of the machines and versions behind their rows, by fingerprint.

    Args:
        paths: as for `load_kernel_rows`.
    """
    found: dict[str, Any] = {}
    for path in measurement_files(paths):
        found.update(read_metadata(path).get("environments", {}))
    return found


def row_slices(row: Mapping[str, Any]) -> tuple[ShardSlice, ...]:
    """The shard set of a kernel row."""
    return slices_from_text(row["slices"], f"row {row['key']}")


def row_training(row: Mapping[str, Any]) -> TrainingConfig:
    """The training that a kernel row was measured for."""
    return TrainingConfig(
        batch_size=int(row["num_samples"]) // int(row["world_size"]),
        optimizer=parse_optimizer(row["optimizer"]),
    )


def row_features(row: Mapping[str, Any]) -> NDArray[np.float64]:
    """The features of a kernel row's shards, float64 [S, F], as planning computes them."""
    return shard_features(row_slices(row), row_training(row), int(row["world_size"]))


def _load(
    paths: str | Path | Sequence[str | Path], kind: RowKind, *, allow_mixed: bool
) -> pd.DataFrame:
    tables: list[pa.Table] = []
    environments: dict[str, Any] = {}
    for path in measurement_files(paths):
        rows, metadata = read_part(path)
        if metadata["kind"] != kind.value:
            raise InputError(
                f"{path} holds another kind of measurements",
                got=metadata["kind"],
                allowed=kind.value,
            )
        check_columns(path, rows, kind)
        environments.update(metadata.get("environments", {}))
        tables.append(rows.select(arrow_schema(kind).names).replace_schema_metadata(None))
    frame = pa.concat_tables(tables).to_pandas()
    _check_one_source(frame)
    if not allow_mixed:
        _check_unmixed(frame, kind, environments)
    same = ["key", "hardware_fingerprint", "software_fingerprint"]
    if (twice := frame.duplicated(same)).any():
        raise InputError(
            "a measured row occurs twice",
            got=frame.loc[twice, "key"].iloc[0],
            remedy="name either a merged file or the parts it was made of",
        )
    order = ["protocol", "hardware_fingerprint", "index", "repeat", "pass"]
    return frame.sort_values(order, kind="stable").reset_index(drop=True)


def check_columns(path: Path, rows: pa.Table, kind: RowKind) -> None:
    """Refuse rows of a file that lack columns, or hold values that nothing can be made of.

    Raises:
        InputError: names the file and the column.
    """
    schema = arrow_schema(kind)
    if missing := [name for name in schema.names if name not in rows.column_names]:
        raise InputError(
            f"measurements {path} lack columns",
            got=", ".join(missing),
            remedy="measure again: a timing without its warm-up, repetitions and spread "
            "cannot be judged",
        )
    for field in schema:
        if rows.schema.field(field.name).type != field.type:
            raise InputError(
                f"measurements {path}: column {field.name!r} has another type",
                got=rows.schema.field(field.name).type,
                allowed=field.type,
            )
    if kind is RowKind.COLLECTIVES:
        names = [collective.value for collective in Collective]
        unknown = {str(name) for name in rows["collective"].unique().to_pylist()} - set(names)
        if unknown:
            raise InputError(
                f"measurements {path}: column 'collective' names what is not known",
                got=", ".join(sorted(unknown)),
                allowed=", ".join(names),
                remedy="read them with the version that wrote them, or measure again",
            )
    for name in TRUST_COLUMNS[kind]:
        values = rows[name]
        numbers = values.to_numpy()
        lowest = 1 if name in ("warmup_iterations", "iterations") else 0
        if values.null_count or not np.all(np.isfinite(numbers) & (numbers >= lowest)):
            raise InputError(
                f"measurements {path}: column {name!r} holds values that are not usable",
                allowed=f"finite numbers >= {lowest}, and no blanks",
                remedy="measure these rows again, with a warm-up",
            )


def _check_one_source(frame: pd.DataFrame) -> None:
    """Refuse simulated rows beside real ones, whatever else may be mixed."""
    if frame["device"].nunique() > 1 and (frame["device"] == SimulatedDevice.SIMULATED.value).any():
        raise InputError(
            "simulated and real rows are mixed",
            got=", ".join(sorted(frame["device"].unique())),
            allowed="rows of one or the other",
            remedy="load one of them",
        )


def _check_unmixed(
    frame: pd.DataFrame, kind: RowKind, environments: Mapping[str, Mapping[str, Any]]
) -> None:
    for column in ("hardware_fingerprint", "software_fingerprint", *SETTING_COLUMNS[kind]):
        values = sorted(frame[column].unique().tolist())
        if len(values) > 1:
            named = [f"{v} ({_differing(v, values, environments)})" for v in map(str, values)]
            raise InputError(
                f"measurements with different {column} are mixed",
                got=" and ".join(named) if "fingerprint" in column else values,
                allowed="rows of one machine, of the same versions and settings",
                remedy="load one of them, or pass allow_mixed=True if you mean it",
            )


def _differing(
    name: str, names: Sequence[str], environments: Mapping[str, Mapping[str, Any]]
) -> str:
    """What sets one environment apart from the others."""
    described = [environments.get(str(other), {}) for other in names]
    mine = environments.get(name, {})
    parts = [
        f"{key} {mine.get(key, 'none')}"
        for key in sorted({key for environment in described for key in environment})
        if any(environment.get(key) != mine.get(key) for environment in described)
    ]
    return ", ".join(parts) or "not described"
