from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from autoshard.distributions import IdDistribution
from autoshard.errors import InputError
from autoshard.measure.config import Collective, SamplingConfig
from autoshard.measure.sampling import (
    ShardSetSampler,
    Split,
    estimate_iteration_ms,
    split_tables,
    weight_bytes,
)
from autoshard.measure.slices_json import slices_from_text, slices_to_text
from autoshard.measure.traffic_sampling import Direction, Traffic, draw_traffic
from autoshard.shards import ShardingType
from autoshard.tables import DataType, Table

CONFIG = SamplingConfig(
    max_shards=16,
    num_samples=(256, 1024),
    column_share=0.3,
    row_share=0.3,
    max_iteration_ms=20.0,
    max_weight_bytes=4 * 2**20,
)


def pool(count=60):
    rng = np.random.default_rng(5)
    return [
        Table(
            name=f"t{index}",
            num_embeddings=int(10 ** rng.uniform(0, 5)),
            embedding_dim=int(rng.choice([4, 6, 16, 64])),
            pooling_factor=float(rng.uniform(0.3, 30)),
            ids=IdDistribution(zipf_exponent=float(rng.uniform(0, 1.2))),
        )
        for index in range(count)
    ]


@pytest.fixture(scope="module")
def drawn():
    sampler = ShardSetSampler(pool(), CONFIG, seed=0)
    return [sampler.draw(index) for index in range(300)]


def test_draws_depend_on_seed_and_index_only(drawn):
    again = ShardSetSampler(list(reversed(pool())), CONFIG, seed=0)
    assert again.draw(123) == drawn[123]
    assert again.draw(7) == drawn[7]
    assert ShardSetSampler(pool(), CONFIG, seed=1).draw(7) != drawn[7]


def test_no_table_is_in_two_splits(drawn):
    names = {split: set() for split in Split}
    for shard_set in drawn:
        names[shard_set.split].update(s.table.name for s in shard_set.slices)
    assert all(names.values())
    assert not names[Split.TRAIN] & names[Split.TEST]
    assert not names[Split.TRAIN] & names[Split.VALIDATION]
    assert not names[Split.VALIDATION] & names[Split.TEST]


def test_budget_is_kept(drawn):
    for shard_set in drawn:
        assert estimate_iteration_ms(shard_set.slices, shard_set.num_samples) <= 20.0
        assert weight_bytes(shard_set.slices) <= 4 * 2**20
        assert 1 <= len(shard_set.slices) <= 16
        assert shard_set.num_samples in (256, 1024)
        assert shard_set.batch_size * shard_set.world_size == shard_set.num_samples


def test_some_sets_hold_replicas_and_all_world_sizes_occur(drawn):
    shares = [
        np.mean([s.sharding_type is ShardingType.DATA_PARALLEL for s in shard_set.slices])
        for shard_set in drawn
        if len(shard_set.slices) >= 4
    ]
    assert 0.4 < np.mean(np.array(shares) == 0) < 0.8
    assert max(shares) > 0.7
    assert {s.world_size for s in drawn} == {1, 2, 4, 8}
    none = replace(CONFIG, replica_sets_share=0.0, world_sizes=(3,))
    only = [ShardSetSampler(pool(), none, seed=0).draw(index) for index in range(40)]
    assert {s.world_size for s in only} == {3}
    assert {s.num_samples for s in only} == {255, 1023}
    kinds = {s.sharding_type for shard_set in only for s in shard_set.slices}
    assert ShardingType.DATA_PARALLEL not in kinds


def test_variants_occur_in_every_split_and_not_in_most_sets(drawn):
    def is_variant(s):
        return s.table.weighted or s.table.num_features > 1 or s.table.data_type is DataType.FP16

    for split in Split:
        sets = [s for s in drawn if s.split is split]
        share = np.mean([any(map(is_variant, s.slices)) for s in sets])
        assert 0.02 < share < 0.4
    tables = [s.table for shard_set in drawn for s in shard_set.slices]
    assert any(table.weighted for table in tables)
    assert any(table.num_features == 2 for table in tables)
    assert any(table.data_type is DataType.FP16 for table in tables)
    plain = replace(CONFIG, variant_sets_share=0.0)
    sampler = ShardSetSampler(pool(), plain, seed=0)
    assert not any(is_variant(s) for i in range(60) for s in sampler.draw(i).slices)


