"""What a step's time was spent on, per rank, and how it becomes the four terms.

Every rank records, for each step, how long its kernels ran and when it arrived at and
left each collective. The clock is monotonic and common to all processes of one host; for
ranks on several hosts, `autoshard.runtime.clocks` gives each rank's offset.

Shapes: S=measured steps, R=ranks.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from autoshard.errors import InputError
from autoshard.objective import CostSource, StepCost

FloatArray = NDArray[np.float64]
_NS_PER_MS = 1e6


class Compute(Enum):
    """The two compute terms: kernel time only."""

    FORWARD = "fwd_compute"
    BACKWARD = "bwd_compute"


class Phase(Enum):
    """The collectives of a step, in the order in which they run."""

    CONTROL = "control"
    """The step's status where no ids travel: not caused by tables, so no term of the objective."""
    IDS = "ids"
    """The step's status rides on it."""
    LATE_IDS = "late_ids"
    """Those of a step whose ids did not fit into the room left for them."""
    NODE_OUTPUTS = "node_outputs"
    """Partial sums, between the ranks of a node."""
    OUTPUTS = "outputs"
    GRADIENTS = "gradients"
    NODE_GRADIENTS = "node_gradients"
    DENSE = "dense"
    """The all-reduce of dense gradients; not a term of the objective."""


FORWARD_PHASES = (Phase.IDS, Phase.LATE_IDS, Phase.NODE_OUTPUTS, Phase.OUTPUTS)
BACKWARD_PHASES = (Phase.GRADIENTS, Phase.NODE_GRADIENTS)


@dataclass
class StepRecord:
    """One rank's clock readings of one step, in nanoseconds."""

    start_ns: int = 0
    end_ns: int = 0
    compute_ns: dict[str, int] = field(default_factory=dict)
    """By `Compute` value."""
    collectives_ns: dict[str, tuple[int, int]] = field(default_factory=dict)
    """By `Phase` value: (arrival, end)."""


class Recorder:
    """Collects one rank's `StepRecord`s."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.step = 0
        """Number of the step that is running, for error messages."""
        self.records: list[StepRecord] = []
        self.waits_for_device = True
        """Whether a reading waits for the device; otherwise it only tells when work was queued."""
        self._current = StepRecord()

    def now_ns(self) -> int:
        """The clock, once everything queued on the device has finished."""
        if self.waits_for_device and self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.monotonic_ns()

    def start_step(self, step: int) -> None:
        """Begin step number `step`."""
        self.step = step
        self._current = StepRecord(start_ns=self.now_ns())

    def end_step(self) -> None:
        """Keep the step's record."""
        self._current.end_ns = self.now_ns()
        self.records.append(self._current)
        self._current = StepRecord()

    @contextmanager
    def compute(self, kind: Compute) -> Iterator[None]:
        """Add the time of the enclosed kernels to `kind`."""
        start = self.now_ns()
        yield
        spent = self._current.compute_ns
        spent[kind.value] = spent.get(kind.value, 0) + self.now_ns() - start

    @contextmanager
    def collective(self, phase: Phase) -> Iterator[None]:
        """Note arrival at and end of the enclosed collective."""
        arrival = self.now_ns()
        yield
        self._current.collectives_ns[phase.value] = (arrival, self.now_ns())


