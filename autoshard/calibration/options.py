"""What calibration tries: stages, each with options of which cross-validation picks one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from autoshard.calibration.data import SetRows
from autoshard.calibration.tunable import State, TunableModel


class Option(Protocol):
    """One way to adapt a model's kernels."""

    @property
    def name(self) -> str:
        """For the report."""
        ...

    def fit(self, model: TunableModel, start: State, rows: SetRows) -> dict[str, Tensor]:
        """Adapt a state to measured sets.

        Args:
            model: whose programs are evaluated.
            start: where to start.
            rows: what to fit to.

        Returns:
            The adapted state.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Alternatives, of which one is used or none."""

    done: str
    """What has happened to a model that went through it, for the report: "scaled"."""
    options: Sequence[Option]
    """The most restrained one first."""
