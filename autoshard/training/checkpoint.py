"""Saves a training run: every rank writes what it holds, rank 0 makes it one checkpoint.

    DIR/step-00000100/manifest.json           what, how far, sizes and checksums
                      rank-00000.safetensors  rectangles of tables, with optimizer state
                      dense.pt                dense layers and their optimizer

All is written into a hidden folder beside the final one, through to the disk, and renamed
as the last thing. A run that is killed at any moment leaves the previous checkpoint valid.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from autoshard.errors import InputError, UnsupportedError
from autoshard.plan import ShardingPlan
from autoshard.problem import Optimizer
from autoshard.runtime.collectives import Collectives
from autoshard.runtime.sharding import LocalShard
from autoshard.runtime.together import together
from autoshard.shards import ShardingType
from autoshard.training.manifest import (
    DENSE_FILE,
    MANIFEST_FILE,
    checkpoints_in,
    manifest_json,
    step_folder,
)
from autoshard.training.shard_file import WEIGHTS, FileFacts, StoredPart, digest_of, write_parts

#: Replicas below this size are written by one rank; of larger ones, every rank writes a part.
_SMALL_REPLICA_BYTES = 2**20
_TEMPORARY_PREFIX = ".step-"


def check_can_save(plan: ShardingPlan) -> None:
    """Refuse a plan whose state a checkpoint cannot hold, before any training.

    Raises:
        UnsupportedError: the fused Adam keeps its step count to itself.
    """
    if plan.training.optimizer is Optimizer.ADAM:
        raise UnsupportedError(
            "checkpoints do not hold the step count of the fused Adam",
            got=plan.training.optimizer.value,
            allowed="sgd, adagrad, rowwise_adagrad",
            remedy="train without checkpoints, or plan for another optimizer",
        )


def check_folder(folder: str | Path, what: str) -> None:
    """Refuse a folder that cannot be written to, before any training.

    Args:
        folder: may not exist yet.
        what: is to go there, for the message.

    Raises:
        InputError: it is a file, or is not writable.
    """
    path = Path(folder)
    while not path.exists() and path != path.parent:
        path = path.parent
    if not path.is_dir() or not os.access(path, os.W_OK | os.X_OK):
        raise InputError(
            f"{what} cannot go to {folder}",
            got=f"no permission to write in {path}" if path.is_dir() else f"{path} is no folder",
            remedy="choose a writable folder",
        )


def save_checkpoint(
    folder: str | Path,
    *,
    step: int,
    plan: ShardingPlan,
    shards: Sequence[LocalShard],
    dense: Mapping[str, Any],
    state: Mapping[str, Any],
    collectives: Collectives,
    keep: int = 2,
    progress: Callable[[int, int], None] | None = None,
) -> Path:
    """Save what all ranks hold; every rank must call it.

    Args:
        folder: where checkpoints go, one file system for all ranks. Rank 0's counts.
        step: steps done.
        plan: that the run executes.
        shards: this rank's, from `ShardedEmbeddings.local_shards`.
        dense: state dictionaries of dense layers and optimizer; rank 0's is written.
        state: what the trainer needs to go on, in plain JSON values; rank 0's is written.
        collectives: of all ranks, with a time limit that covers the slowest disk.
        keep: checkpoints to leave in the folder, this one included, >= 1.
        progress: called with bytes written by this rank and bytes in all.

    Returns:
        The checkpoint's folder.

    Raises:
        InputError: a rank cannot write there, or ranks see different file systems.
        CollectiveError: a rank died, or did not answer in time.
    """
    rank, world_size = collectives.rank, collectives.world_size
    is_first = rank == 0
    folder = Path(folder)
    temporary = Path(
        str(together(collectives, "making a folder", lambda: _make(folder) if is_first else "")[0])
    )
    try:
        parts = _own_parts(plan, shards, rank, world_size)
        name = f"rank-{rank:05d}.safetensors"

        def write() -> tuple[str, FileFacts, list[StoredPart]]:
            if not temporary.is_dir():
                raise InputError(
                    f"checkpoint folder {temporary.parent} is not the one that rank 0 sees",
                    remedy="give a folder on a file system that all nodes share",
                )
            with _disk_errors(temporary):
                facts = write_parts(temporary / name, parts, progress)
            return name, facts, [part for part, _ in parts]

        written = together(collectives, "writing a checkpoint", write)

        def finish() -> str:
            if not is_first:
                return ""
            with _disk_errors(folder):
                files = {file: facts for file, facts, _ in written}
                files[DENSE_FILE] = _write_dense(temporary / DENSE_FILE, dense)
                value = manifest_json(
                    step=step,
                    plan=plan,
                    state=state,
                    files=files,
                    parts={file: stored for file, _, stored in written},
                )
                _write_through(temporary / MANIFEST_FILE, json.dumps(value, allow_nan=False))
                _sync_folder(temporary)
                final = temporary.parent / step_folder(step)
                _replace(temporary, final)
                _prune(final, keep)
            return str(final)

        return Path(together(collectives, "finishing a checkpoint", finish)[0])
    finally:
        if is_first:
            shutil.rmtree(temporary, ignore_errors=True)


def check_writable(folder: Path) -> None:
    """Refuse a folder that nothing can be written to: a training would end, and be lost, in it.

    Raises:
        InputError: it cannot be made, or not be written to.
    """
    with _disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=_TEMPORARY_PREFIX, dir=folder):
            pass


def _make(folder: Path) -> str:
    """A new hidden folder; what an earlier, killed run left of its own goes away."""
    with _disk_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for stale in folder.glob(f"{_TEMPORARY_PREFIX}*"):
            shutil.rmtree(stale, ignore_errors=True)
        temporary = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=folder.resolve()))
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o777 & ~umask)  # mkdtemp makes folders private
    return str(temporary)


def _own_parts(
    plan: ShardingPlan, shards: Sequence[LocalShard], rank: int, world_size: int
) -> list[tuple[StoredPart, Tensor]]:
    """What this rank writes: its rectangles, and its share of the replicas."""
    replicated = [
        entry.table.name
        for entry in plan.tables
        if entry.sharding_type is ShardingType.DATA_PARALLEL
    ]
    position = {name: index for index, name in enumerate(replicated)}
    parts = []
    for local in shards:
        rows = slice(0, local.shard.num_rows)
        if local.table.name in position:
            rows = _replica_rows(local, position[local.table.name], rank, world_size)
        if rows.start >= rows.stop:
            continue
        for state, tensor in ((WEIGHTS, local.weights), *local.optimizer_states.items()):
            part = StoredPart(
                table=local.table.name,
                state=state,
                row_offset=local.shard.row_offset + rows.start,
                col_offset=local.shard.col_offset,
                num_rows=rows.stop - rows.start,
                num_cols=local.shard.num_cols,
            )
            parts.append((part, tensor[rows]))
    return parts


def _replica_rows(local: LocalShard, position: int, rank: int, world_size: int) -> slice:
    num_rows = local.shard.num_rows
    if local.weights.numel() * local.weights.element_size() < _SMALL_REPLICA_BYTES:
        return slice(0, num_rows if position % world_size == rank else 0)
    return slice(num_rows * rank // world_size, num_rows * (rank + 1) // world_size)


def _write_dense(path: Path, dense: Mapping[str, Any]) -> FileFacts:
    with path.open("xb") as stream:
        torch.save(dict(dense), stream)
        stream.flush()
        os.fsync(stream.fileno())
    return FileFacts(num_bytes=path.stat().st_size, sha256=digest_of(path))


def _write_through(path: Path, text: str) -> None:
    with path.open("x", encoding="utf-8") as stream:
        stream.write(text + "\n")
        stream.flush()
        os.fsync(stream.fileno())


def _replace(fresh: Path, final: Path) -> None:
    """Rename into place; an older checkpoint of the same step makes room first."""
    if final.exists():
        aside = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=final.parent))
        final.rename(aside / "old")
        fresh.rename(final)
        shutil.rmtree(aside, ignore_errors=True)
    else:
        fresh.rename(final)
    _sync_folder(final.parent)


def _prune(final: Path, keep: int) -> None:
    older = [path for _, path in checkpoints_in(final.parent) if path != final]
    for path in older[: len(older) + 1 - max(1, keep)]:
        # Hidden first: a checkpoint that is half gone must not look complete.
        hidden = Path(tempfile.mkdtemp(prefix=_TEMPORARY_PREFIX, dir=final.parent))
        path.rename(hidden / path.name)
        shutil.rmtree(hidden, ignore_errors=True)


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def _disk_errors(place: Path) -> Any:
    """Turn an `OSError` into an `InputError` that names the place."""
    try:
        yield
    except OSError as error:
        raise InputError(
            f"cannot write a checkpoint in {place}",
            got=error.strerror or str(error),
            remedy="choose a writable folder with enough space",
        ) from error
