"""Loads a checkpoint into any plan: each rank reads what overlaps its own rectangles.

The files are mapped, and copied piece by piece, so that a rank never holds more than its
own shards and one piece.

Row-wise Adagrad keeps, per row, the mean over the columns of a shard of the squared
gradients. Where columns are cut differently than in the checkpoint, a shard's state is the
mean of the stored states over its columns, each weighted by the columns that it stands for.
For columns that are put together this is exactly the state of the whole; columns that are
cut apart all start with the state of their whole.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autoshard.errors import ArtifactError
from autoshard.runtime.collectives import Collectives
from autoshard.runtime.sharding import LocalShard
from autoshard.runtime.together import together
from autoshard.training.manifest import DENSE_FILE, Manifest, overlap_of
from autoshard.training.shard_file import WEIGHTS, StoredPart, digest_of, row_ranges


def check_files(
    manifest: Manifest,
    collectives: Collectives,
    progress: Callable[[int, int], None] | None = None,
) -> None:
    """Compare every file with its checksum; the ranks share the work.

    Raises:
        ArtifactError: a file is damaged; on every rank.
    """

    def check() -> None:
        files = sorted(manifest.files)
        for name in files[collectives.rank :: collectives.world_size]:
            try:
                actual = digest_of(manifest.folder / name, progress)
            except OSError as error:
                raise _damaged(manifest, name, error) from error
            if actual != manifest.files[name].sha256:
                raise _damaged(manifest, name, "its checksum differs")

    together(collectives, "checking a checkpoint", check)


def load_shards(manifest: Manifest, shards: Sequence[LocalShard]) -> None:
    """Fill a rank's shards, weights and optimizer states, in place.

    Raises:
        ArtifactError: the checkpoint lacks a state, or a file cannot be read.
    """
    from safetensors import safe_open

    with contextlib.ExitStack() as stack:
        opened: dict[str, Any] = {}

        def stored(file: str, part: StoredPart) -> Any:
            if file not in opened:
                path = manifest.folder / file
                opened[file] = stack.enter_context(safe_open(path, framework="pt"))
            return opened[file].get_slice(part.key)

        for local in shards:
            for state, target in ((WEIGHTS, local.weights), *local.optimizer_states.items()):
                parts = manifest.parts.get((local.table.name, state), ())
                covered = 0
                if target.dim() == 1:
                    target.zero_()
                for file, part in parts:
                    try:
                        covered += _copy(local, target, part, partial(stored, file, part))
                    except ArtifactError:
                        raise
                    except Exception as error:  # safetensors has an exception of its own
                        raise _damaged(manifest, file, error) from error
                if covered != local.shard.num_rows * local.shard.num_cols:
                    raise ArtifactError(
                        f"checkpoint {manifest.folder} does not hold all of "
                        f"{state!r} of table {local.table.name!r}"
                    )


def _copy(local: LocalShard, target: Tensor, part: StoredPart, stored: Callable[[], Any]) -> int:
    """Copy what a stored part and a shard share; how many elements of the table that is."""
    shared = overlap_of(local.shard, part)
    if shared is None:
        return 0
    rows, columns = shared
    tensor = stored()
    num_cols = columns.stop - columns.start
    per_row = target.dim() == 1
    # Of a state with one number per row, a part speaks for the columns that are shared.
    weight = num_cols / local.shard.num_cols
    row_bytes = target.element_size() * (1 if per_row else num_cols)
    for piece in row_ranges(rows.stop - rows.start, row_bytes):
        first, last = rows.start + piece.start, rows.start + piece.stop
        source_rows = slice(first - part.row_offset, last - part.row_offset)
        target_rows = slice(first - local.shard.row_offset, last - local.shard.row_offset)
        if per_row:
            values = tensor[source_rows].to(target.device)
            target[target_rows].add_(values, alpha=weight)
        else:
            source = tensor[
                source_rows, columns.start - part.col_offset : columns.stop - part.col_offset
            ]
            start = columns.start - local.shard.col_offset
            target[target_rows, start : start + num_cols].copy_(source)
    return (rows.stop - rows.start) * num_cols


def load_dense(manifest: Manifest) -> dict[str, Any]:
    """The state dictionaries that `save_checkpoint` was given as `dense`.

    Raises:
        ArtifactError: the file cannot be read.
    """
    try:
        value = torch.load(manifest.folder / DENSE_FILE, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises pickle, zip, runtime and OS errors
        raise _damaged(manifest, DENSE_FILE, error) from error
    if not isinstance(value, dict):
        raise _damaged(manifest, DENSE_FILE, "not a dictionary")
    return value


def _damaged(manifest: Manifest, name: str, why: object) -> ArtifactError:
    return ArtifactError(
        f"checkpoint {manifest.folder} is damaged: {name}",
        got=str(why).splitlines()[0] if str(why) else type(why).__name__,
        remedy="use another checkpoint",
    )
