"""Collects what a run folder holds, as the input of the report.

Every part is optional: what was not run yet is None (or empty), and the report tells which
command would add it. What is there but damaged is an error that names the file.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from autoshard.errors import InputError, quoted
from autoshard.files import read_json, read_text
from autoshard.measure.schema import RowKind
from autoshard.measure.store import measurement_files, read_part
from autoshard.plan import ShardingPlan, load_plan

_REMEDY = "run the experiment that writes it again, or move the file away"
_TEXT, _NUMBER = "text", "number"
#: What the report reads of each table. A column of numbers may hold blanks.
_PREDICTIONS = {
    "kind": _TEXT,
    "split": _TEXT,
    "num_shards": _NUMBER,
    "measured_ms": _NUMBER,
    "predicted_ms": _NUMBER,
}
_EVALUATION = {
    "task": _TEXT,
    "sharder": _TEXT,
    "training_seed": _NUMBER,
    "objective_ms": _NUMBER,
    "infeasible": _NUMBER,
    "lower_bound_ms": _NUMBER,
    "best_known_ms": _NUMBER,
    "planning_time_s": _NUMBER,
    "extrapolated": _NUMBER,
    "source": _TEXT,
}
_TRANSFER = {
    "setting_train": _TEXT,
    "setting_eval": _TEXT,
    "sharder": _TEXT,
    "task": _TEXT,
    "infeasible": _NUMBER,
    "ratio_to_cost_greedy": _NUMBER,
}
_VALIDATION = {
    "plan": _TEXT,
    "sharder": _TEXT,
    "world_size": _NUMBER,
    "num_tables": _NUMBER,
    "run_pass": _NUMBER,
    "predicted_ms": _NUMBER,
    "measured_ms": _NUMBER,
    "extrapolated": _NUMBER,
    "oversubscribed": _NUMBER,
}
#: Where artifacts lie in a run folder.
_ARTIFACTS = {
    "tables": ("tables.csv",),
    "cost_model": ("cost_net/model", "model"),
    "policy": ("agent/policy", "policy"),
}


@dataclass(frozen=True, kw_only=True, eq=False)
class Measurements:
    """Rows of one kind, and where they were measured."""

    rows: pd.DataFrame
    """Columns as in `autoshard.measure.schema`."""
    environments: Mapping[str, Mapping[str, Any]]
    """Hardware and software by fingerprint."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ReportData:
    """What the report shows; a part that was not run is None or empty."""

    folder: str
    """Where it came from, as it stands in the commands."""
    kernels: Measurements | None = None
    collectives: Measurements | None = None
    errors: Mapping[str, Any] | None = None
    """`errors.json` of the cost model."""
    predictions: pd.DataFrame | None = None
    learning: Mapping[str, Sequence[Mapping[str, Any]]] = field(default_factory=dict)
    """Metrics of each training run: one record per update, some with `validation`."""
    plans: Mapping[str, ShardingPlan] = field(default_factory=dict)
    """By sharder, or by file name where two plans are of one sharder."""
    plan_files: Mapping[str, str] = field(default_factory=dict)
    """The file of each plan, by the same names."""
    planning: Sequence[Mapping[str, Any]] = ()
    """One record per sharder: `sharder`, `planning_time_s`, `infeasible`."""
    evaluation: pd.DataFrame | None = None
    transfer: pd.DataFrame | None = None
    validation: pd.DataFrame | None = None
    artifacts: Mapping[str, str] = field(default_factory=dict)
    """Paths of what commands can use: `tables`, `cost_model`, `policy`, where they exist."""

    def plan_file(self, name: str) -> str:
        """The file of a plan."""
        return self.plan_files.get(name, f"{self.folder}/plans/{name}.json")

    def option(self, name: str, form: str | None = None) -> tuple[str, ...]:
        """The option that passes an artifact to an experiment; () where there is none."""
        path = self.artifacts.get(name)
        return () if path is None else ((form or f"{name}={{}}").format(path),)


