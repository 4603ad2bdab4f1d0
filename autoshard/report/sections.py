"""What a section of the page is made of, and how numbers are written in it."""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autoshard.report.statistics import Estimate
from autoshard.report.svg import Picture

MISSING = "–"
EXTRAPOLATED = "extrapolated"
OVERSUBSCRIBED = "oversubscribed"


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column's heading; numbers are set to the right."""

    title: str
    source: str = ""
    """Of costs: measured, predicted or simulated."""
    numeric: bool = True


@dataclass(frozen=True, kw_only=True)
class HtmlTable:
    """A table as text, cell by cell; the template escapes it."""

    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    caption: str = ""


@dataclass(frozen=True, kw_only=True)
class Section:
    """One section. `takeaway` is computed from the data, never written by hand."""

    anchor: str
    title: str
    takeaway: str
    command: str
    """Repeats the section, or adds it where it is missing."""
    pictures: tuple[Picture, ...] = ()
    tables: tuple[HtmlTable, ...] = ()
    notes: tuple[str, ...] = ()
    missing: bool = False


def missing_section(anchor: str, title: str, what: str, command: str) -> Section:
    """A section whose data is not there: one line and the command that adds it."""
    return Section(anchor=anchor, title=title, takeaway=what, command=command, missing=True)


def module_command(module: str, *arguments: str) -> str:
    """A command line that can be pasted into a shell."""
    return f"python -m {shlex.join((module, *arguments))}"


def milliseconds(value: float | None) -> str:
    """Such as 12.3: three significant digits at least."""
    if value is None or not math.isfinite(value):
        return MISSING
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.{_decimals(value)}f}"


def _decimals(value: float) -> int:
    if value == 0:
        return 2
    return int(np.clip(2 - math.floor(math.log10(abs(value))), 0, 5))


def percent(value: float | None, digits: int = 1) -> str:
    """0.123 as 12.3%."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.{digits}%}"


def ratio(value: float | None, digits: int = 4) -> str:
    """Such as 0.9871."""
    return MISSING if value is None or not math.isfinite(value) else f"{value:.{digits}f}"


def interval(estimate: Estimate | None, digits: int = 3) -> str:
    """The two-sided 95% interval, such as [0.981, 0.993]."""
    if estimate is None or not math.isfinite(estimate.low):
        return MISSING
    return f"[{estimate.low:.{digits}f}, {estimate.high:.{digits}f}]"


def gap(value: float | None, reference: float | None) -> str:
    """How far `value` is above `reference`."""
    if value is None or reference is None or not reference > 0:
        return MISSING
    return percent(value / reference - 1)


def count(number: float, singular: str, plural: str | None = None) -> str:
    """Such as "1 plan", "1,200 plans"."""
    word = singular if number == 1 else plural or f"{singular}s"
    return f"{number:,.0f} {word}"


def listed(names: Sequence[str]) -> str:
    """Names as "a, b and c"."""
    if len(names) < 2:
        return "".join(names)
    return f"{', '.join(names[:-1])} and {names[-1]}"


def marks(*, extrapolated: bool = False, oversubscribed: bool = False) -> str:
    """The marks of a cost, in words."""
    found = [EXTRAPOLATED] * extrapolated + [OVERSUBSCRIBED] * oversubscribed
    return ", ".join(found)