def test_a_large_set_keeps_its_tables_and_gets_a_small_batch():
    light = [
        Table(name=f"t{i}", num_embeddings=100, embedding_dim=16, pooling_factor=5.0)
        for i in range(40)
    ]
    # 1,024 samples of 36 such tables take an estimated 11 ms, of 256 a quarter of it.
    config = replace(
        CONFIG, max_shards=40, split_shares=(1.0, 0.0, 0.0), augmented_share=0.0,
        column_share=0.0, row_share=0.0, max_iteration_ms=10.0,
    )  # fmt: skip
    sampler = ShardSetSampler(light, config, seed=0)
    sets = [sampler.draw(index) for index in range(200)]
    large = [s for s in sets if len(s.slices) >= 36]
    assert large
    assert {s.num_samples for s in large} == {256}
    assert {s.num_samples for s in sets if len(s.slices) < 5} == {256, 1024}


def test_every_kind_of_shard_occurs_and_lies_inside_its_table(drawn):
    slices = [s for shard_set in drawn for s in shard_set.slices]
    kinds = {s.sharding_type for s in slices}
    assert kinds == {
        ShardingType.TABLE_WISE,
        ShardingType.COLUMN_WISE,
        ShardingType.ROW_WISE,
        ShardingType.DATA_PARALLEL,
    }
    for s in slices:
        assert s.num_rows >= 1
        assert s.row_offset + s.num_rows <= s.table.num_embeddings
        assert s.col_offset + s.num_cols <= s.table.embedding_dim
        assert s.col_offset % 4 == 0
        if s.sharding_type in (ShardingType.ROW_WISE, ShardingType.DATA_PARALLEL):
            assert s.num_cols == s.table.embedding_dim
        if s.sharding_type is ShardingType.DATA_PARALLEL:
            assert s.num_rows == s.table.num_embeddings
        if s.sharding_type is ShardingType.COLUMN_WISE:
            assert s.num_rows == s.table.num_embeddings
            assert s.num_cols < s.table.embedding_dim


def test_augmented_sets_are_flagged_and_only_for_training(drawn):
    original = {table.name: table for table in pool()}
    for shard_set in drawn:
        if any(s.table.weighted or s.table.num_features > 1 for s in shard_set.slices):
            continue  # variants, which occur in every split
        changed = any(
            replace(s.table, data_type=DataType.FP32) != original[s.table.name]
            for s in shard_set.slices
        )
        assert changed <= shard_set.augmented
        assert shard_set.augmented <= (shard_set.split is Split.TRAIN)
        for s in shard_set.slices:
            assert s.table.num_embeddings == original[s.table.name].num_embeddings
            assert s.table.ids == original[s.table.name].ids
    assert {s.augmented for s in drawn if s.split is Split.TRAIN} == {True, False}


def test_small_sets_are_as_frequent_as_large_ones(drawn):
    sizes = np.array([len(s.slices) for s in drawn if s.split is Split.TRAIN])
    # Log-uniform over 1..16: a quarter each in 1, 2-3, 4-7 and above, up to rounding.
    assert np.mean(sizes <= 2) > 0.25
    assert np.mean(sizes >= 6) > 0.15


def test_a_table_beyond_the_budget_is_cut_into_rows():
    giant = Table(name="g", num_embeddings=10**6, embedding_dim=64, pooling_factor=2.0)
    config = replace(
        CONFIG, split_shares=(1.0, 0.0, 0.0), augmented_share=0.0, variant_sets_share=0.0
    )
    shard_set = ShardSetSampler([giant], config, seed=0).draw(0)
    (slice_,) = shard_set.slices
    assert slice_.sharding_type is ShardingType.ROW_WISE
    assert slice_.num_rows * 64 * 4 <= 4 * 2**20


def test_a_pool_that_fits_in_no_way_is_an_error():
    wide = Table(name="w", num_embeddings=1, embedding_dim=4096, pooling_factor=50.0)
    config = replace(CONFIG, split_shares=(1.0, 0.0, 0.0), augmented_share=0.0)
    with pytest.raises(InputError, match="max_iteration_ms"):
        ShardSetSampler([wide], config, seed=0).draw(0)


