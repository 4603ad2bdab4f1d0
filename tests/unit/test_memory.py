"""The memory ledger, against hand-computed bytes."""

from __future__ import annotations

from autoshard.memory import LEDGER_LINES, memory_ledger
from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import DataType, Table
from autoshard.topology import Topology


def problem_of(
    *tables: Table, optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD, reserved_bytes: int = 0
) -> ShardingProblem:
    return ShardingProblem(
        tables=tables,
        topology=Topology.uniform(2, 10**6, reserved_bytes=reserved_bytes),
        training=TrainingConfig(batch_size=5, optimizer=optimizer, dense_bytes=1000),
    )


def table(name: str, dim: int = 8, rows: int = 50, dtype: DataType = DataType.FP32) -> Table:
    return Table(
        name=name, num_embeddings=rows, embedding_dim=dim, pooling_factor=2.0, data_type=dtype
    )


def test_every_line_of_two_ranks() -> None:
    a, b = table("a"), table("b", dim=6, dtype=DataType.FP16)
    ledgers = memory_ledger(
        problem_of(a, b, reserved_bytes=500), [[ShardSlice.whole(a), ShardSlice.whole(b)], []]
    )
    shared = {
        "batches_in_flight": 2 * (10 * 8 + 5 * 8),
        "pooled_outputs": 2 * 5 * (8 + 6) * 4,
        "dense": 1000,
        "reserved": 500,
    }
    assert ledgers[0].lines_bytes == shared | {
        "weights": 50 * 8 * 4 + 50 * 8 * 2,
        "optimizer_state": 2 * 50 * 4,
        "inputs": 2 * (20 * 8 + 11 * 8),
        "outputs": 2 * 10 * 8 * 4,
        "gradients": 2 * (10 * 8 * 4 + 20 * 16),
        "replicas": 0,
    }
    empty = ("weights", "optimizer_state", "inputs", "outputs", "gradients", "replicas")
    assert ledgers[1].lines_bytes == shared | dict.fromkeys(empty, 0)
    assert ledgers[1].total_bytes == 240 + 560 + 1000 + 500
    assert ledgers[1].free_bytes == 10**6 - 2300
    assert [ledger.rank for ledger in ledgers] == [0, 1]
    assert set(ledgers[0].lines_bytes) == set(LEDGER_LINES)


def test_adam_keeps_two_numbers_per_weight_and_rowwise_adagrad_one_per_row() -> None:
    a = table("a", dim=12)
    held = [[ShardSlice.whole(a)], []]
    adam = memory_ledger(problem_of(a, optimizer=Optimizer.ADAM), held)
    rowwise = memory_ledger(problem_of(a), held)
    assert adam[0].lines_bytes["optimizer_state"] == 2 * 12 * 50 * 4
    assert rowwise[0].lines_bytes["optimizer_state"] == 50 * 4
    assert adam[0].total_bytes - rowwise[0].total_bytes == 50 * 4 * 23


def test_an_overfull_rank_has_negative_room() -> None:
    big = table("big", rows=206_000_000, dim=128)
    ledger = memory_ledger(problem_of(big), [[ShardSlice.whole(big)], []])[0]
    assert ledger.lines_bytes["weights"] == 206_000_000 * 128 * 4
    assert ledger.free_bytes < -105_000_000_000


def test_replicas_are_counted_on_every_rank() -> None:
    a = table("a")
    replica = ShardSlice.whole(a, ShardingType.DATA_PARALLEL)
    ledgers = memory_ledger(problem_of(a), [[replica], [replica]])
    assert ledgers[0].lines_bytes == ledgers[1].lines_bytes
    assert ledgers[0].lines_bytes["weights"] == 1600
    # 5 bags with 8 + 2 · 8 bytes of ids and 32 of gradients are less than the touched rows,
    # 50 · (1 − e^−0.2) = 9.0635 of 8 + 32 bytes; sent to and received from 2 ranks.
    assert ledgers[0].lines_bytes["replicas"] == 5 * 56 * 2 * 2
