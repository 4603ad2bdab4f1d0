import dataclasses
import json

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from autoshard.distributions import IdDistribution
from autoshard.errors import InputError
from autoshard.features import shard_features
from autoshard.measure.environment import Environment, describe_environment
from autoshard.measure.loading import load_collective_rows, load_kernel_rows, row_features
from autoshard.measure.merging import merge_parts
from autoshard.measure.schema import COLLECTIVE_COLUMNS, KERNEL_COLUMNS, RowKind
from autoshard.measure.slices_json import slices_to_text
from autoshard.measure.store import PartStore, part_paths
from autoshard.problem import Optimizer, TrainingConfig
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import BagLengths, DataType, PoolingType, Table

MACHINE = Environment(hardware={"cpu": "fast", "cores": 2}, software={"torch": "2.13.0"})
TABLE = Table(
    name="t",
    num_embeddings=1000,
    embedding_dim=10,
    pooling_factor=2.5,
    feature_names=("a", "b"),
    data_type=DataType.FP16,
    pooling=PoolingType.MEAN,
    ids=IdDistribution(bucket_rows=(10, 990), bucket_shares=(0.5, 0.5)),
    bag_lengths=BagLengths.POISSON,
)
SLICES = (
    ShardSlice.whole(TABLE),
    ShardSlice(TABLE, ShardingType.ROW_WISE, 500, 0, 500, 10),
    ShardSlice(
        dataclasses.replace(TABLE, ids=IdDistribution(zipf_exponent=1.1, zipf_shift=3.0)),
        ShardingType.COLUMN_WISE,
        0,
        4,
        1000,
        6,
    ),
)
DEFAULTS = {"string": "x", "int64": 3, "double": 1.5, "bool": True}


def row(index, pass_=0, environment=MACHINE, **changes):
    return {
        **{name: DEFAULTS[str(kind)] for name, kind in KERNEL_COLUMNS.items()},
        "key": f"p-{index}-{pass_}",
        "protocol": "p",
        "index": index,
        "pass": pass_,
        "worker": 0,
        "measured_at": f"2026-01-01T00:{pass_:02d}:{index % 60:02d}",
        "num_samples": 512,
        "world_size": 1,
        "optimizer": "adagrad",
        "slices": slices_to_text(SLICES),
        "hardware_fingerprint": environment.hardware_fingerprint,
        "software_fingerprint": environment.software_fingerprint,
        **changes,
    }


def open_store(folder, environment=MACHINE, protocol="p", config=None, **limits):
    return PartStore(
        folder,
        RowKind.KERNELS,
        environment=environment,
        protocol=protocol,
        config=config or {"kernels": {"cache": "warm"}},
        **{"flush_rows": 2, "flush_s": 1e9, **limits},
    )


def write(folder, rows, **options):
    with open_store(folder, **options) as store:
        for one in rows:
            store.add(one)


def test_features_of_a_stored_row_are_those_of_its_shards(tmp_path):
    write(tmp_path, [row(0)])
    stored = load_kernel_rows(tmp_path).iloc[0].to_dict()
    training = TrainingConfig(batch_size=512, optimizer=Optimizer.ADAGRAD)
    np.testing.assert_array_equal(row_features(stored), shard_features(SLICES, training, 1))


def test_rows_are_flushed_in_parts_and_found_again(tmp_path):
    with open_store(tmp_path) as store:
        store.add(row(0))
        assert part_paths(tmp_path) == []
        store.add(row(1))
        assert [path.name for path in part_paths(tmp_path)] == ["part-000000.parquet"]
        store.add(row(2))
    assert len(part_paths(tmp_path)) == 2
    with open_store(tmp_path) as store:
        assert store.finished == {"p-0-0", "p-1-0", "p-2-0"}
        with pytest.raises(RuntimeError, match="twice"):
            store.add(row(1))
        store.add(row(3))
    assert load_kernel_rows(tmp_path)["index"].tolist() == [0, 1, 2, 3]


def test_old_rows_are_flushed_however_few(tmp_path):
    with open_store(tmp_path, flush_rows=100, flush_s=0.0) as store:
        store.add(row(0))
        assert len(part_paths(tmp_path)) == 1


