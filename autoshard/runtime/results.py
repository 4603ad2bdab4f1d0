"""What a run is asked for and what it gives back."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from autoshard.errors import InputError
from autoshard.objective import StepCost
from autoshard.runtime.capabilities import Device, parse_device
from autoshard.runtime.collectives import DEFAULT_TIMEOUT_S
from autoshard.runtime.ids import IdsMode, parse_ids_mode
from autoshard.runtime.timing import StepTimings

#: What a pipelined run measures.
TERMLESS_TIMINGS = ("num_steps", "wall_ms", "wall_ms_p25", "wall_ms_p75")


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How a plan is run."""

    num_steps: int = 20
    """Timed steps, >= 1."""
    warmup_steps: int = 3
    """Steps before them, >= 0."""
    seed: int = 0
    """Of weights, data and dense layers."""
    device: Device = Device.CPU
    timeout_s: float = DEFAULT_TIMEOUT_S
    """Time limit of every collective."""
    ids_mode: IdsMode = IdsMode.FATAL
    hidden: tuple[int, ...] = (64,)
    """Widths of the dense head's hidden layers."""
    num_distinct_batches: int = 8
    """Batches drawn per rank; longer runs use them in turn."""
    pipelined: bool = False
    """Distribute the next batch's ids while one is trained on."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "device", parse_device(self.device))
        object.__setattr__(self, "ids_mode", parse_ids_mode(self.ids_mode))
        for name, low in (
            ("num_steps", 1),
            ("warmup_steps", 0),
            ("seed", 0),
            ("num_distinct_batches", 1),
        ):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value < 2**63:
                raise InputError(
                    f"{name} is not usable",
                    got=repr(value),
                    allowed=f"integers >= {low}, below 2^63",
                )
        timeout = self.timeout_s
        if not (isinstance(timeout, int | float) and math.isfinite(timeout) and 0 < timeout <= 1e7):
            raise InputError(
                "timeout_s is not usable", got=repr(timeout), allowed="seconds, > 0 and at most 1e7"
            )
        if any(isinstance(w, bool) or not isinstance(w, int) or w < 1 for w in self.hidden):
            raise InputError("hidden is not usable", got=self.hidden, allowed="integers >= 1")


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """One run of one plan, all ranks together."""

    timings: StepTimings
    losses: tuple[float, ...]
    """Of every step, warm-up included: the mean over ranks of their losses."""
    stopped_early: bool
    """Whether a rank ran out of batches."""
    unused_batches: tuple[int, ...]
    """Per rank, batches that no step used."""
    num_out_of_range: tuple[int, ...]
    """Per rank, ids that mode `warning` turned into 0."""
    allocated_bytes: tuple[int, ...]
    """Per rank, bytes of weights and optimizer state."""
    held_tables: tuple[tuple[str, ...], ...] = field(default=())
    """Per rank, the tables of which it held something."""
    pipelined: bool = False
    """Whether steps overlapped: then only their wall times were measured, no terms."""

    @property
    def cost(self) -> StepCost:
        """The measured objective."""
        return self.timings.cost()

    def to_json(self) -> dict[str, Any]:
        """The result as a plain dictionary."""
        timings = self.timings.to_json()
        if self.pipelined:
            timings = {name: timings[name] for name in TERMLESS_TIMINGS}
        return {
            **timings,
            "losses": list(self.losses),
            "stopped_early": self.stopped_early,
            "unused_batches": list(self.unused_batches),
            "num_out_of_range": list(self.num_out_of_range),
            "allocated_bytes": list(self.allocated_bytes),
        }


@dataclass(frozen=True, kw_only=True)
class PlanRun:
    """One run out of several plans in several passes."""

    plan_index: int
    pass_index: int
    position: int
    """Place in the order in which the runs were done."""
    result: RunResult
