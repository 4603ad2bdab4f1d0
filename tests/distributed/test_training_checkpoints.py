"""Checkpoints: any plan to any plan, whole or not at all, and refused where they do not fit."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from autoshard.errors import ArtifactError, InputError, UnsupportedError, WorkerError
from autoshard.files import fingerprint
from autoshard.plan import ShardingPlan
from autoshard.problem import Optimizer
from autoshard.runtime.group import WorkerGroup
from autoshard.shards import Shard, ShardingType
from autoshard.tables import DataType, PoolingType, Table
from autoshard.training.checkpoint import check_can_save, check_folder
from autoshard.training.manifest import latest_checkpoint, read_manifest
from autoshard.training.restore import load_dense
from autoshard.training.shard_file import WEIGHTS
from tests.distributed.model_cases import Kind, make_plan
from tests.distributed.runtime_cases import run_ranks
from tests.distributed.training_cases import (
    number,
    resave,
    resave_message,
    save,
    save_and_die,
    save_many,
    save_on_a_full_disk,
    whole_tables,
)

Groups = dict[int, WorkerGroup]

TABLES = (
    Table(name="a", num_embeddings=37, embedding_dim=12, pooling_factor=1),
    # Wide enough that every rank writes rows of the replica.
    Table(name="b/×", num_embeddings=5000, embedding_dim=60, pooling_factor=1),
    Table(name="c", num_embeddings=11, embedding_dim=6, pooling_factor=1, data_type=DataType.FP16),
    Table(name="d", num_embeddings=2, embedding_dim=4, pooling_factor=1),
)
TW: list[Kind] = ["0", "1", "0", "1"]
RW: list[Kind] = [ShardingType.ROW_WISE] * 4
CW: list[Kind] = [
    [Shard(0, 0, 0, 37, 4), Shard(1, 0, 4, 37, 8)],
    [Shard(1, 0, 0, 5000, 40), Shard(0, 0, 40, 5000, 20)],
    [Shard(0, 0, 0, 11, 2), Shard(1, 0, 2, 11, 4)],
    "1",
]
CW_TYPES = [ShardingType.COLUMN_WISE] * 3 + [ShardingType.TABLE_WISE]


def plan_of(
    kinds: list[Kind],
    world_size: int,
    optimizer: Optimizer = Optimizer.ADAGRAD,
    tables: tuple[Table, ...] = TABLES,
) -> ShardingPlan:
    types = CW_TYPES if kinds is CW else None
    return make_plan(list(tables), kinds, world_size, optimizer, sharding_types=types)


@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ADAGRAD, Optimizer.ROWWISE_ADAGRAD])
def test_a_checkpoint_goes_from_any_plan_to_any_plan(
    groups: Groups, tmp_path: Path, optimizer: Optimizer
) -> None:
    """Table-wise at 2 ranks, columns at 2, rows at 3, replicas at 1 and at 2: the same tables."""
    first = run_ranks(groups, 2, save, plan_of(TW, 2, optimizer), str(tmp_path / "0"), 7)
    assert first == [str(tmp_path / "0" / "step-00000007")] * 2
    chain: list[tuple[list[Kind], int]] = [
        (CW, 2),
        (RW, 3),
        (["dp"] * 4, 1),
        (["dp"] * 4, 2),
        (TW, 2),
    ]
    source = first[0]
    for step, (kinds, world_size) in enumerate(chain):
        plan = plan_of(kinds, world_size, optimizer)
        (source, *_) = run_ranks(
            groups, world_size, resave, plan, source, str(tmp_path / f"{step + 1}"), step
        )
        manifest = read_manifest(source)
        assert manifest.step == step
        tables = whole_tables(manifest)
        states = {"sgd": set(), "adagrad": {"sum"}, "rowwise_adagrad": {"sum"}}[optimizer.value]
        assert {state for _, state in tables} == {WEIGHTS, *states}
        for table in TABLES:
            rows = torch.arange(table.num_embeddings)[:, None]
            columns = torch.arange(table.embedding_dim)[None]
            assert torch.equal(
                tables[table.name, WEIGHTS], number(table.name, WEIGHTS, rows, columns).float()
            )
            if states:
                if optimizer is Optimizer.ROWWISE_ADAGRAD:
                    columns = torch.zeros_like(columns)  # one number per row
                expected = number(table.name, "sum", rows, columns).float()
                torch.testing.assert_close(tables[table.name, "sum"], expected)


def test_states_of_column_shards_are_put_together_by_their_widths(
    groups: Groups, tmp_path: Path
) -> None:
    (columns, _) = run_ranks(
        groups, 2, save, plan_of(CW, 2, Optimizer.ROWWISE_ADAGRAD), str(tmp_path / "cw"), 1
    )
    table = TABLES[0]
    rows = torch.arange(table.num_embeddings)
    left, right = (number("a", "sum", rows, torch.tensor(c)).float() for c in (0, 4))
    plan = plan_of(TW, 2, Optimizer.ROWWISE_ADAGRAD)
    (whole, _) = run_ranks(groups, 2, resave, plan, columns, str(tmp_path / "tw"), 1)
    state = whole_tables(read_manifest(whole))["a", "sum"]
    torch.testing.assert_close(state[:, 0], (4 * left + 8 * right) / 12)
    # Cut in the middle, the left half has 4 columns of the left shard and 2 of the right one.
    halves: list[Kind] = [[Shard(0, 0, 0, 37, 6), Shard(1, 0, 6, 37, 6)], *CW[1:]]
    plan = make_plan(list(TABLES), halves, 2, Optimizer.ROWWISE_ADAGRAD, sharding_types=CW_TYPES)
    (other, _) = run_ranks(groups, 2, resave, plan, columns, str(tmp_path / "halves"), 1)
    state = whole_tables(read_manifest(other))["a", "sum"]
    torch.testing.assert_close(state[:, 0], (4 * left + 2 * right) / 6)
    torch.testing.assert_close(state[:, 6], right)


def test_replicas_are_written_once_and_large_ones_by_every_rank(
    groups: Groups, tmp_path: Path
) -> None:
    (folder, _) = run_ranks(groups, 2, save, plan_of(["dp"] * 4, 2), str(tmp_path), 1)
    manifest = read_manifest(folder)
    assert len(manifest.parts["b/×", WEIGHTS]) == 2
    assert [len(manifest.parts[name, WEIGHTS]) for name in "acd"] == [1, 1, 1]
    weights = 37 * 12 * 4 + 5000 * 60 * 4 + 11 * 6 * 2 + 2 * 4 * 4
    states = (37 * 12 + 5000 * 60 + 11 * 6 + 2 * 4) * 4
    sizes = [f.num_bytes for n, f in manifest.files.items() if n.startswith("rank-")]
    assert 0 <= sum(sizes) - weights - states < 4096  # headers
    # Rank 0 decides what is common, and where.
    assert load_dense(manifest)["module"]["w"].tolist() == [0, 0]
    assert manifest.state == {"rank": 0}
    assert not (tmp_path.parent / f"{tmp_path.name}-of-another-rank").exists()


def test_only_the_newest_checkpoints_are_kept(groups: Groups, tmp_path: Path) -> None:
    names = run_ranks(groups, 2, save_many, plan_of(TW, 2), str(tmp_path), 2)
    assert names == [["step-00000001", "step-00000002", "step-00000003", "step-00000003"]] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["step-00000002", "step-00000003"]
    assert latest_checkpoint(tmp_path) == tmp_path / "step-00000003"
    assert latest_checkpoint(tmp_path / "missing") is None


def test_a_run_that_is_killed_while_writing_leaves_the_checkpoint_before(
    tmp_path: Path,
) -> None:
    plan = plan_of(TW, 2)
    with WorkerGroup(2, timeout_s=20) as group:
        group.run(save, plan, str(tmp_path), 1)
        with pytest.raises(WorkerError, match="was killed by SIGKILL"):
            group.run(save_and_die, plan, str(tmp_path), 2)
    left = {p.name for p in tmp_path.iterdir()}
    assert "step-00000002" not in left
    assert any(name.startswith(".step-") for name in left)
    latest = latest_checkpoint(tmp_path)
    assert latest == tmp_path / "step-00000001"
    assert torch.isfinite(whole_tables(read_manifest(latest))["a", WEIGHTS]).all()
    with WorkerGroup(2, timeout_s=20) as group:
        group.run(save, plan, str(tmp_path), 2)
    assert {p.name for p in tmp_path.iterdir()} == {"step-00000001", "step-00000002"}


def test_a_full_disk_on_one_rank_is_told_by_all(groups: Groups, tmp_path: Path) -> None:
    plan = plan_of(TW, 2)
    messages = run_ranks(groups, 2, save_on_a_full_disk, plan, str(tmp_path), 1)
    for message in messages:
        assert message.startswith("InputError: rank 1: cannot write a checkpoint")
        assert "No space left on device" in message
    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    return Path(run_ranks({}, 1, save, plan_of(["0"] * 4, 1), str(tmp_path / "good"), 1)[0])


def damage_shard(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(content)


def damage_dense(folder: Path) -> None:
    path = folder / "dense.pt"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 0xFF
    path.write_bytes(content)


def truncate(folder: Path) -> None:
    path = folder / "rank-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1])


def lose_a_file(folder: Path) -> None:
    (folder / "dense.pt").unlink()


def alter_manifest(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_text(path.read_text().replace('"step": 1', '"step": 9'))


def sign(path: Path, value: dict[str, object]) -> None:
    value.pop("fingerprint", None)
    path.write_text(json.dumps({**value, "fingerprint": fingerprint(value)}))


def drop_a_part(folder: Path) -> None:
    path = folder / "manifest.json"
    value = json.loads(path.read_text())
    value["files"]["rank-00000.safetensors"]["parts"].pop(0)
    sign(path, value)


def newer_version(folder: Path) -> None:
    path = folder / "manifest.json"
    sign(path, {**json.loads(path.read_text()), "version": 99})


def other_kind(folder: Path) -> None:
    sign(folder / "manifest.json", {"kind": "something"})


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (damage_shard, "is damaged: rank-00000.safetensors; got: its checksum differs"),
        (damage_dense, "is damaged: dense.pt; got: its checksum differs"),
        (truncate, "rank-00000.safetensors is truncated or damaged"),
        (lose_a_file, "lacks its file dense.pt"),
        (alter_manifest, "does not match its fingerprint"),
        (drop_a_part, "does not hold table 'a' exactly once"),
        (newer_version, "another format version; got: 99; allowed: 1"),
        (other_kind, "is not a checkpoint of autoshard"),
    ],
)
def test_damage_is_found_before_anything_is_loaded(saved: Path, damage, told: str) -> None:  # type: ignore[no-untyped-def]
    damage(saved)
    (message,) = run_ranks({}, 1, resave_message, plan_of(["0"] * 4, 1), str(saved))
    assert message.startswith("ArtifactError")
    assert told in message


def test_damage_that_one_rank_finds_is_told_by_all(groups: Groups, tmp_path: Path) -> None:
    (folder, _) = run_ranks(groups, 2, save, plan_of(TW, 2), str(tmp_path), 1)
    path = Path(folder) / "rank-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)
    messages = run_ranks(groups, 2, resave_message, plan_of(TW, 2), folder)
    assert messages[0] == messages[1]
    assert "is damaged: rank-00001.safetensors" in messages[0]


def changed(index: int, **fields: object) -> tuple[Table, ...]:
    from dataclasses import replace

    tables = list(TABLES)
    tables[index] = replace(tables[index], **fields)  # type: ignore[arg-type]
    return tuple(tables)


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        (
            changed(0, name="z", feature_names=("a",)),
            "does not have every table of the plan; got: z",
        ),
        (TABLES[:3], "has tables that the plan does not have; got: d"),
        (changed(0, num_embeddings=38), "table 'a' has another num_embeddings"),
        (changed(0, embedding_dim=8), "table 'a' has another embedding_dim"),
        (changed(2, data_type=DataType.FP32), "table 'c' has another data_type"),
        (changed(3, pooling=PoolingType.MEAN), "table 'd' has another pooling"),
        (changed(3, feature_names=("x",)), "table 'd' has another feature_names"),
    ],
)
def test_other_tables_are_refused_by_name(
    saved: Path, tables: tuple[Table, ...], told: str
) -> None:
    plan = make_plan(list(tables), ["0"] * len(tables), 1, Optimizer.ADAGRAD)
    with pytest.raises(ArtifactError) as caught:
        read_manifest(saved).check_plan(plan)
    assert told in str(caught.value)


def test_another_optimizer_is_refused(saved: Path) -> None:
    with pytest.raises(ArtifactError, match="another optimizer"):
        read_manifest(saved).check_plan(plan_of(["0"] * 4, 1, Optimizer.SGD))
    with pytest.raises(UnsupportedError, match="adam"):
        check_can_save(plan_of(["0"] * 4, 1, Optimizer.ADAM))


def test_places_that_cannot_hold_a_checkpoint_are_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for place in ("file", "file/below"):
        with pytest.raises(InputError, match="is no folder"):
            check_folder(tmp_path / place, "checkpoints")
    check_folder(tmp_path / "new" / "one", "checkpoints")
    assert not (tmp_path / "new").exists()
