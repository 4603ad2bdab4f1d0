"""What ranks do in the tests of training; importable by name in spawned workers."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from autoshard.plan import ShardingPlan
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.sharding import LocalShard
from autoshard.runtime.worker import RankProcess
from autoshard.training.checkpoint import save_checkpoint
from autoshard.training.manifest import Manifest, read_manifest
from autoshard.training.restore import check_files, load_shards
from autoshard.training.shard_file import WEIGHTS
from tests.distributed.runtime_cases import message_of


def number(name: str, state: str, row: Tensor, column: Tensor) -> Tensor:
    """A number that tells table, state, row and column, exact in fp16."""
    key = sum(name.encode()) % 5 + 7 * len(state) % 11
    return (row * 13 + column * 3 + key) % 509


def fill(shards: tuple[LocalShard, ...]) -> None:
    """Give every element the number of its place in the whole table; states per row, that of
    the row and the shard's first column."""
    for local in shards:
        part = local.shard
        rows = torch.arange(part.row_offset, part.row_offset + part.num_rows)
        columns = torch.arange(part.col_offset, part.col_offset + part.num_cols)
        for state, target in ((WEIGHTS, local.weights), *local.optimizer_states.items()):
            if target.dim() == 2:
                target.copy_(number(local.table.name, state, rows[:, None], columns[None]))
            else:
                target.copy_(number(local.table.name, state, rows, columns[0]))


def save(
    process: RankProcess,
    plan: ShardingPlan,
    folder: str,
    step: int,
    progress: Callable[[int, int], None] | None = None,
    *,
    source: str | None = None,
    keep: int = 2,
) -> str:
    """Save filled tables, or those of another checkpoint under this plan."""
    embeddings = ShardedEmbeddings(plan, process.collectives)
    shards = embeddings.local_shards()
    if source is None:
        fill(shards)
    else:
        manifest = read_manifest(source)
        manifest.check_plan(plan)
        check_files(manifest, process.collectives)
        load_shards(manifest, shards)
    # Every rank names another folder; the first one's counts.
    place = folder if process.rank == 0 else f"{folder}-of-another-rank"
    saved = save_checkpoint(
        place,
        step=step,
        plan=plan,
        shards=shards,
        dense={"module": {"w": torch.full((2,), float(process.rank))}},
        state={"rank": process.rank},
        collectives=process.collectives,
        keep=keep,
        progress=progress,
    )
    return str(saved)


def resave(process: RankProcess, plan: ShardingPlan, source: str, folder: str, step: int) -> str:
    return save(process, plan, folder, step, source=source)


def save_many(process: RankProcess, plan: ShardingPlan, folder: str, keep: int) -> list[str]:
    return [Path(save(process, plan, folder, s, keep=keep)).name for s in (1, 2, 3, 3)]


def save_and_die(process: RankProcess, plan: ShardingPlan, folder: str, step: int) -> None:
    """Every rank is killed with a part of its file written."""

    def die(done: int, total: int) -> None:
        if done < total:
            os.kill(os.getpid(), signal.SIGKILL)

    save(process, plan, folder, step, die)


def save_on_a_full_disk(process: RankProcess, plan: ShardingPlan, folder: str, step: int) -> str:
    """Rank 1 runs out of space; the message that each rank raises."""

    def full(done: int, total: int) -> None:
        if process.rank == 1:
            raise OSError(28, "No space left on device")

    return message_of(lambda: save(process, plan, folder, step, full))


def resave_message(process: RankProcess, plan: ShardingPlan, source: str) -> str:
    return message_of(lambda: save(process, plan, "/nowhere", 1, source=source))


def whole_tables(manifest: Manifest) -> dict[tuple[str, str], Tensor]:
    """Every table and state put together by the manifest alone; [rows, columns], a state per
    row repeated over the columns of its shard."""
    from safetensors import safe_open

    tables: dict[tuple[str, str], Tensor] = {}
    for (table, state), parts in manifest.parts.items():
        facts = manifest.tables[table]
        whole = torch.full((facts["num_embeddings"], facts["embedding_dim"]), torch.nan)
        for file, part in parts:
            with safe_open(manifest.folder / file, framework="pt") as stored:
                values = stored.get_tensor(part.key).float()
            rows = slice(part.row_offset, part.row_offset + part.num_rows)
            columns = slice(part.col_offset, part.col_offset + part.num_cols)
            whole[rows, columns] = values if values.dim() == 2 else values[:, None]
        tables[table, state] = whole
    return tables
