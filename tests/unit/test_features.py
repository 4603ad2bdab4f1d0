"""Features against batches that are really drawn, and against hand-computed counts."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.distributions import IdDistribution, sample_ids
from autoshard.features import (
    FWD_WORK_FEATURES,
    NUM_SHARD_FEATURES,
    SHARD_FEATURES,
    TRAFFIC_FEATURES,
    WORK_FEATURES,
    WORK_OF_PHASE,
    shard_features,
    traffic_features,
)
from autoshard.problem import TrainingConfig
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import DataType, PoolingType, Table

LAWS = [
    IdDistribution(),
    IdDistribution(zipf_exponent=1.05),
    IdDistribution(zipf_exponent=1.4, zipf_shift=20.0),
    IdDistribution(bucket_rows=(4, 396, 1600), bucket_shares=(0.5, 0.3, 0.2)),
]


def described(slice_: ShardSlice, batch_size: int, world_size: int) -> dict[str, float]:
    row = shard_features([slice_], TrainingConfig(batch_size=batch_size), world_size)[0]
    return dict(zip(SHARD_FEATURES, row.tolist(), strict=True))


def make_table(ids: IdDistribution, **changes: object) -> Table:
    values = {"name": "t", "num_embeddings": 2000, "embedding_dim": 10, "pooling_factor": 5.0}
    return Table(**(values | {"ids": ids} | changes))  # type: ignore[arg-type]


@pytest.mark.parametrize("ids", LAWS, ids=["uniform", "zipf", "shifted", "buckets"])
def test_features_are_the_means_of_drawn_batches(ids: IdDistribution) -> None:
    found = described(ShardSlice.whole(make_table(ids)), batch_size=100, world_size=3)
    generator = np.random.default_rng(0)
    uniques, shares = [], []
    for _ in range(40):
        drawn = sample_ids(ids, 2000, 100 * 3 * 5, generator)
        counts = np.bincount(drawn, minlength=2000)
        uniques.append(np.count_nonzero(counts))
        bins = [(0, 1), *((2**k, 2 ** (k + 1)) for k in range(10))]
        shares.append([counts[(counts > lo) & (counts <= hi)].sum() / 1500 for lo, hi in bins])
    assert found["fwd_bags"] == 300
    assert found["fwd_lookups"] == 1500
    assert found["fwd_unique_rows"] == pytest.approx(np.mean(uniques), rel=0.03)
    names = [f"lookup_share_reuse_{index}" for index in range(11)]
    np.testing.assert_allclose([found[n] for n in names], np.mean(shares, axis=0), atol=0.03)
    total = sum(found[name] for name in SHARD_FEATURES if name.startswith("lookup_share"))
    assert total == pytest.approx(1.0)
    assert found["fwd_bag_elements"] == 300 * 12
    assert found["fwd_lookup_elements"] == 1500 * 12
    assert found["fwd_unique_elements"] == pytest.approx(found["fwd_unique_rows"] * 12)
    for name in FWD_WORK_FEATURES:
        assert found[name.replace("fwd", "bwd")] == found[name]
    assert found["reduced_lookups"] == found["is_reduced_by_row"] == 0


def test_a_row_slice_sees_its_share_and_a_column_slice_everything() -> None:
    table = make_table(LAWS[0], embedding_dim=16)
    whole = described(ShardSlice.whole(table), 100, 2)
    rows = described(ShardSlice(table, ShardingType.ROW_WISE, 0, 0, 500, 16), 100, 2)
    cols = described(ShardSlice(table, ShardingType.COLUMN_WISE, 0, 8, 2000, 8), 100, 2)
    assert rows["fwd_bags"] == cols["fwd_bags"] == whole["fwd_bags"] == 200
    assert rows["fwd_lookups"] == pytest.approx(whole["fwd_lookups"] / 4)
    assert rows["fwd_unique_rows"] == pytest.approx(whole["fwd_unique_rows"] / 4)
    assert cols["fwd_lookups"] == whole["fwd_lookups"]
    assert cols["fwd_unique_elements"] == pytest.approx(whole["fwd_unique_elements"] / 2)
    # Drawn: only ids below 500 hit the slice.
    drawn = sample_ids(LAWS[0], 2000, 1000 * 50, np.random.default_rng(0)).reshape(50, 1000)
    hits = [np.unique(batch[batch < 500]).size for batch in drawn]
    assert rows["fwd_unique_rows"] == pytest.approx(np.mean(hits), rel=0.03)


def distinct_rows(ids: IdDistribution, num_ids: int) -> float:
    """Distinct rows among so many drawn ids of a table of 2,000 rows, on average."""
    drawn = sample_ids(ids, 2000, num_ids * 50, np.random.default_rng(1)).reshape(50, num_ids)
    return float(np.mean([np.unique(batch).size for batch in drawn]))


def test_a_replica_looks_up_one_rank_and_updates_the_bags_of_all() -> None:
    table = make_table(LAWS[1])  # 500 ids and 100 bags of 10 columns are less than the rows
    replica = described(ShardSlice.whole(table, ShardingType.DATA_PARALLEL), 100, 8)
    alone = described(ShardSlice.whole(table), 100, 1)
    assert {n: replica[n] for n in FWD_WORK_FEATURES} == {n: alone[n] for n in FWD_WORK_FEATURES}
    assert replica["bwd_bags"] == 800
    assert replica["bwd_lookups"] == 4000
    assert replica["bwd_bag_elements"] == 800 * 12
    rows = distinct_rows(LAWS[1], 4000)
    assert replica["bwd_unique_rows"] == pytest.approx(rows, rel=0.03)
    assert replica["reduced_lookups"] == replica["is_reduced_by_row"] == 0


def test_a_replica_whose_ranks_exchange_rows() -> None:
    table = make_table(LAWS[2], pooling_factor=1.0)
    found = described(ShardSlice.whole(table, ShardingType.DATA_PARALLEL), 100, 8)
    own, all_ranks = distinct_rows(LAWS[2], 100), distinct_rows(LAWS[2], 800)
    assert found["fwd_lookups"] == found["reduced_lookups"] == 100
    assert found["reduced_lookup_elements"] == 100 * 12
    assert found["is_reduced_by_row"] == 1
    # Each rank's distinct rows, one bag for each.
    assert found["bwd_bags"] == found["bwd_lookups"] == pytest.approx(8 * own, rel=0.03)
    assert found["bwd_unique_rows"] == pytest.approx(all_ranks, rel=0.03)
    assert found["log_bwd_lookups_per_bag"] == pytest.approx(np.log(2))


def test_logs_and_flags() -> None:
    table = make_table(
        LAWS[0],
        feature_names=("a", "b"),
        weighted=True,
        data_type=DataType.FP16,
        pooling=PoolingType.MEAN,
    )
    found = described(ShardSlice.whole(table), 50, 2)
    assert found["fwd_lookups"] == 1000
    expected = {
        "log_num_rows": 2000,
        "log_num_cols": 10,
        "log_weights_bytes": 2000 * 12 * 2,
        "log_num_features": 2,
    }
    for phase in ("fwd", "bwd"):
        expected |= {
            f"log_{phase}_bags": 200,
            f"log_{phase}_lookups": 1000,
            f"log_{phase}_lookups_per_bag": 5,
            f"log_{phase}_unique_rows": found["fwd_unique_rows"],
            f"log_{phase}_lookups_per_unique_row": 1000 / found["fwd_unique_rows"],
        }
    for name, value in expected.items():
        assert found[name] == pytest.approx(np.log(1 + value))
    assert (found["is_weighted"], found["is_half_precision"]) == (1, 1)
    plain = described(ShardSlice.whole(make_table(LAWS[0])), 50, 2)
    assert (plain["is_weighted"], plain["is_half_precision"]) == (0, 0)


def test_a_table_without_lookups_and_no_tables_at_all() -> None:
    found = described(ShardSlice.whole(make_table(LAWS[1], pooling_factor=0.0)), 10, 2)
    assert all(np.isfinite(value) for value in found.values())
    assert found["fwd_bags"] == 20
    assert not any(found[name] for name in SHARD_FEATURES if "lookup" in name)
    assert shard_features([], TrainingConfig(batch_size=1), 2).shape == (0, NUM_SHARD_FEATURES)


@pytest.mark.parametrize("exponent", [0.0, 1.0, 40.0, 5000.0, 1e300])
@pytest.mark.parametrize("rows", [1, 10, 206_000_000])
def test_extreme_tables_have_finite_features(exponent: float, rows: int) -> None:
    table = make_table(
        IdDistribution(zipf_exponent=exponent), num_embeddings=rows, pooling_factor=1e4
    )
    found = described(ShardSlice.whole(table), 65_536, 128)
    assert all(np.isfinite(value) and value >= 0 for value in found.values())
    assert found["fwd_unique_rows"] <= rows * (1 + 1e-9)


def test_rows_of_a_part_are_reused_as_those_of_the_whole() -> None:
    table = make_table(LAWS[1])
    whole = described(ShardSlice.whole(table), 100, 3)
    quarter = described(ShardSlice(table, ShardingType.ROW_WISE, 500, 0, 500, 10), 100, 3)
    for name in SHARD_FEATURES:
        if name.startswith("lookup_share"):
            assert quarter[name] == whole[name]
    for name in ("fwd_lookups", "fwd_unique_rows"):
        assert quarter[name] == pytest.approx(whole[name] / 4)


def test_work_comes_first_and_belongs_to_one_phase() -> None:
    assert SHARD_FEATURES[: len(WORK_FEATURES)] == WORK_FEATURES
    for name, (forward, backward) in zip(WORK_FEATURES, WORK_OF_PHASE.tolist(), strict=True):
        assert forward == name.startswith("fwd_")
        assert backward != forward


def test_traffic_columns() -> None:
    rows = traffic_features(
        np.array([2, 4]), np.array([1.0, 2.0]), np.array([3.0, 4.0]), np.array([5.0, 6.0])
    )
    assert TRAFFIC_FEATURES == ("world_size", "max_sent_bytes", "max_received_bytes", "total_bytes")
    assert rows.tolist() == [[2, 1, 3, 5], [4, 2, 4, 6]]