def load_report_data(folder: str | Path) -> ReportData:
    """Collect a run folder.

    Args:
        folder: that of `experiments.demo`, with a subfolder for each stage; or the output
            folder of one or several experiments, with the same files at its top level.

    Raises:
        InputError: the folder does not exist, or a file in it is damaged.
    """
    root = Path(folder)
    if not root.is_dir():
        raise InputError(f"run folder {root} does not exist", remedy="check the path")
    plans = _plans(root)
    errors_path = _first(root, "cost_net/errors.json", "errors.json")
    validations = [
        frame
        for place in ("runs", "evaluation", ".")
        if (frame := _table(root / place / "validation.parquet", _VALIDATION)) is not None
    ]
    return ReportData(
        folder=str(folder),
        kernels=_measurements(root, RowKind.KERNELS),
        collectives=_measurements(root, RowKind.COLLECTIVES),
        errors=None if errors_path is None else _errors(errors_path),
        predictions=_found_table(root, "cost_net", "predictions", _PREDICTIONS),
        learning=_learning(root),
        plans={name: plan for name, (_, plan) in plans.items()},
        plan_files={name: str(path) for name, (path, _) in plans.items()},
        planning=_planning(root),
        evaluation=_found_table(root, "evaluation", "evaluation", _EVALUATION),
        transfer=_found_table(root, "transfer", "transfer", _TRANSFER),
        validation=pd.concat(validations, ignore_index=True) if validations else None,
        artifacts={
            name: str(path)
            for name, places in _ARTIFACTS.items()
            if (path := _first(root, *places)) is not None
        },
    )


def _first(root: Path, *names: str) -> Path | None:
    return next((root / name for name in names if (root / name).exists()), None)


def _measurements(root: Path, kind: RowKind) -> Measurements | None:
    name = kind.value
    # A merged file appears once all is measured; part folders already hold what is done.
    for path in (
        root / "measurements" / f"{name}.parquet",
        root / f"{name}.parquet",
        root / "measurements" / name,
        root / name,
    ):
        if not path.exists() or (path.is_dir() and not any(path.glob("part-*.parquet"))):
            continue
        frames, environments = [], {}
        for file in measurement_files(path):
            rows, metadata = read_part(file)
            if metadata["kind"] != name:
                raise InputError(f"{file} holds {metadata['kind']}, not {name}", remedy=_REMEDY)
            frames.append(rows.to_pandas())
            environments.update(metadata.get("environments", {}))
        return Measurements(rows=pd.concat(frames, ignore_index=True), environments=environments)
    return None


def _found_table(
    root: Path, stage: str, name: str, columns: Mapping[str, str]
) -> pd.DataFrame | None:
    path = _first(root, f"{stage}/{name}.parquet", f"{name}.parquet")
    return None if path is None else _table(path, columns)


def _table(path: Path, columns: Mapping[str, str]) -> pd.DataFrame | None:
    """A Parquet file with at least these columns; None if it does not exist or has no rows."""
    if not path.exists():
        return None
    try:
        frame = pq.read_table(path).to_pandas()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise InputError(
            f"{path} cannot be read: torn, or not Parquet",
            got=str(error).partition("\n")[0][:120],
            remedy=_REMEDY,
        ) from error
    if frame.empty:
        return None
    if missing := [name for name in columns if name not in frame.columns]:
        raise InputError(f"{path} lacks columns", got=", ".join(missing), remedy=_REMEDY)
    for name, kind in columns.items():
        if kind == _TEXT:
            frame[name] = frame[name].map(str)
            continue
        try:
            frame[name] = frame[name].astype(float)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{path}: column {name!r} does not hold numbers", got=error, remedy=_REMEDY
            ) from error
    return frame