def test_splits_divide_the_pool_whatever_its_size():
    for count in (3, 4, 10, 61):
        tables = pool(count)
        pools = split_tables(tables, (0.8, 0.1, 0.1), seed=2)
        names = [table.name for split in Split for table in pools[split]]
        assert sorted(names) == sorted(table.name for table in tables)
        assert all(pools.values())
        assert len(pools[Split.TRAIN]) >= count // 2 - 1
    with pytest.raises(InputError, match="fewer tables than splits"):
        split_tables(pool(2), (0.8, 0.1, 0.1), seed=0)


def test_shard_sets_survive_as_text(drawn):
    for shard_set in drawn[:50]:
        assert slices_from_text(slices_to_text(shard_set.slices)) == shard_set.slices


@pytest.mark.parametrize("text", ["{", "{}", "[3]", '[{"table": {}}]', None])
def test_malformed_shard_sets_are_refused(text):
    with pytest.raises(InputError):
        slices_from_text(text)


def test_a_shard_outside_of_its_table_is_refused(drawn):
    s = drawn[0].slices[0]
    moved = replace(s, row_offset=s.table.num_embeddings)
    with pytest.raises(InputError, match="outside"):
        slices_from_text(slices_to_text([moved]))


def test_traffic_features_of_a_small_case():
    outputs = Traffic(index=0, direction=Direction.FROM_OWNERS, bytes_per_peer=(8, 0, 4))
    # Rank 0 sends 8 to each of two peers, rank 2 sends 4: 24 in all; rank 1 receives both.
    assert outputs.features().tolist() == [3, 16, 12, 24]
    ids = Traffic(index=0, direction=Direction.TO_OWNERS, bytes_per_peer=(8, 0, 4))
    assert ids.features().tolist() == [3, 12, 16, 24]
    assert ids.sent_bytes().tolist() == [[0, 0, 4], [8, 0, 4], [8, 0, 0]]


def test_traffic_covers_sizes_and_imbalances():
    drawn = [draw_traffic(index, 4, 2**20, seed=0) for index in range(400)]
    assert drawn[5] == draw_traffic(5, 4, 2**20, seed=0)
    features = np.array([traffic.features() for traffic in drawn])
    largest = np.maximum(features[:, 1], features[:, 2])
    assert largest.max() <= 2**20
    assert largest.min() < 256
    assert largest.min() > 0
    per_peer = [np.array(traffic.bytes_per_peer) for traffic in drawn]
    assert any(b.min() == b.max() for b in per_peer)
    assert any((b > 0).sum() == 1 for b in per_peer)
    assert {traffic.direction for traffic in drawn} == set(Direction)


@pytest.mark.parametrize("kind", [k for k in Collective if k is not Collective.ALL_TO_ALL])
def test_even_traffic_covers_sizes(kind):
    drawn = [draw_traffic(index, 4, 2**20, seed=0, collective=kind) for index in range(200)]
    assert drawn[5] == draw_traffic(5, 4, 2**20, seed=0, collective=kind)
    sent = np.array([traffic.features()[1] for traffic in drawn])
    assert 2**19 < sent.max() <= 2**20
    assert 0 < sent.min() < 256
    # Log-uniform: half of them below the geometric mean of the ends.
    assert np.median(sent) == pytest.approx(np.sqrt(24 * 2**20), rel=0.7)
    others = {k: draw_traffic(5, 4, 2**20, seed=0, collective=k) for k in Collective}
    assert len({traffic.bytes_per_peer for traffic in others.values()}) == len(Collective)


def test_all_to_alls_are_drawn_as_when_the_shipped_ones_were_measured():
    # Earlier runs are continued by number: a number must not come to mean another exchange.
    path = Path(__file__).parents[2] / "data/measurements/cpu-2core/collectives.parquet"
    for row in pd.read_parquet(path).iloc[::20].to_dict("records"):
        drawn = draw_traffic(row["index"], int(row["world_size"]), 2**24, seed=row["seed"])
        assert drawn.bytes_per_peer == tuple(row["bytes_per_peer"])
        assert drawn.direction.value == row["direction"]
