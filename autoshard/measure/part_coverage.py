"""Which parts of a divided run are there, and how far each one got.

Part k of n measures the draws whose number leaves the remainder k when divided by n
(`MeasureConfig.takes`); every file says which part wrote it and how many rows that planned.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pandas as pd

_NAME = ("protocol", "hardware_fingerprint", "software_fingerprint", "num_parts", "part")


@dataclass(frozen=True, kw_only=True)
class PartCoverage:
    """What there is of one run."""

    protocol: str
    num_parts: int | None
    """None if the files do not say, as earlier versions did not."""
    num_rows: Mapping[int, int]
    """Rows of each part that some file names."""
    num_planned: Mapping[int, int]
    """Rows that each of these set out to measure."""
    is_complete: bool
    """Whether all rows of the run are there, as far as the files say. A part without any row,
    of a run with fewer draws than parts, has no file and is not missing."""

    @property
    def missing(self) -> tuple[int, ...]:
        """Parts of which there is no file."""
        if self.is_complete:
            return ()
        return tuple(p for p in range(self.num_parts or 0) if p not in self.num_planned)

    @property
    def unfinished(self) -> tuple[int, ...]:
        """Parts that lack some of the rows that they planned."""
        return tuple(p for p, rows in self.num_rows.items() if rows < self.num_planned[p])

    def __str__(self) -> str:
        if self.num_parts is None:
            return "parts not told"
        if self.is_complete:
            return f"all of {self.num_parts}"
        told = f"{len(self.num_planned)} of {self.num_parts}"
        if self.missing:
            told += f"; missing: {', '.join(map(str, self.missing))}"
        for part in self.unfinished:
            told += f"; part {part} has {self.num_rows[part]} of {self.num_planned[part]} rows"
        return told

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "protocol": self.protocol,
            "num_parts": self.num_parts,
            "num_rows": {str(part): rows for part, rows in self.num_rows.items()},
            "num_planned": {str(part): rows for part, rows in self.num_planned.items()},
            "is_complete": self.is_complete,
            "missing": list(self.missing),
        }


def union_of_plans(plans: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What several files planned, each part once; a continued run's later files plan more."""
    most: dict[tuple[Any, ...], dict[str, Any]] = {}
    for plan in plans:
        name = tuple(plan[key] for key in _NAME)
        if name not in most or most[name]["num_rows_of_run"] < plan["num_rows_of_run"]:
            most[name] = dict(plan)
    return [most[name] for name in sorted(most)]


def part_coverage(
    frame: pd.DataFrame, planned: Sequence[Mapping[str, Any]]
) -> tuple[PartCoverage, ...]:
    """What there is of each run.

    Args:
        frame: rows of one machine, with `protocol` and `index`.
        planned: as files say, of the same machine.
    """
    found = []
    for protocol, rows in frame.groupby("protocol", sort=True):
        own = [plan for plan in planned if plan["protocol"] == protocol]
        for num_parts in sorted({plan["num_parts"] for plan in own}):
            plans = {p["part"]: p["num_rows"] for p in own if p["num_parts"] == num_parts}
            counts = (rows["index"] % num_parts).value_counts()
            found.append(
                PartCoverage(
                    protocol=str(protocol),
                    num_parts=num_parts,
                    num_rows={part: int(counts.get(part, 0)) for part in sorted(plans)},
                    num_planned=dict(sorted(plans.items())),
                    is_complete=len(rows) >= max(plan["num_rows_of_run"] for plan in own),
                )
            )
        if not own:
            found.append(
                PartCoverage(
                    protocol=str(protocol),
                    num_parts=None,
                    num_rows={},
                    num_planned={},
                    is_complete=True,
                )
            )
    return tuple(found)
