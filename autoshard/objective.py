"""The one objective: what a training step costs under a plan.

    step_ms = max_r fwd_compute[r] + fwd_comms + bwd_comms + max_r bwd_compute[r]

because the ranks meet at each collective. Reward, sharders, reports and the
lower bound all use `step_ms` from here.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.errors import InputError, quoted

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
            raise InputError("a cost must be an object", got=quoted(value))
        needed = ("source", "fwd_compute_ms", "bwd_compute_ms", "fwd_comms_ms", "bwd_comms_ms")
        if missing := [key for key in needed if key not in value]:
            raise InputError("a cost lacks a key", got=missing)
        sources = [source.value for source in CostSource]
        if value["source"] not in sources:
            raise InputError(
                "a cost's source is not known", got=quoted(value["source"]), allowed=sources
            )
        cost = cls(
            source=CostSource(value["source"]),
            fwd_compute_ms=_numbers(value, "fwd_compute_ms"),
            bwd_compute_ms=_numbers(value, "bwd_compute_ms"),
            fwd_comms_ms=_number(value["fwd_comms_ms"], "fwd_comms_ms"),
            bwd_comms_ms=_number(value["bwd_comms_ms"], "bwd_comms_ms"),
            extrapolated=_flag(value, "extrapolated"),
            oversubscribed=_flag(value, "oversubscribed"),
        )
        if not cost.fwd_compute_ms or len(cost.fwd_compute_ms) != len(cost.bwd_compute_ms):
            raise InputError("a cost does not give both compute terms for every rank")
        return cost


def _numbers(value: Mapping[str, Any], key: str) -> tuple[float, ...]:
    numbers = value[key]
    if not isinstance(numbers, list | tuple):
        raise InputError(
            f"a cost's {key} is not a list", got=quoted(numbers), allowed="a number per rank"
        )
    return tuple(_number(number, key) for number in numbers)


def _number(value: object, key: str) -> float:
    """A JSON number that a time can be; text that looks like one is none."""
    number = math.nan
    if isinstance(value, int | float) and not isinstance(value, bool):
        with contextlib.suppress(OverflowError):  # an integer beyond every float
            number = float(value)
    if math.isfinite(number) and number >= 0:
        return number
    raise InputError(
        f"a cost's {key} is not usable", got=quoted(value), allowed="finite numbers >= 0"
    )


def _flag(value: Mapping[str, Any], key: str) -> bool:
    flag = value.get(key, False)
    if not isinstance(flag, bool):
        raise InputError(f"a cost's {key} is not usable", got=quoted(flag), allowed="true or false")
    return flag
