"""The one objective: what a training step costs under a plan.

    step_ms = max_r fwd_compute[r] + fwd_comms + bwd_comms + max_r bwd_compute[r]

because the ranks meet at each collective. Reward, sharders, reports and the
lower bound all use `step_ms` from here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.errors import InputError

FloatArray = NDArray[np.float64]


class CostSource(Enum):
    """Where a cost comes from. Costs of different sources never share a column."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    SIMULATED = "simulated"


def step_ms(
    fwd_compute_ms: ArrayLike,
    bwd_compute_ms: ArrayLike,
    fwd_comms_ms: ArrayLike,
    bwd_comms_ms: ArrayLike,
) -> FloatArray:
    """The objective, for any number of plans at once.

    Args:
        fwd_compute_ms: [..., R], per rank.
        bwd_compute_ms: [..., R], per rank.
        fwd_comms_ms: [...].
        bwd_comms_ms: [...].

    Returns:
        float64 [...].
    """
    return (
        np.max(np.asarray(fwd_compute_ms, dtype=np.float64), axis=-1)
        + np.asarray(fwd_comms_ms, dtype=np.float64)
        + np.asarray(bwd_comms_ms, dtype=np.float64)
        + np.max(np.asarray(bwd_compute_ms, dtype=np.float64), axis=-1)
    )


@dataclass(frozen=True, kw_only=True)
class StepCost:
    """The four terms of one plan, per rank where they differ by rank."""

    source: CostSource
    fwd_compute_ms: tuple[float, ...]
    """[R]."""
    bwd_compute_ms: tuple[float, ...]
    """[R]."""
    fwd_comms_ms: float
    bwd_comms_ms: float
    extrapolated: bool = False
    """Whether some input lies outside the range of the measurements."""
    oversubscribed: bool = False
    """Whether it was measured with more ranks than cores."""

    @property
    def step_ms(self) -> float:
        """The objective."""
        return float(
            step_ms(self.fwd_compute_ms, self.bwd_compute_ms, self.fwd_comms_ms, self.bwd_comms_ms)
        )

    def to_json(self) -> dict[str, Any]:
        """The cost as a plain dictionary, with the objective spelled out."""
        return {
            "source": self.source.value,
            "step_ms": self.step_ms,
            "fwd_compute_ms": list(self.fwd_compute_ms),
            "bwd_compute_ms": list(self.bwd_compute_ms),
            "fwd_comms_ms": self.fwd_comms_ms,
            "bwd_comms_ms": self.bwd_comms_ms,
            "extrapolated": self.extrapolated,
            "oversubscribed": self.oversubscribed,
        }

    @classmethod
    def from_json(cls, value: Any) -> StepCost:
        """The inverse of `to_json` (`step_ms` is recomputed).

        Raises:
            InputError: a key is missing or a value is not usable.
        """
        if not isinstance(value, Mapping):
            raise InputError("a cost must be an object", got=repr(value)[:80])
        try:
            cost = cls(
                source=CostSource(value["source"]),
                fwd_compute_ms=tuple(_number(v) for v in value["fwd_compute_ms"]),
                bwd_compute_ms=tuple(_number(v) for v in value["bwd_compute_ms"]),
                fwd_comms_ms=_number(value["fwd_comms_ms"]),
                bwd_comms_ms=_number(value["bwd_comms_ms"]),
                extrapolated=_flag(value.get("extrapolated", False)),
                oversubscribed=_flag(value.get("oversubscribed", False)),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise InputError("a cost is malformed", got=str(error)) from error
        terms = (*cost.fwd_compute_ms, *cost.bwd_compute_ms, cost.fwd_comms_ms, cost.bwd_comms_ms)
        if any(not math.isfinite(term) or term < 0 for term in terms):
            raise InputError("a cost is not usable", got=terms, allowed="finite numbers >= 0")
        if not cost.fwd_compute_ms or len(cost.fwd_compute_ms) != len(cost.bwd_compute_ms):
            raise InputError("a cost does not give both compute terms for every rank")
        return cost


def _number(value: object) -> float:
    """A JSON number; text that looks like one is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{value!r:.80} is not a number")
    return float(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError(f"{value!r:.80} is not true or false")
    return value
