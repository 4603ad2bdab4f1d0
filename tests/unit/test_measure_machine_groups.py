"""Parts of a run make the whole again; rows of different machines never meet; nothing is lost."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autoshard.errors import InputError
from autoshard.measure.config import (
    CollectiveConfig,
    KernelConfig,
    MeasureConfig,
    SamplingConfig,
    SimulatedDevice,
)
from autoshard.measure.loading import load_collective_rows, load_kernel_rows
from autoshard.measure.machine_groups import ENVIRONMENT_FILE, merge_by_machine
from autoshard.measure.merging import merge_parts
from autoshard.measure.runner import measure_collectives, measure_kernels
from autoshard.measure.schema import RowKind
from autoshard.measure.store import read_part, write_rows
from autoshard.problem import Optimizer
from cost_net.dataset import load_measurements
from tests.cost_cases import pool

TABLES = [*pool("train", 12), *pool("validation", 4), *pool("test", 6)]
CONFIG = MeasureConfig(
    num_sets=22,
    num_repeated_sets=5,
    kernels=KernelConfig(device=SimulatedDevice.SIMULATED),
    sampling=SamplingConfig(max_shards=5, num_samples=(1024, 4096), max_iteration_ms=1000.0),
    collectives=CollectiveConfig(
        device=SimulatedDevice.SIMULATED, world_sizes=(2, 4), num_collectives=4
    ),
)
NUM_ROWS = 2 * (22 + 5)  # both passes


def measure(out: Path, **changes: object) -> Path:
    config = dataclasses.replace(CONFIG, **changes)
    measure_kernels(config, TABLES, out)
    measure_collectives(config, out)
    return out


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measure(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="module")
def parts(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("sweep")
    return [measure(root / str(part), part=part, num_parts=3) for part in range(3)]


@pytest.fixture(scope="module")
def other_machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return measure(tmp_path_factory.mktemp("h100"), simulated_device="h100-80gb")


def same_rows(folder: Path, whole: Path) -> None:
    for load, name in ((load_kernel_rows, "kernels"), (load_collective_rows, "collectives")):
        found, expected = (
            load(place).drop(columns="measured_at").sort_values("key", ignore_index=True)
            for place in (folder / f"{name}.parquet", whole / name)
        )
        pd.testing.assert_frame_equal(found, expected)


def test_the_parts_of_a_run_are_disjoint_and_make_the_whole(whole, parts, tmp_path):
    keys = [set(load_kernel_rows(part / "kernels")["key"]) for part in parts]
    assert sum(map(len, keys)) == len(set.union(*keys)) == NUM_ROWS
    for number, part in enumerate(parts):
        for rows in (
            load_kernel_rows(part / "kernels"),
            load_collective_rows(part / "collectives"),
        ):
            assert set(rows["index"] % 3) == {number}
    merged = merge_by_machine(list(reversed(parts)), tmp_path)
    (group,) = merged.groups
    assert group.is_complete
    assert [rows.num_rows for rows in group.rows] == [NUM_ROWS, 8]
    assert [rows.num_sets for rows in group.rows] == [22, 8]
    same_rows(group.folder, whole)  # the order of measurement, too
    assert load_measurements([group.folder]).kernels.num_sets == 27


def test_missing_and_unfinished_parts_are_told(parts, tmp_path):
    merged = merge_by_machine([parts[0], parts[2]], tmp_path)
    kernels, _ = merged.groups[0].rows
    assert kernels.coverage[0].missing == (1,)
    assert str(kernels.coverage[0]) == "2 of 3; missing: 1"
    assert not merged.groups[0].is_complete
    with pytest.raises(InputError, match=r"rows are missing.*missing: 1"):
        merge_by_machine([parts[0], parts[2]], tmp_path / "strict", require_complete=True)
    assert not (tmp_path / "strict").exists()
    rows, metadata = read_part(next((parts[1] / "kernels").glob("part-*")))
    write_rows(tmp_path / "cut.parquet", RowKind.KERNELS, rows.slice(0, 5), metadata)
    cut = merge_by_machine([parts[0], parts[2], tmp_path / "cut.parquet"], tmp_path / "b")
    (coverage,) = cut.groups[0].rows[0].coverage
    assert coverage.unfinished == (1,)
    assert f"part 1 has 5 of {len(rows)} rows" in str(coverage)


def test_a_part_without_any_draw_is_not_missing(tmp_path):
    sources = [
        measure(tmp_path / str(part), num_sets=2, num_repeated_sets=0, part=part, num_parts=3)
        for part in range(3)
    ]
    assert not list((sources[2] / "kernels").glob("part-*"))
    merged = merge_by_machine(sources, tmp_path / "merged", require_complete=True)
    assert merged.groups[0].rows[0].num_rows == 4


def test_machines_and_optimizers_get_folders_of_their_own(parts, other_machine, tmp_path):
    adam = measure(
        tmp_path / "adam", kernels=dataclasses.replace(CONFIG.kernels, optimizer=Optimizer.ADAM)
    )
    merged = merge_by_machine([*parts, other_machine, adam], tmp_path / "out")
    assert len(merged.groups) == 3
    assert len({group.folder.name[:8] for group in merged.groups}) == 2
    devices = []
    for group in merged.groups:
        described = json.loads((group.folder / ENVIRONMENT_FILE).read_text())
        kernels = load_kernel_rows(group.folder / "kernels.parquet")
        collectives = load_collective_rows(group.folder / "collectives.parquet")
        for rows in (kernels, collectives):
            assert set(rows["hardware_fingerprint"]) == {described["hardware_fingerprint"]}
        assert described["hardware_fingerprint"].startswith(group.folder.name[:8])
        assert len(set(kernels["optimizer"])) == 1
        assert described["kernels"]["settings"]["optimizer"] in group.folder.name
        devices.append(described["hardware"]["simulated_device"])
    assert sorted(devices) == ["a100-80gb", "a100-80gb", "h100-80gb"]


def test_merging_again_gives_the_same_bytes_and_drops_what_occurs_again(parts, tmp_path):
    first = merge_by_machine([*parts], tmp_path / "a")
    second = merge_by_machine([first.groups[0].folder, *reversed(parts)], tmp_path / "b")
    assert first.num_dropped == 0
    assert second.num_dropped == NUM_ROWS + 8
    names = {path.name for path in first.groups[0].folder.iterdir()}
    assert names == {"kernels.parquet", "collectives.parquet", ENVIRONMENT_FILE}
    for name in names:
        one, two = (merged.groups[0].folder / name for merged in (first, second))
        assert one.read_bytes() == two.read_bytes()


def test_rows_that_differ_are_refused_and_nothing_is_written(parts, tmp_path):
    part = next((parts[0] / "kernels").glob("part-*"))
    rows, metadata = read_part(part)
    place = rows.column_names.index("bwd_ms")
    slower = pa.array([time_ms * 1.01 for time_ms in rows["bwd_ms"].to_pylist()])
    write_rows(
        tmp_path / "again.parquet",
        RowKind.KERNELS,
        rows.set_column(place, "bwd_ms", slower),
        metadata,
    )
    with pytest.raises(InputError, match=r"twice with different values.*got: bwd_ms"):
        merge_by_machine([parts[0], tmp_path / "again.parquet"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_simulated_again_at_another_time_is_the_same(parts, tmp_path):
    again = measure(tmp_path / "again", part=0, num_parts=3)
    merged = merge_by_machine([again, *parts], tmp_path / "out")
    assert merged.num_dropped > 0
    first = merge_by_machine(parts, tmp_path / "first")
    for name in ("kernels.parquet", "collectives.parquet"):
        one, two = (m.groups[0].folder / name for m in (merged, first))
        assert one.read_bytes() == two.read_bytes()  # the earlier row is kept


def test_patterns_name_folders_and_skip_what_is_none(parts, tmp_path):
    root = parts[0].parent
    (root / "multirun.yaml").write_text("")
    merged = merge_by_machine([str(root / "*")], tmp_path / "out")
    assert merged.groups[0].is_complete
    by_file = merge_by_machine([str(root / "**" / "part-*.parquet")], tmp_path / "files")
    assert by_file.groups[0].is_complete
    with pytest.raises(InputError, match="holds no measurements"):
        merge_by_machine([str(root / "nothing*")], tmp_path / "out")
    with pytest.raises(InputError, match=r"multirun\.yaml"):
        merge_by_machine([root / "multirun.yaml"], tmp_path / "out")
    with pytest.raises(InputError, match="does not exist"):
        merge_by_machine([root / "9"], tmp_path / "out")
    with pytest.raises(InputError, match="nothing to merge"):
        merge_by_machine([], tmp_path / "out")


@pytest.mark.parametrize(("part", "num_parts"), [(4, 4), (1, 1), (-1, 2), (0, 0)])
def test_parts_that_do_not_exist_are_refused(part: int, num_parts: int):
    with pytest.raises(InputError, match="part"):
        MeasureConfig(part=part, num_parts=num_parts)


def test_the_text_of_a_shard_set_stands_once_in_a_merged_file(whole, tmp_path):
    path = tmp_path / "kernels.parquet"
    merge_parts(whole / "kernels", path)
    columns = pq.ParquetFile(path).metadata.row_group(0)
    (slices,) = [
        columns.column(number)
        for number in range(columns.num_columns)
        if columns.column(number).path_in_schema == "slices"
    ]
    frame = pd.read_parquet(path)  # without any code of ours
    assert len(frame) == NUM_ROWS
    once = sum(map(len, set(frame["slices"])))
    assert once < slices.total_uncompressed_size < 1.2 * once
    assert path.stat().st_size < 22 * 1024 + 20_000  # 1 KiB per set beside the file's own columns
    pd.testing.assert_frame_equal(
        frame.sort_values("key", ignore_index=True),
        load_kernel_rows(whole / "kernels").sort_values("key", ignore_index=True),
    )
