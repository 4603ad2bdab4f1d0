"""Drawn batches: layout, lengths, ranges, and the spread of ids."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import chisquare

from autoshard.distributions import IdDistribution, expected_unique_rows
from autoshard.errors import InputError
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import BagLengths, Table
from autoshard.workloads.batches import (
    draw_kernel_batch,
    draw_table_batch,
    sample_lengths,
    slice_distribution,
)


def table(**changes) -> Table:
    fields = {"name": "t", "num_embeddings": 1000, "embedding_dim": 8, "pooling_factor": 3.0}
    return Table(**{**fields, **changes})


def row_slice(of: Table, row_offset: int, num_rows: int) -> ShardSlice:
    return ShardSlice(of, ShardingType.ROW_WISE, row_offset, 0, num_rows, of.embedding_dim)


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


@pytest.mark.parametrize("pooling_factor", [0.0, 0.3, 1.0, 2.5, 17.99])
def test_constant_bags_are_the_two_numbers_around_the_mean(pooling_factor):
    lengths = sample_lengths(table(pooling_factor=pooling_factor), 1001, rng())
    assert lengths.shape == (1, 1001)
    assert lengths.dtype == np.int64
    assert set(np.unique(lengths)) <= {int(pooling_factor), int(pooling_factor) + 1}
    assert abs(lengths.sum() - 1001 * pooling_factor) <= 1


def test_longer_bags_are_in_random_places():
    lengths = sample_lengths(table(pooling_factor=0.5, feature_names=("x", "y")), 4000, rng())
    halves = lengths.reshape(2, 2, 2000).sum(axis=2)
    assert np.all(np.abs(halves - 1000) < 5 * np.sqrt(2000 / 4))
    assert np.any(lengths[0] != lengths[1])


def test_poisson_bags_have_poisson_variance():
    poisson = table(pooling_factor=4.0, bag_lengths=BagLengths.POISSON)
    lengths = sample_lengths(poisson, 100_000, rng())
    assert lengths.mean() == pytest.approx(4.0, abs=5 * 2 / np.sqrt(1e5))
    assert lengths.var() == pytest.approx(4.0, rel=0.03)


@pytest.mark.parametrize("bag_lengths", BagLengths)
def test_row_slices_get_their_share(bag_lengths):
    whole = table(pooling_factor=10.0, bag_lengths=bag_lengths)
    lengths = sample_lengths(whole, 100_000, rng(), row_share=0.25)
    assert lengths.mean() == pytest.approx(2.5, rel=0.01)
    # A bag of 10 ids leaves Binomial(10, 1/4) here; a Poisson bag stays Poisson.
    variance = 10 * 0.25 * 0.75 if bag_lengths is BagLengths.CONSTANT else 2.5
    assert lengths.var() == pytest.approx(variance, rel=0.03)


def test_kernel_batch_layout():
    first = table(name="a", pooling_factor=2.0, feature_names=("x", "y"))
    second = table(name="b", pooling_factor=0.0)
    third = table(name="c", pooling_factor=1.0, num_embeddings=7)
    batch = draw_kernel_batch([ShardSlice.whole(t) for t in (first, second, third)], 50, rng())
    assert batch.values.dtype == batch.offsets.dtype == np.int64
    assert batch.offsets.tolist() == [
        *range(0, 200, 2),
        *[200] * 50,
        *range(200, 251),
    ]
    assert batch.values.size == 250
    assert batch.values[200:].max() < 7
    assert batch.weights is None


def test_weights_are_one_for_tables_that_have_none():
    plain, weighted = table(name="a"), table(name="b", weighted=True)
    batch = draw_kernel_batch([ShardSlice.whole(plain), ShardSlice.whole(weighted)], 100, rng())
    assert batch.weights.dtype == np.float32
    assert np.all(batch.weights[:300] == 1.0)
    assert np.ptp(batch.weights[300:]) > 0.5
    assert draw_table_batch(plain, 10, rng()).weights is None
    assert draw_table_batch(weighted, 10, rng()).weights.shape == (30,)


def test_table_batch():
    two = table(feature_names=("x", "y"), pooling_factor=1.5)
    batch = draw_table_batch(two, 10, rng())
    assert batch.lengths.shape == (2, 10)
    assert batch.values.shape == (batch.lengths.sum(),)
    assert batch.values.min() >= 0
    assert batch.values.max() < 1000


@pytest.mark.parametrize("num_samples", [0, 1])
def test_small_batches(num_samples):
    batch = draw_kernel_batch([ShardSlice.whole(table())], num_samples, rng())
    assert batch.offsets.tolist() == [0, 3][: num_samples + 1]
    empty = draw_kernel_batch([], num_samples, rng())
    assert empty.offsets.tolist() == [0]
    assert empty.values.shape == (0,)
    assert draw_table_batch(table(), num_samples, rng()).values.size == 3 * num_samples


def test_batches_repeat_by_seed():
    slices = [ShardSlice.whole(table(bag_lengths=BagLengths.POISSON, weighted=True))]
    first, second, other = (draw_kernel_batch(slices, 200, rng(seed)) for seed in (5, 5, 6))
    for field in ("values", "offsets", "weights"):
        np.testing.assert_array_equal(getattr(first, field), getattr(second, field))
    assert not np.array_equal(first.values[:500], other.values[:500])


def test_uniform_ids_are_uniform():
    batch = draw_table_batch(table(num_embeddings=50, pooling_factor=100.0), 1000, rng(1))
    assert chisquare(np.bincount(batch.values, minlength=50)).pvalue > 1e-4


def test_bucket_shares_are_met():
    ids = IdDistribution(bucket_rows=(2, 30, 400), bucket_shares=(0.5, 0.3, 0.2))
    batch = draw_table_batch(table(ids=ids, pooling_factor=100.0), 1000, rng(1))
    counts = np.sort(np.bincount(batch.values, minlength=1000))[::-1]
    assert np.count_nonzero(counts) == 432
    # The hottest 2 rows get 25,000 each, the next 30 get 1,000 each, the rest 50 each.
    assert chisquare([counts[:2].sum(), counts[2:32].sum(), counts[32:].sum()],
                     [50_000, 30_000, 20_000]).pvalue > 1e-4  # fmt: skip


@pytest.mark.parametrize(
    "ids",
    [
        IdDistribution(),
        IdDistribution(zipf_exponent=1.1, zipf_shift=20.0),
        IdDistribution(bucket_rows=(100, 10_000), bucket_shares=(0.7, 0.3)),
    ],
)
@pytest.mark.parametrize(("row_offset", "num_rows"), [(0, 100_000), (25_000, 25_000), (99_000, 99)])
def test_unique_rows_of_slices_are_as_expected(ids, row_offset, num_rows):
    whole = table(num_embeddings=100_000, pooling_factor=20.0, ids=ids)
    slice_ = row_slice(whole, row_offset, num_rows)
    batch = draw_kernel_batch([slice_], 10_000, rng(2))
    assert batch.values.min() >= 0
    assert batch.values.max() < num_rows
    assert batch.values.size == pytest.approx(200_000 * slice_.row_share, rel=0.01, abs=75)
    expected = expected_unique_rows(ids, 100_000, 200_000, row_share=slice_.row_share)
    assert np.unique(batch.values).size == pytest.approx(expected, rel=0.02, abs=20)


def test_slice_keeps_the_popularity_curve():
    ids = IdDistribution(bucket_rows=(100, 900), bucket_shares=(0.8, 0.2))
    part = slice_distribution(table(ids=ids), 100)
    assert part.bucket_rows == (10, 90)
    assert part.bucket_shares == pytest.approx((0.8, 0.2))
    # Only 1,000 of 4,000 rows ever occur: a quarter of the table has a quarter of those.
    part = slice_distribution(table(ids=ids, num_embeddings=4000), 1000)
    assert part.bucket_rows == (25, 225)
    single = slice_distribution(table(ids=ids), 1)
    assert single.bucket_rows == (1,)
    assert single.bucket_shares == pytest.approx((1.0,))


def test_column_slices_see_all_ids():
    column = ShardSlice(table(), ShardingType.COLUMN_WISE, 0, 4, 1000, 4)
    assert draw_kernel_batch([column], 100, rng()).values.size == 300


def test_bad_batches_are_refused():
    with pytest.raises(InputError, match="negative"):
        draw_table_batch(table(), -1, rng())
    with pytest.raises(InputError, match="not a whole number"):
        draw_table_batch(table(), 1.5, rng())  # type: ignore[arg-type]
    with pytest.raises(InputError, match="lower the batch size"):
        draw_table_batch(table(pooling_factor=1e9), 1000, rng())
    with pytest.raises(InputError, match="lower the batch size"):
        draw_kernel_batch([ShardSlice.whole(table(pooling_factor=1e9))], 1000, rng())