@dataclass(frozen=True, kw_only=True)
class StepTimings:
    """Measured steps of one plan, all ranks together."""

    fwd_compute_ms_SR: FloatArray
    bwd_compute_ms_SR: FloatArray
    transfer_ms_S: Mapping[Phase, FloatArray]
    """Per collective, from the last rank's arrival to the last rank's end."""
    wait_ms_SR: Mapping[Phase, FloatArray]
    """Per collective, how long each rank waited for the last one to arrive."""
    wall_ms_S: FloatArray
    """From the first rank's start to the last rank's end."""
    oversubscribed: bool = False
    """Whether there were more ranks than cores."""

    @property
    def num_steps(self) -> int:
        """S."""
        return len(self.wall_ms_S)

    def cost(self) -> StepCost:
        """The objective's four terms, each the median over steps."""

        def comms(phases: Sequence[Phase]) -> float:
            parts = [self.transfer_ms_S[phase] for phase in phases if phase in self.transfer_ms_S]
            return float(np.median(np.sum(parts, axis=0))) if parts else 0.0

        return StepCost(
            source=CostSource.MEASURED,
            fwd_compute_ms=tuple(np.median(self.fwd_compute_ms_SR, axis=0).tolist()),
            bwd_compute_ms=tuple(np.median(self.bwd_compute_ms_SR, axis=0).tolist()),
            fwd_comms_ms=comms(FORWARD_PHASES),
            bwd_comms_ms=comms(BACKWARD_PHASES),
            oversubscribed=self.oversubscribed,
        )

    @property
    def wall_ms(self) -> float:
        """Median wall time of a step."""
        return float(np.median(self.wall_ms_S))

    @property
    def other_ms(self) -> float:
        """What the wall time holds beyond the objective: data, dense layers, packing; >= 0."""
        return max(0.0, self.wall_ms - self.cost().step_ms)

    def wait_ms(self) -> tuple[float, ...]:
        """Per rank, the median over steps of its waiting at all collectives together, [R]."""
        if not self.wait_ms_SR:
            return (0.0,) * self.fwd_compute_ms_SR.shape[1]
        total_SR = np.sum(list(self.wait_ms_SR.values()), axis=0)
        return tuple(np.median(total_SR, axis=0).tolist())

    def to_json(self) -> dict[str, Any]:
        """Medians and quartiles as a plain dictionary."""
        low, high = np.percentile(self.wall_ms_S, [25, 75])
        return {
            "num_steps": self.num_steps,
            "cost": self.cost().to_json(),
            "wall_ms": self.wall_ms,
            "wall_ms_p25": float(low),
            "wall_ms_p75": float(high),
            "other_ms": self.other_ms,
            "wait_ms": list(self.wait_ms()),
            "transfer_ms": {
                phase.value: float(np.median(values))
                for phase, values in self.transfer_ms_S.items()
            },
        }


def combine_records(
    records_RS: Sequence[Sequence[StepRecord]],
    *,
    clock_offsets_ns: Sequence[int] | None = None,
    oversubscribed: bool = False,
) -> StepTimings:
    """Put the records of all ranks together.

    Args:
        records_RS: the same number of steps from every rank, at least one.
        clock_offsets_ns: what each rank's clock shows ahead of rank 0's; 0 on one host.
        oversubscribed: whether there were more ranks than cores.

    Raises:
        InputError: no steps, or ranks that disagree on their number.
    """
    counts = {len(records) for records in records_RS}
    if len(counts) != 1 or counts == {0}:
        raise InputError(
            "no timings: ranks recorded no steps, or different numbers of them",
            got=[len(records) for records in records_RS],
            allowed="the same number >= 1 on every rank",
            remedy="run at least one step after the warm-up",
        )
    offset_R = np.array(clock_offsets_ns or [0] * len(records_RS), dtype=np.int64)

    def readings(pick: Any) -> NDArray[np.int64]:
        return np.array([[pick(r) for r in records] for records in records_RS], dtype=np.int64).T

    def compute_ms(kind: Compute) -> FloatArray:
        return readings(lambda r: r.compute_ns.get(kind.value, 0)) / _NS_PER_MS

    transfer: dict[Phase, FloatArray] = {}
    wait: dict[Phase, FloatArray] = {}
    for phase in Phase:
        name = phase.value
        ran_SR = readings(lambda r, name=name: name in r.collectives_ns).astype(bool)
        if not ran_SR.any():
            continue
        arrive_SR = readings(lambda r, name=name: r.collectives_ns.get(name, (0, 0))[0]) - offset_R
        end_SR = readings(lambda r, name=name: r.collectives_ns.get(name, (0, 0))[1]) - offset_R
        # Some collectives run in some steps only; in the others they take no time.
        absent_S = ~ran_SR.all(axis=1)
        arrive_SR[absent_S], end_SR[absent_S] = 0, 0
        last_S = arrive_SR.max(axis=1)
        # A rank that exchanges nothing may leave before the last one arrives.
        transfer[phase] = np.maximum(end_SR.max(axis=1) - last_S, 0) / _NS_PER_MS
        wait[phase] = (last_S[:, None] - arrive_SR) / _NS_PER_MS
    start_SR = readings(lambda r: r.start_ns) - offset_R
    end_SR = readings(lambda r: r.end_ns) - offset_R
    return StepTimings(
        fwd_compute_ms_SR=compute_ms(Compute.FORWARD),
        bwd_compute_ms_SR=compute_ms(Compute.BACKWARD),
        transfer_ms_S=transfer,
        wait_ms_SR=wait,
        wall_ms_S=(end_SR.max(axis=1) - start_SR.min(axis=1)) / _NS_PER_MS,
        oversubscribed=oversubscribed,
    )
