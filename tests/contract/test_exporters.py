"""Every export format: text, repeatable, complete; and the plan comes back from json."""

from __future__ import annotations

import csv
import io
import json

import pytest

from autoshard.errors import InputError
from autoshard.exporters.registry import exporter_names, make_exporter
from autoshard.plan import ShardingPlan, TablePlan, plan_from_json
from autoshard.problem import TrainingConfig
from autoshard.protocols import Exporter
from autoshard.shards import Shard, ShardingType
from autoshard.tables import DataType, Table
from autoshard.topology import GIB, Topology


def mixed_plan() -> ShardingPlan:
    def table(name: str, **options: object) -> Table:
        return Table(name=name, num_embeddings=10, embedding_dim=8, pooling_factor=2.0, **options)

    return ShardingPlan(
        topology=Topology.uniform(2, GIB),
        training=TrainingConfig(batch_size=4),
        tables=(
            TablePlan(table('odd, "name"'), ShardingType.TABLE_WISE, (Shard(1, 0, 0, 10, 8),)),
            TablePlan(
                table("half", data_type=DataType.FP16),
                ShardingType.ROW_WISE,
                (Shard(0, 0, 0, 3, 8), Shard(1, 3, 0, 7, 8)),
            ),
        ),
    )


@pytest.mark.parametrize("name", exporter_names())
def test_every_exporter_writes_every_table(name):
    exporter = make_exporter(name)
    exported: Exporter = exporter
    assert exported.name == name
    text = exporter.export(mixed_plan())
    assert text == make_exporter(name).export(mixed_plan())
    assert text.endswith("\n")
    assert "half" in text


def test_json_reads_back():
    text = make_exporter("json").export(mixed_plan())
    assert plan_from_json(json.loads(text)).to_json() == mixed_plan().to_json()


def test_csv_rows():
    header, *rows = csv.reader(io.StringIO(make_exporter("csv").export(mixed_plan())))
    assert header[:5] == ["table", "sharding_type", "compute_kernel", "data_type", "rank"]
    assert rows == [
        ['odd, "name"', "table_wise", "fused", "fp32", "1", "0", "0", "10", "8", "320"],
        ["half", "row_wise", "fused", "fp16", "0", "0", "0", "3", "8", "48"],
        ["half", "row_wise", "fused", "fp16", "1", "3", "0", "7", "8", "112"],
    ]


def test_unknown_format():
    with pytest.raises(InputError, match="did you mean 'json'"):
        make_exporter("jsno")
