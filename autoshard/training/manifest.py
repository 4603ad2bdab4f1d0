"""The manifest of a checkpoint: what was trained, how far, and which file holds what.

A checkpoint is a folder `step-00000100`. `manifest.json` names every other file with its
size and SHA-256, and for the ranks' files every rectangle in the coordinates of the whole
table. So nothing in it depends on the plan that wrote it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.errors import ArtifactError, InputError
from autoshard.files import fingerprint, read_json
from autoshard.plan import ShardingPlan
from autoshard.tables import Table
from autoshard.training.shard_file import WEIGHTS, FileFacts, StoredPart

KIND, VERSION = "autoshard-checkpoint", 1
MANIFEST_FILE = "manifest.json"
DENSE_FILE = "dense.pt"
_STEP_FOLDER = re.compile(r"step-(\d{8,})")
_TABLE_FACTS = (
    "feature_names",
    "num_embeddings",
    "embedding_dim",
    "pooling",
    "data_type",
    "weighted",
)


def step_folder(step: int) -> str:
    """The name of the checkpoint after `step` steps."""
    return f"step-{step:08d}"


def checkpoints_in(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints in a folder, (step, path), in rising order of steps."""
    found = []
    for path in folder.glob("step-*") if folder.is_dir() else ():
        match = _STEP_FOLDER.fullmatch(path.name)
        if match and (path / MANIFEST_FILE).is_file():
            found.append((int(match[1]), path))
    return sorted(found)


def latest_checkpoint(folder: str | Path) -> Path | None:
    """The newest complete checkpoint in a folder; None if there is none."""
    found = checkpoints_in(Path(folder))
    return found[-1][1] if found else None


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A checkpoint's manifest, checked."""

    folder: Path
    step: int
    tables: Mapping[str, Mapping[str, Any]]
    """By name, the facts that a table must share to take the checkpoint's rows."""
    optimizer: str
    eps: float
    state: Mapping[str, Any]
    """What the trainer wrote, in plain JSON values."""
    files: Mapping[str, FileFacts]
    parts: Mapping[tuple[str, str], Sequence[tuple[str, StoredPart]]]
    """By table and state, (file, part) of all its rectangles."""

    def check_plan(self, plan: ShardingPlan) -> None:
        """Refuse a plan whose tables or optimizer are not those of the checkpoint.

        Raises:
            ArtifactError: names the table and what differs.
        """
        names = {entry.table.name for entry in plan.tables}
        if lacking := sorted(names - set(self.tables)):
            raise ArtifactError(
                f"checkpoint {self.folder} does not have every table of the plan",
                got=_listed(lacking),
                remedy="plan for the tables that were trained",
            )
        if extra := sorted(set(self.tables) - names):
            raise ArtifactError(
                f"checkpoint {self.folder} has tables that the plan does not have",
                got=_listed(extra),
                remedy="plan for the tables that were trained",
            )
        for entry in plan.tables:
            stored, wanted = self.tables[entry.table.name], table_facts(entry.table)
            for name in _TABLE_FACTS:
                if stored[name] != wanted[name]:
                    raise ArtifactError(
                        f"checkpoint {self.folder}: table {entry.table.name!r} has another {name} "
                        "than in the plan",
                        got=stored[name],
                        allowed=wanted[name],
                    )
        training = plan.training
        for name, stored_value, value in (
            ("optimizer", self.optimizer, training.optimizer.value),
            ("eps", self.eps, float(training.eps)),
        ):
            if stored_value != value:
                raise ArtifactError(
                    f"checkpoint {self.folder} was trained with another {name} than the plan's",
                    got=stored_value,
                    allowed=value,
                    remedy="plan for the optimizer that was used",
                )


def table_facts(table: Table) -> dict[str, Any]:
    """What a table must share with a checkpoint's."""
    return {name: table.to_json()[name] for name in _TABLE_FACTS}


def manifest_json(
    *,
    step: int,
    plan: ShardingPlan,
    state: Mapping[str, Any],
    files: Mapping[str, FileFacts],
    parts: Mapping[str, Sequence[StoredPart]],
) -> dict[str, Any]:
    """The manifest as plain JSON values, fingerprint included."""
    body: dict[str, Any] = {
        "kind": KIND,
        "version": VERSION,
        "step": step,
        "tables": {entry.table.name: table_facts(entry.table) for entry in plan.tables},
        "optimizer": plan.training.optimizer.value,
        "eps": float(plan.training.eps),
        "state": dict(state),
        "files": {
            name: {
                **vars(facts),
                "parts": [part.to_json() for part in parts.get(name, ())],
            }
            for name, facts in files.items()
        },
    }
    return {**body, "fingerprint": fingerprint(body)}


