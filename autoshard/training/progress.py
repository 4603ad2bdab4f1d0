"""The line of progress that a rank sends, and how whoever shows it reads it."""

from __future__ import annotations

import re
from dataclasses import dataclass

_LINE = re.compile(
    r"(?P<what>[^;]*); step (?P<step>\d+)(?: of (?P<total>\d+))?(?:, (?P<rate>\d+) samples/s)?"
)


@dataclass(frozen=True, kw_only=True)
class Progress:
    """How far a training run is."""

    what: str
    """What it does, such as `training, epoch 2 of 3`."""
    step: int
    """Steps done."""
    total: int | None = None
    """Steps in all; None where the length of the data is not known."""
    samples_per_s: float | None = None
    """Of all ranks, lately."""

    def line(self) -> str:
        """The line of text, for people and for `parse_progress`."""
        total = "" if self.total is None else f" of {self.total}"
        rate = "" if self.samples_per_s is None else f", {self.samples_per_s:.0f} samples/s"
        return f"{self.what}; step {self.step}{total}{rate}"


def parse_progress(line: str) -> Progress | None:
    """What a line says; None for a line of another kind."""
    match = _LINE.fullmatch(line)
    if match is None:
        return None
    total, rate = match["total"], match["rate"]
    return Progress(
        what=match["what"],
        step=int(match["step"]),
        total=None if total is None else int(total),
        samples_per_s=None if rate is None else float(rate),
    )
