"""How far a run is, and what of its past it still needs.

A checkpoint keeps this of a run, beside weights and optimizer states.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from autoshard.clicks.sources import parse_source
from autoshard.errors import ArtifactError
from autoshard.training.curve import CurveRow
from autoshard.training.manifest import Manifest
from autoshard.training.options import TrainingOptions

#: Options of data sets that may change between runs: where files are, and how they are read.
_FREE_DATA_OPTIONS = {"evaluation", "malformed"}


@dataclass(kw_only=True)
class Position:
    """Where a run stands between two steps; equal on every rank."""

    step: int = 0
    """Steps done."""
    epoch: int = 0
    """Epochs done."""
    epoch_samples: int = 0
    """Samples of the running epoch that are done, of all ranks."""
    samples: int = 0
    """Samples done, of all ranks."""
    pending_loss: float = 0.0
    """Sum of the losses of the steps since the last row of the curve."""
    pending_steps: int = 0
    pending_s: float = 0.0
    """Seconds that these steps took."""
    pending_samples: int = 0
    curve: list[CurveRow] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """The position as plain JSON values."""
        return {**vars(self), "curve": [row.to_json() for row in self.curve]}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Position:
        """The inverse of `to_json`."""
        rows = [CurveRow.from_json(row) for row in value["curve"]]
        return cls(**{**value, "curve": rows})

    def advance(self, losses: list[float], global_batch_size: int, elapsed_s: float) -> None:
        """Count finished steps.

        Args:
            losses: of each step, the mean over ranks.
            global_batch_size: samples of a step.
            elapsed_s: seconds that they took.
        """
        done = len(losses) * global_batch_size
        self.step += len(losses)
        self.epoch_samples += done
        self.samples += done
        for loss in losses:  # one by one, so that interrupted runs add up alike
            self.pending_loss += loss
        self.pending_steps += len(losses)
        self.pending_s += elapsed_s
        self.pending_samples += done

    def add_row(
        self, auc: float | None, log_loss: float | None, samples_per_epoch: int | None
    ) -> None:
        """Add an evaluation to the curve.

        Args:
            auc: of the evaluation.
            log_loss: of the evaluation.
            samples_per_epoch: that are trained on; None where that is not known.
        """
        within = self.epoch_samples / samples_per_epoch if samples_per_epoch else 0.0
        self.curve.append(
            CurveRow(
                step=self.step,
                epoch=round(self.epoch + within, 6),
                samples=self.samples,
                train_loss=self.pending_loss / max(1, self.pending_steps),
                auc=auc,
                log_loss=log_loss,
                samples_per_s=self.pending_samples / self.pending_s if self.pending_s else 0.0,
            )
        )
        self.pending_loss, self.pending_steps = 0.0, 0
        self.pending_s, self.pending_samples = 0.0, 0


def run_identity(options: TrainingOptions) -> dict[str, Any]:
    """What must stay the same when a run is resumed, apart from the tables."""
    name, _, data_options = parse_source(options.data)
    return {
        "data": name,
        "data_options": {k: v for k, v in data_options.items() if k not in _FREE_DATA_OPTIONS},
        "model": options.model.value,
        "bottom": list(options.bottom),
        "top": list(options.top),
        "interaction_dim": options.interaction_dim,
        "dense_optimizer": options.dense_optimizer.value,
        "seed": options.run.seed,
    }


def check_identity(manifest: Manifest, options: TrainingOptions) -> None:
    """Refuse to resume a run that was started with other options.

    Raises:
        ArtifactError: names the option.
    """
    stored = manifest.state["identity"]
    for name, value in run_identity(options).items():
        if stored.get(name) != value:
            raise ArtifactError(
                f"checkpoint {manifest.folder} was trained with another {name}",
                got=stored.get(name),
                allowed=value,
                remedy="resume with the options that the run was started with",
            )