def test_rows_survive_an_error_in_the_run(tmp_path):
    def fail_after_a_row():
        with open_store(tmp_path) as store:
            store.add(row(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail_after_a_row()
    assert len(load_kernel_rows(tmp_path)) == 1


def test_a_folder_has_one_writer(tmp_path):
    with open_store(tmp_path), pytest.raises(InputError, match="another process"):
        open_store(tmp_path)
    open_store(tmp_path).close()


@pytest.mark.parametrize("kept", [0, 3, 100, -10])
def test_a_torn_part_is_an_error_that_names_it(tmp_path, kept):
    write(tmp_path, [row(0)])
    (part,) = part_paths(tmp_path)
    part.write_bytes(part.read_bytes()[:kept])
    for read in (load_kernel_rows, open_store):
        with pytest.raises(InputError, match=r"part-000000\.parquet"):
            read(tmp_path)


def test_foreign_files_are_errors(tmp_path):
    write(tmp_path, [row(0)])
    (tmp_path / "notes.txt").write_text("hello")
    with pytest.raises(InputError, match=r"notes\.txt"):
        load_kernel_rows(tmp_path)
    (tmp_path / "notes.txt").unlink()
    pq.write_table(pa.table({"a": [1]}), tmp_path / "part-000007.parquet")
    with pytest.raises(InputError, match="holds no measurements"):
        open_store(tmp_path)


def test_leftovers_of_a_killed_writer_are_removed(tmp_path):
    write(tmp_path, [row(0)])
    leftover = tmp_path / ".part-000001.parquet.abc"
    leftover.write_bytes(b"PAR1half")
    with open_store(tmp_path) as store:
        assert store.finished == {"p-0-0"}
    assert not leftover.exists()


def test_a_run_is_not_continued_elsewhere_or_otherwise(tmp_path):
    write(tmp_path, [row(0)])
    with pytest.raises(InputError, match=r"kernels\.cache cold \(was warm\)"):
        open_store(tmp_path, protocol="q", config={"kernels": {"cache": "cold"}})
    other = dataclasses.replace(MACHINE, hardware={"cpu": "slow", "cores": 2})
    with pytest.raises(InputError, match=r"cpu slow \(was fast\)"):
        open_store(tmp_path, environment=other)
    assert len(load_kernel_rows(tmp_path)) == 1


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"hardware": {"cpu": "slow", "cores": 2}}, ("cpu fast", "cpu slow")),
        ({"software": {"torch": "2.14.0"}}, ("torch 2.13.0", "torch 2.14.0")),
    ],
)
def test_machines_and_versions_are_not_mixed_silently(tmp_path, changes, named):
    other = dataclasses.replace(MACHINE, **changes)
    write(tmp_path / "a", [row(0)])
    write(tmp_path / "b", [row(0, environment=other)], environment=other)
    with pytest.raises(InputError) as caught:
        load_kernel_rows([tmp_path / "a", tmp_path / "b"])
    assert all(name in str(caught.value) for name in named)
    assert len(load_kernel_rows([tmp_path / "a", tmp_path / "b"], allow_mixed=True)) == 2


@pytest.mark.parametrize("column", ["cache", "device", "threads", "concurrent_workers"])
def test_settings_are_not_mixed_silently(tmp_path, column):
    value = "y" if column in ("cache", "device") else 9
    write(tmp_path / "a", [row(0), row(1, **{column: value})])
    with pytest.raises(InputError, match=column):
        load_kernel_rows(tmp_path / "a")


def test_several_optimizers_may_stand_side_by_side(tmp_path):
    write(tmp_path, [row(0), row(1, optimizer="sgd")])
    assert len(load_kernel_rows(tmp_path)) == 2


@pytest.mark.parametrize(
    "changes",
    [
        {"warmup_iterations": 0},
        {"iterations": None},
        {"fwd_relative_error": float("nan")},
        {"bwd_p80_ms": None},
    ],
)
def test_rows_that_do_not_say_how_far_to_trust_them_are_refused(tmp_path, changes):
    write(tmp_path, [row(0), row(1, **changes)])
    with pytest.raises(InputError, match=next(iter(changes))):
        load_kernel_rows(tmp_path)


@pytest.mark.parametrize("column", ["warmup_iterations", "iterations", "fwd_p20_ms"])
def test_files_without_trust_columns_are_refused(tmp_path, column):
    write(tmp_path, [row(0)])
    (part,) = part_paths(tmp_path)
    pq.write_table(pq.read_table(part).drop_columns([column]), part)
    with pytest.raises(InputError, match=column):
        load_kernel_rows(tmp_path)


