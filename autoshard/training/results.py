"""What a training run gives back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoshard.runtime.timing import StepTimings
from autoshard.training.curve import CurveRow


@dataclass(frozen=True, kw_only=True)
class TrainingResult:
    """One training run, all ranks together."""

    data: str
    """The data set's description."""
    num_steps: int
    """Steps done, those before a resumption included."""
    num_samples: int
    """Training samples done, of all ranks."""
    losses: tuple[float, ...]
    """Of every step since the start or the resumption, the mean over ranks."""
    curve: tuple[CurveRow, ...]
    """One row per evaluation since the run was first started."""
    timings: StepTimings | None
    """Of the last steps; None where none was done."""
    checkpoint: str | None
    """The newest checkpoint's folder."""
    notes: tuple[str, ...] = ()
    """What a reader should know of the run."""
    num_out_of_range: tuple[int, ...] = ()
    """Per rank, ids that mode `warning` turned into 0."""
    allocated_bytes: tuple[int, ...] = ()
    """Per rank, bytes of weights and optimizer state."""

    def to_json(self) -> dict[str, Any]:
        """The result as a plain dictionary."""
        return {
            "data": self.data,
            "num_steps": self.num_steps,
            "num_samples": self.num_samples,
            "losses": list(self.losses),
            "curve": [row.to_json() for row in self.curve],
            "timings": None if self.timings is None else self.timings.to_json(),
            "checkpoint": self.checkpoint,
            "notes": list(self.notes),
            "num_out_of_range": list(self.num_out_of_range),
            "allocated_bytes": list(self.allocated_bytes),
        }
