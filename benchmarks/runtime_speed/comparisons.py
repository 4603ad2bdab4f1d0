"""What is compared, and what came of it: a case, its times, its failures.

`sections` says which cases there are, `bench` runs them, `tables` and `results` show them.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from autoshard.problem import Optimizer
from autoshard.shards import ShardingType
from benchmarks.runtime_speed.cases import Model
from benchmarks.runtime_speed.statistics import (
    Interval,
    median_ms,
    percentile_ms,
    ratio_of_medians,
)

#: Sides that are not ours. Where only one of them fails, the others are still compared.
_FOREIGN = ("torchrec/", "pytorch/")


def is_foreign(contender: str) -> bool:
    """Whether other people's runtime does the step."""
    return contender.startswith(_FOREIGN)


@dataclass(frozen=True, kw_only=True)
class Case:
    """Contenders that do the same steps on the same plan."""

    section: str
    model: Model
    kind: ShardingType
    """How all tables are sharded."""
    contenders: tuple[str, ...]
    """Names as the workers know them; the first is ours."""
    optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD
    overlapped: bool = False
    """Time whole runs of steps, without a barrier between them."""

    def __str__(self) -> str:
        return f"{self.section} {self.model.name} {self.kind.value}"


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One case: what every contender took, and our ratio to the others."""

    section: str
    model: str
    kind: ShardingType
    ours: str
    """The contender that is compared with the others."""
    rounds_ms: dict[str, list[list[float]]] = field(repr=False)
    largest_difference: dict[str, float]
    """From ours, of the outputs or losses, relative to their scale."""

    @cached_property
    def ratios(self) -> dict[str, Interval]:
        """Our median step time over every other contender's."""
        ours_ms = self.rounds_ms[self.ours]
        return {
            name: ratio_of_medians(ours_ms, rounds)
            for name, rounds in self.rounds_ms.items()
            if name != self.ours
        }

    def to_json(self) -> dict[str, Any]:
        """Medians, tenth percentiles and ratios."""
        return {
            "section": self.section,
            "model": self.model,
            "sharding_type": self.kind.value,
            "ours": self.ours,
            "contenders": {
                name: {
                    "median_ms": median_ms(rounds),
                    "p10_ms": percentile_ms(rounds, 10),
                    "p90_ms": percentile_ms(rounds, 90),
                    "num_steps": sum(map(len, rounds)),
                    **(
                        {}
                        if name == self.ours
                        else {
                            "ratio": self.ratios[name].to_json(),
                            "largest_relative_difference": self.largest_difference[name],
                        }
                    ),
                }
                for name, rounds in self.rounds_ms.items()
            },
        }


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A contender that did not finish a case."""

    section: str
    model: str
    kind: ShardingType
    contender: str
    reason: str
    """One line."""

    def to_json(self) -> dict[str, str]:
        """As a plain dictionary."""
        return {
            "section": self.section,
            "model": self.model,
            "sharding_type": self.kind.value,
            "contender": self.contender,
            "reason": self.reason,
        }

    def __str__(self) -> str:
        return f"failed: {self.model} {self.kind.value} {self.contender}: {self.reason}"


def one_line(error: Exception) -> str:
    """An error's whole text without its line breaks."""
    return " ".join(str(error).split())