def test_merging_keeps_all_rows_and_metadata(tmp_path):
    write(tmp_path / "a", [row(index) for index in (3, 1)])
    write(tmp_path / "a", [row(2), row(0), row(0, 1)])
    assert merge_parts(tmp_path / "a", tmp_path / "a.parquet") == 5
    merged = load_kernel_rows(tmp_path / "a.parquet")
    pd.testing.assert_frame_equal(merged, load_kernel_rows(tmp_path / "a"))
    assert merged["index"].tolist() == [0, 0, 1, 2, 3]
    metadata = json.loads(pq.read_schema(tmp_path / "a.parquet").metadata[b"autoshard.measure"])
    assert metadata["environments"][MACHINE.hardware_fingerprint] == MACHINE.hardware
    assert metadata["protocols"] == {"p": {"kernels": {"cache": "warm"}}}


def test_rows_are_counted_once(tmp_path):
    write(tmp_path / "a", [row(0)])
    merge_parts(tmp_path / "a", tmp_path / "a.parquet")
    with pytest.raises(InputError, match="twice"):
        load_kernel_rows([tmp_path / "a", tmp_path / "a.parquet"])
    with pytest.raises(InputError, match="folder of parts"):
        merge_parts(tmp_path / "a", tmp_path / "a" / "part-000009.parquet")


def test_kinds_are_told_apart(tmp_path):
    write(tmp_path, [row(0)])
    with pytest.raises(InputError, match="kind"):
        load_collective_rows(tmp_path)
    with pytest.raises(InputError, match="kernels, not collectives"):
        PartStore(tmp_path, RowKind.COLLECTIVES, environment=MACHINE, protocol="p", config={})


def collective_row(index, collective):
    plain = {name: DEFAULTS.get(str(kind), [4, 4]) for name, kind in COLLECTIVE_COLUMNS.items()}
    names = ("hardware_fingerprint", "software_fingerprint", "protocol", "measured_at", "pass")
    own = {"key": f"p-{collective}-{index}", "index": index, "collective": collective}
    return plain | {name: row(index)[name] for name in names} | own


def write_collectives(folder, rows):
    options = {"environment": MACHINE, "protocol": "p", "config": {}, "flush_rows": 100}
    with PartStore(folder, RowKind.COLLECTIVES, **options) as store:
        for one in rows:
            store.add(one)


def test_files_from_before_there_were_kinds_hold_all_to_alls(tmp_path):
    write_collectives(tmp_path, [collective_row(0, "all_to_all"), collective_row(1, "all_to_all")])
    (part,) = part_paths(tmp_path)
    old = pq.read_table(part)
    pq.write_table(old.drop_columns(["collective"]), part)
    assert load_collective_rows(tmp_path)["collective"].tolist() == ["all_to_all"] * 2
    # Continued, read together and merged with rows of today.
    write_collectives(tmp_path, [collective_row(0, "all_reduce")])
    expected = ["all_to_all", "all_reduce", "all_to_all"]
    assert load_collective_rows(tmp_path)["collective"].tolist() == expected
    assert merge_parts(tmp_path, tmp_path.parent / "merged.parquet") == 3
    merged = load_collective_rows(tmp_path.parent / "merged.parquet")
    assert merged["collective"].tolist() == expected


@pytest.mark.parametrize("name", ["all_to_some", None])
def test_collectives_that_are_not_known_are_refused(tmp_path, name):
    write_collectives(tmp_path, [collective_row(0, "all_reduce"), collective_row(1, name)])
    with pytest.raises(InputError, match=f"not known.*{name}.*all_gather"):
        load_collective_rows(tmp_path)


@pytest.mark.parametrize("path", ["missing", "missing.parquet"])
def test_missing_paths_are_named(tmp_path, path):
    with pytest.raises(InputError, match=path):
        load_kernel_rows(tmp_path / path)


def test_environment_is_described_without_the_host(monkeypatch):
    described = describe_environment()
    assert described.hardware["cores"] >= 1
    assert described.software["python"].startswith("3.")
    assert described.software["threads"] == 1
    import platform
    import socket

    for name in {platform.node(), socket.gethostname()} - {"", "localhost"}:
        assert name not in json.dumps([described.hardware, described.software]).split('"')
    assert len(described.hardware_fingerprint) == 16
    more = dataclasses.replace(described, hardware={**described.hardware, "cores": 999})
    assert more.hardware_fingerprint != described.hardware_fingerprint
    assert more.software_fingerprint == described.software_fingerprint
