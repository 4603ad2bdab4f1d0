"""The makespan bound against every placement, and what it gives in cases worked out by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cost_models.bounds import makespan_lower_bound


def best_makespan(costs: list[float], world_size: int) -> float:
    """The optimum, by trying every placement."""
    best = float("inf")
    for ranks in itertools.product(range(world_size), repeat=len(costs)):
        loads = [0.0] * world_size
        for cost, rank in zip(costs, ranks, strict=True):
            loads[rank] += cost
        best = min(best, max(loads))
    return best


@settings(max_examples=150, deadline=None)
@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=7), st.integers(1, 3))
def test_no_placement_is_below_it(costs, world_size):
    bound = makespan_lower_bound(costs, world_size)
    assert 0 <= bound <= best_makespan(costs, world_size) * (1 + 1e-12)


@pytest.mark.parametrize(
    ("costs", "world_size", "expected"),
    [
        ([], 3, 0.0),
        ([5.0], 4, 5.0),
        ([1.0, 2.0, 3.0], 1, 6.0),
        ([3.0, 3.0, 3.0], 2, 6.0),  # two ranks cannot share three shards: one gets two
        ([1.0] * 7, 3, 3.0),  # one of three ranks gets three of seven
        ([4.0, 3.0, 2.0, 1.0], 2, 5.0),  # the average
        ([0.0, 0.0], 2, 0.0),
    ],
)
def test_cases_worked_out_by_hand(costs, world_size, expected):
    assert makespan_lower_bound(np.array(costs), world_size) == pytest.approx(expected, rel=1e-12)


def test_the_order_does_not_matter_and_the_input_stays():
    costs = np.array([2.0, 9.0, 4.0, 4.0])
    kept = costs.copy()
    assert makespan_lower_bound(costs, 2) == makespan_lower_bound(costs[::-1], 2)
    np.testing.assert_array_equal(costs, kept)