def _errors(path: Path) -> Mapping[str, Any]:
    """The cost model's error report, checked as far as the page relies on it."""
    report = read_json(path, "error report")
    try:
        network, floor = report["network"], report.get("noise_floor")
        exchanges = report.get("collectives") or {}
        for scores in (exchanges, exchanges.get("test") or {}):
            if "median" in scores:
                float(scores["median"]), int(scores["num"])
        for unseen in (exchanges.get("left_out_world_sizes") or {}).values():
            float(unseen["without"]["median"]), float(unseen["with"]["median"])
        for facts in report["splits"].values():
            int(facts["num_sets"])
            _check_scores(facts["models"][network])
            for scores in facts["models"].values():
                _check_scores(scores)
        if floor is not None:
            _check_scores(floor)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path} is not an error report of a cost model",
            got=f"{type(error).__name__}: {error}",
            remedy=_REMEDY,
        ) from error
    checked: Mapping[str, Any] = report
    return checked


def _check_scores(scores: Mapping[str, Any]) -> None:
    for quantity in ("fwd", "bwd", "total"):
        for name in ("median", "mean", "p90"):
            float(scores[quantity][name])


def _learning(root: Path) -> dict[str, Sequence[Mapping[str, Any]]]:
    """Training runs: the folder `agent`, its subfolders, `agent_…`, or the top level."""
    paths = [root / "metrics.jsonl", *sorted(root.glob("agent*/metrics.jsonl"))]
    paths += sorted(root.glob("agent*/*/metrics.jsonl"))
    found: dict[str, Sequence[Mapping[str, Any]]] = {}
    for path in paths:
        records = [r for r in _json_lines(path) if "update" in r]
        if not any("validation" in record for record in records):
            continue
        for record in records:
            _check_update(path, record)
        name = str(path.parent.relative_to(root))
        found["agent" if name == "." else name] = records
    return found


def _check_update(path: Path, record: Mapping[str, Any]) -> None:
    try:
        float(record["update"]), float(record["num_placements"])
        if "validation" in record:
            ratio = float(record["validation"]["objective_ratio"])
            int(record["validation"]["num_compared"]), int(record["validation"]["num_failed"])
            if not (np.isfinite(ratio) and ratio > 0):
                raise ValueError(f"objective_ratio is {ratio}")
    except (KeyError, TypeError, ValueError) as error:
        raise InputError(
            f"{path}: a record is not usable",
            got=f"update {record.get('update')}: {type(error).__name__}: {error}",
            remedy=_REMEDY,
        ) from error


def _json_lines(path: Path) -> list[Mapping[str, Any]]:
    """Records of a JSON-lines file; a last line that a kill cut off is not counted."""
    if not path.is_file():
        return []
    lines = read_text(path, "metrics").split("\n")
    records: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines[:-1], 1):  # after the last line break: "" or a torn line
        try:
            record = json.loads(line)
            if not isinstance(record, dict):
                raise ValueError("not an object")
        except (ValueError, RecursionError) as error:
            raise InputError(
                f"{path}, line {number}, is not a metrics record", got=error, remedy=_REMEDY
            ) from error
        records.append(record)
    return records


def _planning(root: Path) -> list[Mapping[str, Any]]:
    for path in (root / "plans" / "metrics.jsonl", root / "metrics.jsonl"):
        records = [r for r in _json_lines(path) if {"sharder", "planning_time_s"} <= r.keys()]
        for record in records:
            if not isinstance(record["planning_time_s"], int | float | None):
                raise InputError(
                    f"{path}: planning_time_s is not a number",
                    got=quoted(record["planning_time_s"]),
                    remedy=_REMEDY,
                )
        if records:
            return records
    return []


def _plans(root: Path) -> dict[str, tuple[Path, ShardingPlan]]:
    """Plans by sharder: all of `plans/`, or what looks like a plan at the top level."""
    paths = sorted((root / "plans").glob("*.json"))
    if not paths:
        paths = [path for path in sorted(root.glob("*.json")) if _looks_like_plan(path)]
    loaded = [(path, load_plan(path)) for path in paths]
    sharders = [str(plan.provenance.get("sharder") or path.stem) for path, plan in loaded]
    return {
        sharder if sharders.count(sharder) == 1 else path.stem: (path, plan)
        for sharder, (path, plan) in zip(sharders, loaded, strict=True)
    }


def _looks_like_plan(path: Path) -> bool:
    value = read_json(path, "file")
    return isinstance(value, dict) and {"version", "topology", "tables"} <= value.keys()