def read_manifest(folder: str | Path) -> Manifest:
    """Read a manifest, and check it against itself and the sizes of its files.

    Raises:
        ArtifactError: it is no checkpoint, of another version, altered, or a file is
            missing or truncated.
    """
    folder = Path(folder)
    try:
        value = read_json(folder / MANIFEST_FILE, "checkpoint manifest")
    except InputError as error:
        raise ArtifactError(f"{folder} is not a checkpoint: {error}") from error
    if not isinstance(value, dict) or value.get("kind") != KIND:
        raise ArtifactError(f"{folder} is not a checkpoint of autoshard")
    if value.get("version") != VERSION:
        raise ArtifactError(
            f"checkpoint {folder} has another format version",
            got=value.get("version"),
            allowed=VERSION,
        )
    claimed = value.pop("fingerprint", None)
    try:
        actual: str | None = fingerprint(value)
    except ValueError:  # NaN or infinity, which the writer never leaves
        actual = None
    if claimed != actual:
        raise ArtifactError(
            f"checkpoint {folder} was altered: {MANIFEST_FILE} does not match its fingerprint",
            got=claimed,
            allowed=actual,
            remedy="use another checkpoint",
        )
    manifest = Manifest(
        folder=folder,
        step=value["step"],
        tables=value["tables"],
        optimizer=value["optimizer"],
        eps=value["eps"],
        state=value["state"],
        files={
            name: FileFacts(num_bytes=facts["num_bytes"], sha256=facts["sha256"])
            for name, facts in value["files"].items()
        },
        parts=_parts_by_table(value["files"]),
    )
    _check_files(manifest)
    _check_tiling(manifest)
    return manifest


def _parts_by_table(
    files: Mapping[str, Any],
) -> dict[tuple[str, str], list[tuple[str, StoredPart]]]:
    found: dict[tuple[str, str], list[tuple[str, StoredPart]]] = {}
    for name, facts in files.items():
        for value in facts["parts"]:
            part = StoredPart(**value)
            found.setdefault((part.table, part.state), []).append((name, part))
    return found


def _check_files(manifest: Manifest) -> None:
    for name, facts in manifest.files.items():
        path = manifest.folder / name
        if Path(name).name != name or not path.is_file():
            raise ArtifactError(
                f"checkpoint {manifest.folder} lacks its file {name}",
                remedy="use another checkpoint; all ranks must see one file system",
            )
        if path.stat().st_size != facts.num_bytes:
            raise ArtifactError(
                f"checkpoint {manifest.folder}: {name} is truncated or damaged",
                got=f"{path.stat().st_size} bytes",
                allowed=f"{facts.num_bytes} bytes",
                remedy="use another checkpoint",
            )


def _check_tiling(manifest: Manifest) -> None:
    """Every table must be there exactly once: equal area, and no two parts overlap."""
    for name, facts in manifest.tables.items():
        parts = [part for _, part in manifest.parts.get((name, WEIGHTS), ())]
        parts.sort(key=lambda part: (part.row_offset, part.col_offset))
        area = sum(part.num_rows * part.num_cols for part in parts)
        overlap = any(
            overlap_of(one, other) is not None
            for index, one in enumerate(parts)
            for other in parts[index + 1 :]
        )
        if area != facts["num_embeddings"] * facts["embedding_dim"] or overlap:
            raise ArtifactError(
                f"checkpoint {manifest.folder} does not hold table {name!r} exactly once"
            )


def overlap_of(one: Any, other: Any) -> tuple[slice, slice] | None:
    """Rows and columns of the table that two rectangles share; None for none."""
    rows = slice(
        max(one.row_offset, other.row_offset),
        min(one.row_offset + one.num_rows, other.row_offset + other.num_rows),
    )
    columns = slice(
        max(one.col_offset, other.col_offset),
        min(one.col_offset + one.num_cols, other.col_offset + other.num_cols),
    )
    if rows.start >= rows.stop or columns.start >= columns.stop:
        return None
    return rows, columns


def _listed(names: Sequence[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
