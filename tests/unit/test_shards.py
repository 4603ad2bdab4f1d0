"""What a shard asks of a rank, against numbers worked out by hand."""

from __future__ import annotations

import pytest

from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.shards import (
    ShardingType,
    ShardSlice,
    fixed_rank_bytes,
    optimizer_state_bytes,
    padded_cols,
    shard_load,
)
from autoshard.tables import DataType, Table
from autoshard.topology import Topology

TRAINING = TrainingConfig(batch_size=10)


def table(**changes: object) -> Table:
    values = {"name": "t", "num_embeddings": 100, "embedding_dim": 8, "pooling_factor": 3.0}
    return Table(**(values | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize(("cols", "padded"), [(1, 4), (4, 4), (5, 8), (6, 8), (8, 8), (129, 132)])
def test_rows_are_stored_in_vectors_of_four(cols: int, padded: int) -> None:
    assert padded_cols(cols) == padded


@pytest.mark.parametrize(
    ("optimizer", "expected"),
    [
        (Optimizer.SGD, 0),
        (Optimizer.ROWWISE_ADAGRAD, 7 * 4),
        (Optimizer.ADAGRAD, 7 * 12 * 4),
        (Optimizer.ADAM, 2 * 7 * 12 * 4),
    ],
)
def test_optimizer_state(optimizer: Optimizer, expected: int) -> None:
    assert optimizer_state_bytes(optimizer, 7, 12) == expected


def test_a_whole_table_on_two_ranks() -> None:
    load = shard_load(ShardSlice.whole(table()), TRAINING, world_size=2)
    # 20 samples, one feature: 20 bags, 60 ids.
    assert (load.batch_samples, load.lookups) == (20, 60.0)
    assert load.weights_bytes == 100 * 8 * 4
    assert load.optimizer_state_bytes == 100 * 4
    assert load.input_bytes == 60 * 8 + 21 * 8
    assert load.output_bytes == 20 * 8 * 4
    assert load.gradient_bytes == 20 * 8 * 4 + 60 * 16
    assert load.replica_bytes == 0
    # Each rank sends its own 10 samples.
    assert load.send_ids_bytes_per_peer == 30 * 8 + 10 * 8
    assert load.send_output_bytes_per_peer == 10 * 8 * 4
    assert load.send_replica_bytes_per_peer == 0
    assert load.memory_bytes == 3200 + 400 + 648 + 640 + 1600


def test_features_and_weights_of_ids_count() -> None:
    load = shard_load(
        ShardSlice.whole(table(feature_names=("a", "b", "c"), weighted=True)), TRAINING, 2
    )
    assert load.lookups == 20 * 3 * 3
    assert load.input_bytes == 180 * 12 + 61 * 8
    assert load.output_bytes == 60 * 8 * 4
    assert load.gradient_bytes == 60 * 8 * 4 + 180 * 16
    assert load.send_ids_bytes_per_peer == 90 * 12 + 30 * 8
    assert load.send_output_bytes_per_peer == 30 * 8 * 4


def test_padding_is_stored_but_not_sent_and_half_precision_halves_weights_only() -> None:
    load = shard_load(
        ShardSlice.whole(table(embedding_dim=6, data_type=DataType.FP16)), TRAINING, 2
    )
    assert load.weights_bytes == 100 * 8 * 2
    assert load.output_bytes == 20 * 8 * 4
    assert load.send_output_bytes_per_peer == 10 * 6 * 4


def test_a_quarter_of_the_rows_serves_a_quarter_of_the_lookups() -> None:
    part = ShardSlice(table(), ShardingType.ROW_WISE, 25, 0, 25, 8)
    load = shard_load(part, TRAINING, 2)
    assert load.lookups == 15.0
    assert load.weights_bytes == 25 * 8 * 4
    assert load.optimizer_state_bytes == 25 * 4
    assert load.input_bytes == 15 * 8 + 21 * 8
    # Every bag has a partial sum on every shard.
    assert load.output_bytes == 20 * 8 * 4
    assert load.send_ids_bytes_per_peer == 7.5 * 8 + 10 * 8
    whole = shard_load(ShardSlice.whole(table()), TRAINING, 2)
    assert load.unique_rows == pytest.approx(whole.unique_rows / 4)


def test_half_of_the_columns_serves_all_lookups() -> None:
    part = ShardSlice(table(), ShardingType.COLUMN_WISE, 0, 4, 100, 4)
    load = shard_load(part, TRAINING, 2)
    assert load.lookups == 60.0
    assert load.weights_bytes == 100 * 4 * 4
    assert load.optimizer_state_bytes == 100 * 4  # row-wise state is kept per column shard
    assert load.send_output_bytes_per_peer == 10 * 4 * 4


def test_a_replica_sees_its_own_samples_and_exchanges_bags_where_rows_are_many() -> None:
    replica = ShardSlice.whole(table(), ShardingType.DATA_PARALLEL)
    load = shard_load(replica, TRAINING, world_size=4)
    assert (load.batch_samples, load.lookups) == (10, 30.0)
    assert load.send_output_bytes_per_peer == 0
    # 100 equally likely rows in 30 lookups: 100 · (1 − e^−0.3) = 25.9182 rows of 8 + 32 bytes,
    # more than 10 bags with 8 + 3 · 8 bytes of ids and 32 bytes of gradients each.
    assert load.unique_rows == pytest.approx(25.91817793)
    assert load.send_ids_bytes_per_peer == 320
    assert load.send_replica_bytes_per_peer == 320
    assert load.replica_bytes == 2 * 640 * 4  # sent to and received from 4 ranks
    few = ShardSlice.whole(table(num_embeddings=9), ShardingType.DATA_PARALLEL)
    by_row = shard_load(few, TRAINING, world_size=4)
    # 9 rows in 30 lookups: 9 · (1 − e^(−30/9)) = 8.6789 of 40 bytes.
    assert by_row.send_ids_bytes_per_peer == 0
    assert by_row.send_replica_bytes_per_peer == pytest.approx(8.67893 * 40, rel=1e-5)
    alone = shard_load(replica, TRAINING, world_size=1)
    assert alone.replica_bytes == alone.send_replica_bytes_per_peer == 0


def test_the_largest_known_table_is_counted_exactly() -> None:
    big = table(num_embeddings=206_000_000, embedding_dim=128)
    load = shard_load(ShardSlice.whole(big), TrainingConfig(batch_size=65_536), 128)
    assert load.weights_bytes == 105_472_000_000
    assert load.optimizer_state_bytes == 824_000_000
    assert load.output_bytes == 65_536 * 128 * 128 * 4
    adam = TrainingConfig(batch_size=1, optimizer=Optimizer.ADAM)
    assert shard_load(ShardSlice.whole(big), adam, 1).optimizer_state_bytes == 210_944_000_000


def test_bytes_stay_exact_beyond_int64() -> None:
    huge = table(num_embeddings=2**61 + 1, embedding_dim=2**20)
    load = shard_load(ShardSlice.whole(huge), TRAINING, 2)
    assert load.weights_bytes == (2**61 + 1) * 2**22


def test_a_table_without_lookups_costs_its_weights_and_lengths() -> None:
    load = shard_load(ShardSlice.whole(table(pooling_factor=0.0)), TRAINING, 2)
    assert (load.lookups, load.unique_rows) == (0.0, 0.0)
    assert load.input_bytes == 21 * 8
    assert load.send_ids_bytes_per_peer == 80


def test_fractional_lookups_are_allocated_as_whole_ids() -> None:
    load = shard_load(ShardSlice.whole(table(pooling_factor=0.33)), TRAINING, 1)
    assert load.lookups == pytest.approx(3.3)
    assert load.input_bytes == 4 * 8 + 11 * 8


def test_what_every_rank_needs_whatever_the_plan() -> None:
    problem = ShardingProblem(
        tables=(table(), table(name="u", embedding_dim=6, weighted=True, feature_names=("x", "y"))),
        topology=Topology.uniform(2, 2**20),
        training=TrainingConfig(batch_size=10, dense_bytes=77, batches_in_flight=3),
    )
    first, second = 30 * 8 + 10 * 8, 60 * 12 + 20 * 8
    assert fixed_rank_bytes(problem) == {
        "batches_in_flight": 3 * (first + second),
        "pooled_outputs": 2 * (10 * 8 * 4 + 20 * 6 * 4),
        "dense": 77,
    }
