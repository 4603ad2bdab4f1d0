"""The one objective and the cost that carries it."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest

from autoshard.errors import InputError
from autoshard.objective import CostSource, StepCost, step_ms

COST = StepCost(
    source=CostSource.PREDICTED,
    fwd_compute_ms=(1.0, 4.0, 2.0),
    bwd_compute_ms=(9.0, 3.0, 5.0),
    fwd_comms_ms=0.5,
    bwd_comms_ms=0.25,
)


def test_each_phase_waits_for_its_own_slowest_rank() -> None:
    assert COST.step_ms == 4.0 + 0.5 + 0.25 + 9.0


def test_many_plans_at_once() -> None:
    fwd, bwd = np.array([[1.0, 2.0], [5.0, 0.0]]), np.array([[3.0, 1.0], [1.0, 7.0]])
    np.testing.assert_array_equal(
        step_ms(fwd, bwd, np.array([10.0, 20.0]), np.array([100.0, 200.0])), [115.0, 232.0]
    )


def test_round_trip_through_text() -> None:
    for cost in (COST, StepCost(**{**COST.__dict__, "extrapolated": True, "oversubscribed": True})):
        assert StepCost.from_json(json.loads(json.dumps(cost.to_json()))) == cost
    assert COST.to_json()["step_ms"] == COST.step_ms


@pytest.mark.parametrize(
    "change",
    [
        {"source": "guessed"},
        {"fwd_comms_ms": -1.0},
        {"fwd_comms_ms": float("nan")},
        {"bwd_compute_ms": [1.0, float("inf"), 1.0]},
        {"bwd_compute_ms": [1.0]},
        {"fwd_compute_ms": [], "bwd_compute_ms": []},
        {"fwd_compute_ms": None},
        {"fwd_compute_ms": "123", "bwd_compute_ms": "123"},
        {"fwd_comms_ms": "1.0"},
        {"fwd_comms_ms": 10**400},
        {"fwd_comms_ms": None},
        {"extrapolated": "no"},
    ],
)
def test_unusable_costs_are_refused(change: dict[str, Any]) -> None:
    with pytest.raises(InputError):
        StepCost.from_json({**COST.to_json(), **change})


@pytest.mark.parametrize("key", ["source", "fwd_compute_ms", "bwd_compute_ms", "bwd_comms_ms"])
def test_a_missing_term_is_refused_by_name(key: str) -> None:
    value = COST.to_json()
    del value[key]
    with pytest.raises(InputError, match=key):
        StepCost.from_json(value)


@pytest.mark.parametrize("value", [None, [], "cost", 3])
def test_a_cost_is_an_object(value: object) -> None:
    with pytest.raises(InputError, match="object"):
        StepCost.from_json(value)
