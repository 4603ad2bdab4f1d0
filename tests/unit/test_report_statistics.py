"""Statistics of comparisons, against arithmetic and against naive computations."""

import itertools
import math

import numpy as np
import pytest
from scipy import stats

from autoshard.errors import InputError
from autoshard.report.statistics import (
    geometric_mean_ratio,
    kendall_tau,
    mean_and_std,
    relative_errors,
)


def test_the_geometric_mean_of_a_half_and_a_double_is_one():
    estimate = geometric_mean_ratio([1.0, 4.0], [2.0, 2.0])
    assert estimate.value == pytest.approx(1.0)
    assert estimate.num == 2
    # log ratios ±log 2: s = √2·log 2, s/√2 = log 2, and t(0.975, 1) = tan(0.475 π).
    reach = math.tan(0.475 * math.pi) * math.log(2)
    assert estimate.low == pytest.approx(math.exp(-reach))
    assert estimate.high == pytest.approx(math.exp(reach))


def test_the_interval_is_that_of_a_paired_t_test_on_logarithms():
    generator = np.random.default_rng(3)
    values, reference = (
        np.exp(generator.normal(0.02, 0.1, 25)),
        np.exp(generator.normal(0, 0.1, 25)),
    )
    estimate = geometric_mean_ratio(values, reference)
    paired = stats.ttest_rel(np.log(values), np.log(reference))
    two_sided = paired.confidence_interval(0.95)
    assert estimate.low == pytest.approx(math.exp(two_sided.low))
    assert estimate.high == pytest.approx(math.exp(two_sided.high))
    # A one-sided 95% bound is the upper end of a two-sided 90% interval.
    assert estimate.upper_95 == pytest.approx(math.exp(paired.confidence_interval(0.9).high))


def test_equal_ratios_leave_no_doubt():
    estimate = geometric_mean_ratio([1.1, 2.2, 3.3], [1.0, 2.0, 3.0])
    assert (estimate.low, estimate.value, estimate.high) == pytest.approx((1.1, 1.1, 1.1))


def test_swapping_both_sides_inverts_the_ratio():
    first, second = [1.0, 2.0, 5.0], [1.5, 1.9, 4.0]
    there, back = geometric_mean_ratio(first, second), geometric_mean_ratio(second, first)
    assert there.value * back.value == pytest.approx(1.0)
    assert there.low * back.high == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("values", "reference"),
    [([1.0], [1.0]), ([], []), ([1.0, 0.0], [1, 1]), ([1, -2], [1, 1]), ([1, math.nan], [1, 1])],
)
def test_a_ratio_that_has_no_meaning_is_refused(values, reference):
    with pytest.raises(InputError):
        geometric_mean_ratio(values, reference)


def naive_tau_b(first, second):
    agree = disagree = only_first = only_second = 0
    for (a, b), (c, d) in itertools.combinations(list(zip(first, second, strict=True)), 2):
        product = (a - c) * (b - d)
        agree += product > 0
        disagree += product < 0
        only_first += a != c and b == d
        only_second += a == c and b != d
    strict = agree + disagree
    return (agree - disagree) / math.sqrt((strict + only_first) * (strict + only_second))


def test_kendalls_tau_counts_pairs():
    first = [1.0, 2.0, 3.0, 3.0, 5.0, 6.0]
    second = [1.0, 3.0, 2.0, 4.0, 4.0, 9.0]
    estimate = kendall_tau(first, second)
    assert estimate.value == pytest.approx(naive_tau_b(first, second))
    assert estimate.low <= estimate.value <= estimate.high
    assert estimate.num == 6


def test_tau_of_equal_and_of_opposite_orders():
    values = np.arange(8.0)
    same, opposite = kendall_tau(values, values**3), kendall_tau(values, -values)
    assert (same.low, same.value, same.high) == pytest.approx((1, 1, 1))
    assert (opposite.low, opposite.value, opposite.high) == pytest.approx((-1, -1, -1))


def test_the_bootstrap_repeats_exactly():
    values = np.random.default_rng(0).random((2, 12))
    assert kendall_tau(*values) == kendall_tau(*values)


def test_constant_values_have_no_order():
    assert math.isnan(kendall_tau([1.0, 1.0, 1.0], [1.0, 2.0, 3.0]).value)


def test_tau_of_two_pairs_is_refused():
    with pytest.raises(InputError, match="three pairs"):
        kendall_tau([1, 2], [1, 2])
    with pytest.raises(InputError, match="three pairs"):
        kendall_tau([1, 2, 3], [1, 2])


def test_relative_errors_are_relative_to_the_measurement():
    assert relative_errors([3.0, 1.0], [2.0, 4.0]) == pytest.approx([0.5, 0.75])
    with pytest.raises(InputError):
        relative_errors([1.0], [0.0])


def test_mean_and_std_skip_what_is_not_finite():
    assert mean_and_std([1.0, math.nan, 3.0, math.inf]) == pytest.approx((2.0, math.sqrt(2)))
    assert mean_and_std([5.0]) == (5.0, 0.0)
    assert all(math.isnan(value) for value in mean_and_std([math.nan]))


@pytest.mark.parametrize("one_sided", [[2.0], [2.0, 3.0], [[1.0, 2.0, 3.0]]])
def test_one_value_is_never_paired_with_many(one_sided):
    with pytest.raises(InputError, match="pairs"):
        geometric_mean_ratio([1.0, 2.0, 3.0], one_sided)
    with pytest.raises(InputError, match="pairs"):
        relative_errors([1.0, 2.0, 3.0], one_sided)


def test_an_infinite_value_is_named():
    with pytest.raises(InputError, match=r"got: inf$"):
        geometric_mean_ratio([1.0, math.inf], [1.0, 1.0])


def test_tau_of_a_missing_value_is_refused():
    with pytest.raises(InputError, match="finite"):
        kendall_tau([1.0, 2.0, math.nan], [1.0, 2.0, 3.0])
