"""Id distributions against brute force: every formula is counted or simulated anew."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.distributions import (
    NUM_REUSE_BINS,
    REUSE_BIN_EDGES,
    IdDistribution,
    expected_unique_rows,
    reuse_histogram,
    sample_ids,
    scatter_rows,
)
from autoshard.errors import InputError

LAWS = [
    IdDistribution(),
    IdDistribution(zipf_exponent=0.6, zipf_shift=0.0),
    IdDistribution(zipf_exponent=1.0, zipf_shift=2.7),
    IdDistribution(zipf_exponent=1.3, zipf_shift=100.0),
    IdDistribution(zipf_exponent=2.0, zipf_shift=0.0),
    IdDistribution(bucket_rows=(3, 50, 900), bucket_shares=(0.5, 0.3, 0.2)),
]


def exact_probabilities(ids: IdDistribution, num_embeddings: int) -> np.ndarray:
    """P(row) by rank, straight from the definition."""
    if ids.is_measured:
        mass = np.concatenate(
            [
                np.full(rows, share / rows)
                for rows, share in zip(ids.bucket_rows, ids.bucket_shares, strict=True)
            ]
        )
        return np.concatenate([mass, np.zeros(num_embeddings - mass.size)])
    rank = np.arange(1, num_embeddings + 1)
    mass = (rank + ids.zipf_shift) ** -ids.zipf_exponent
    return mass / mass.sum()


@pytest.mark.parametrize("ids", LAWS)
def test_bucket_mass_matches_the_definition(ids):
    num_embeddings = 5000
    rows, shares = ids.buckets(num_embeddings)
    assert np.all(rows == np.round(rows))
    assert np.all(rows >= 1)
    assert shares.sum() == pytest.approx(1.0)
    cumulative = np.concatenate([[0.0], np.cumsum(exact_probabilities(ids, num_embeddings))])
    edges = np.concatenate([[0.0], np.cumsum(rows)]).astype(int)
    expected = np.diff(cumulative[edges])
    np.testing.assert_allclose(shares, expected, rtol=3e-3, atol=1e-12)


@pytest.mark.parametrize("ids", LAWS)
@pytest.mark.parametrize("num_lookups", [1, 300, 40_000])
def test_unique_rows_match_the_exact_expectation(ids, num_lookups):
    num_embeddings = 5000
    probability = exact_probabilities(ids, num_embeddings)
    expected = np.sum(1.0 - (1.0 - probability) ** num_lookups)
    got = expected_unique_rows(ids, num_embeddings, num_lookups)
    # Poisson counts instead of multinomial ones, and even rows inside a bucket; a single
    # lookup can only be off by the head row's square (at most 37%, for exponent 2).
    tolerance = 0.01 if num_lookups > 1 else 0.5 * np.sum(probability**2) + 1e-3
    assert got == pytest.approx(expected, rel=tolerance)


def test_unique_rows_count_only_the_row_share():
    ids = IdDistribution(zipf_exponent=1.1)
    whole = expected_unique_rows(ids, 1000, 500)
    assert expected_unique_rows(ids, 1000, 500, row_share=0.25) == pytest.approx(whole / 4)
    assert expected_unique_rows(ids, 1000, 0) == 0.0


@pytest.mark.parametrize("ids", LAWS)
def test_reuse_histogram_matches_counted_draws(ids):
    num_embeddings, num_lookups, repeats = 5000, 20_000, 40
    generator = np.random.default_rng(0)
    probability = exact_probabilities(ids, num_embeddings)
    row_bins, lookup_bins = np.zeros(NUM_REUSE_BINS), np.zeros(NUM_REUSE_BINS)
    for _ in range(repeats):
        counts = generator.multinomial(num_lookups, probability)
        counts = counts[counts > 0]
        bins = [next(k for k, edge in enumerate(REUSE_BIN_EDGES) if c <= edge) for c in counts]
        row_bins += np.bincount(bins, minlength=NUM_REUSE_BINS)
        lookup_bins += np.bincount(bins, weights=counts, minlength=NUM_REUSE_BINS)
    rows, lookups = reuse_histogram(ids, num_embeddings, num_lookups)
    # A single hot row may stand at a bin's edge, where buckets round its rate.
    np.testing.assert_allclose(rows, row_bins / row_bins.sum(), atol=0.01)
    np.testing.assert_allclose(lookups, lookup_bins / lookup_bins.sum(), atol=0.02)


def test_reuse_histogram_by_hand():
    # 10,000 lookups on one row: all in (8192, 16384], which is bin 14.
    rows, lookups = reuse_histogram(IdDistribution(), 1, 10_000)
    assert rows[14] == pytest.approx(1.0)
    assert lookups[14] == pytest.approx(1.0)
    rows, lookups = reuse_histogram(IdDistribution(), 10, 0)
    assert rows.sum() == 0.0
    assert lookups.sum() == 0.0


@pytest.mark.parametrize("ids", LAWS)
def test_drawn_ids_follow_the_law(ids):
    num_embeddings, num_lookups = 2000, 400_000
    drawn = sample_ids(ids, num_embeddings, num_lookups, np.random.default_rng(3))
    assert drawn.dtype == np.int64
    assert drawn.min() >= 0
    assert drawn.max() < num_embeddings
    by_rank = np.bincount(drawn, minlength=num_embeddings)[
        scatter_rows(np.arange(num_embeddings), num_embeddings)
    ]
    edges = np.array([0, 1, 3, 10, 53, 200, 953, 2000])
    expected = np.add.reduceat(exact_probabilities(ids, num_embeddings), edges[:-1]) * num_lookups
    got = np.add.reduceat(by_rank, edges[:-1])
    # Five standard deviations, and half a percent for rows that share a bucket's mean.
    assert np.all(np.abs(got - expected) <= 5 * np.sqrt(expected) + 0.005 * expected + 0.5)


def test_drawn_ids_repeat_by_seed():
    ids = IdDistribution(zipf_exponent=1.0)
    first = sample_ids(ids, 1000, 500, np.random.default_rng(7))
    np.testing.assert_array_equal(first, sample_ids(ids, 1000, 500, np.random.default_rng(7)))
    assert np.any(first != sample_ids(ids, 1000, 500, np.random.default_rng(8)))
    assert sample_ids(ids, 1000, 0, np.random.default_rng(7)).shape == (0,)


@settings(max_examples=60, deadline=None)
@given(num_embeddings=st.integers(1, 3000))
def test_scatter_is_one_to_one(num_embeddings):
    rows = scatter_rows(np.arange(num_embeddings), num_embeddings)
    assert sorted(rows) == list(range(num_embeddings))


@pytest.mark.parametrize("bits", [31, 35, 40, 50, 61])
def test_scatter_does_not_overflow(bits):
    num_embeddings = 2**bits + 12_345
    rank = np.array([0, 1, 2, num_embeddings // 3, num_embeddings - 1], dtype=np.int64)
    multiplier = round(num_embeddings * 0.6180339887498949)
    while math.gcd(multiplier, num_embeddings) != 1:
        multiplier += 1
    expected = [int(k) * multiplier % num_embeddings for k in rank]
    assert scatter_rows(rank, num_embeddings).tolist() == expected


def test_scaled_down_buckets_keep_the_curve():
    ids = IdDistribution(bucket_rows=(10, 100, 1000), bucket_shares=(0.6, 0.3, 0.1))
    rows, shares = ids.buckets(111)
    np.testing.assert_array_equal(rows, [1, 10, 100])
    np.testing.assert_allclose(shares, [0.6, 0.3, 0.1], atol=2e-3)
    rows, shares = ids.buckets(1)
    np.testing.assert_array_equal(rows, [1])
    np.testing.assert_allclose(shares, [1.0])


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 1.0 + 1e-12, 3.0, 50.0])
@pytest.mark.parametrize("shift", [0.0, 1e-3, 1e9])
@pytest.mark.parametrize("num_embeddings", [1, 2, 17, 10**9, 2**62])
def test_extreme_laws_stay_finite(exponent, shift, num_embeddings):
    ids = IdDistribution(zipf_exponent=exponent, zipf_shift=shift)
    rows, shares = ids.buckets(num_embeddings)
    assert np.all(np.isfinite(shares))
    assert shares.sum() == pytest.approx(1.0)
    assert rows.sum() == pytest.approx(num_embeddings)
    drawn = sample_ids(ids, num_embeddings, 100, np.random.default_rng(0))
    assert drawn.min() >= 0
    assert drawn.max() < num_embeddings


@pytest.mark.parametrize("ids", LAWS)
def test_json_round_trip(ids):
    assert IdDistribution.from_json(ids.to_json()) == ids


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"zipf_exponent": -1.0}, "zipf_exponent"),
        ({"zipf_exponent": math.nan}, "zipf_exponent"),
        ({"zipf_shift": math.inf}, "zipf_shift"),
        ({"bucket_rows": (1,), "bucket_shares": ()}, "differ in length"),
        ({"bucket_rows": (0,), "bucket_shares": (1.0,)}, "bucket_rows"),
        ({"bucket_rows": (1,), "bucket_shares": (-1.0,)}, "bucket_shares"),
        ({"bucket_rows": (1, 2), "bucket_shares": (0.5, 0.4)}, "sum to 1"),
    ],
)
def test_unusable_laws_are_refused(fields, named):
    with pytest.raises(InputError, match=named):
        IdDistribution(**fields)
    with pytest.raises(InputError, match=named):
        IdDistribution.from_json(fields)


def test_unknown_json_keys_are_refused():
    with pytest.raises(InputError, match="zipf_power"):
        IdDistribution.from_json({"zipf_power": 1.0})
    with pytest.raises(InputError, match="must be an object"):
        IdDistribution.from_json([1.0])  # type: ignore[arg-type]
