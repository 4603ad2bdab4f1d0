"""Bootstrapped scores against SciPy, NumPy and cases whose answer is known."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kendalltau

from cost_net.bootstrap import (
    Interval,
    Resamples,
    error_intervals,
    error_statistics,
    groups_of_equal,
    median_difference,
    tau_interval,
)

RNG = np.random.default_rng(0)


def test_statistics_are_numpys_and_averaged_over_seeds():
    errors = RNG.random((3, 41))
    found = error_statistics(errors)
    assert found["median"] == pytest.approx(np.median(errors, axis=1).mean())
    assert found["p90"] == pytest.approx(np.quantile(errors, 0.9, axis=1).mean())
    assert found["mean"] == pytest.approx(errors.mean())


def test_the_interval_of_a_mean_is_that_of_the_central_limit():
    errors = RNG.random((1, 400))
    interval = error_intervals(errors, Resamples.draw(400, 4000, seed=0))["mean"]
    half_width = 1.96 * errors.std() / np.sqrt(400)
    assert interval.high - interval.value == pytest.approx(half_width, rel=0.1)
    assert interval.value - interval.low == pytest.approx(half_width, rel=0.1)


def test_differences_are_paired():
    """A predictor that is always 1% worse differs by 1%, however wide either interval is."""
    errors = RNG.random((1, 50))
    difference = median_difference(errors, errors + 0.01, Resamples.draw(50, 200, seed=0))
    assert difference.value == pytest.approx(-0.01)
    assert difference.low == pytest.approx(-0.01)
    assert difference.high == pytest.approx(-0.01)


@pytest.mark.parametrize("ties", [False, True])
def test_tau_is_scipys_in_every_resample(ties: bool):
    measured, predicted = RNG.random(40), RNG.random((2, 40))
    if ties:
        measured, predicted = np.round(measured, 1), np.round(predicted, 1)
    resamples = Resamples.draw(40, 120, seed=1)
    found = tau_interval(predicted, measured, [np.arange(40)], resamples.counts_BN())
    assert found is not None
    assert found.value == pytest.approx(
        np.mean([kendalltau(one, measured).statistic for one in predicted])
    )
    draws = [
        np.mean([kendalltau(one[rows], measured[rows]).statistic for one in predicted])
        for rows in resamples.rows_BN
    ]
    assert found.low == pytest.approx(np.quantile(draws, 0.025), abs=1e-6)
    assert found.high == pytest.approx(np.quantile(draws, 0.975), abs=1e-6)


def test_tau_weighs_groups_by_their_pairs():
    counts = np.array([1] * 6 + [2] * 4 + [3] * 2)
    groups = groups_of_equal(counts, 3)
    assert [len(rows) for rows in groups] == [6, 4]
    measured = np.arange(12.0)
    predicted = measured.copy()
    predicted[6:10] = -predicted[6:10]  # the second group is ranked the wrong way round
    found = tau_interval(predicted[None], measured, groups, np.ones((1, 12)))
    assert found is not None
    assert found.value == pytest.approx((15 - 6) / 21)
    assert tau_interval(predicted[None], measured, [], np.ones((1, 12))) is None


def test_draws_that_are_not_finite_are_left_out():
    interval = Interval.of(1.0, np.array([np.nan, 0.0, 2.0]))
    assert (interval.low, interval.high) == (pytest.approx(0.05), pytest.approx(1.95))
