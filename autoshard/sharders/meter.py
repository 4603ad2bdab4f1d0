"""The meter of a search: evaluations make a run repeatable, time only cuts it short."""

from __future__ import annotations

import time

from autoshard.protocols import SearchBudget


class Meter:
    """Counts evaluations against a budget and watches the clock."""

    def __init__(self, budget: SearchBudget) -> None:
        self._budget = budget
        self._started_s = time.monotonic()
        self.num_evaluations = 0
        self.cut_short = False

    @property
    def remaining(self) -> int:
        """Evaluations that are left."""
        return max(0, self._budget.num_evaluations - self.num_evaluations)

    @property
    def deadline_s(self) -> float | None:
        """When time runs out, on the clock of `time.monotonic`; None for never."""
        limit_s = self._budget.time_limit_s
        return None if limit_s is None else self._started_s + limit_s

    def spend(self, num_evaluations: int) -> None:
        """Record work done."""
        self.num_evaluations += num_evaluations

    def may_go_on(self) -> bool:
        """Whether evaluations and time are left; notes when it is time that ran out."""
        if self.deadline_s is not None and time.monotonic() >= self.deadline_s:
            if self.remaining > 0:
                self.cut_short = True
            return False
        return self.remaining > 0
