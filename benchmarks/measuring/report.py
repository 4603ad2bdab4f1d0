"""What is told of a run: a row for each way, and whether the bars hold."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table as TextTable

from benchmarks.measuring.passes import Way
from benchmarks.measuring.results import (
    WayResults,
    difference_of_medians,
    median_of,
    normalised_spread_S,
    rate_ratio,
    raw_spread_S,
)
from benchmarks.runtime_speed.statistics import Interval

#: Fast must be so many times as fast as naive, at no more spread.
RATE_BAR = 4.0
#: And precise must repeat so well.
SPREAD_BAR = 0.04


def summarise(results: Mapping[Way, WayResults]) -> dict[str, dict[str, Any]]:
    """Spread and rate of every way, compared with naive where that was measured."""
    raw = {way: raw_spread_S(of_way) for way, of_way in results.items()}
    summary: dict[str, dict[str, Any]] = {}
    for way, of_way in results.items():
        spread_S = raw[way]
        row: dict[str, Any] = {
            "num_passes": len(of_way.passes[0]),
            "raw_spread": median_of(raw[way]).to_json(),
            "normalised_spread": None,
            "spread_that_counts": "raw",
            "sets_per_minute": of_way.sets_per_minute,
            "wall_s": of_way.wall_s,
            "process_start_s": of_way.start_s,
        }
        if way is not Way.NAIVE:
            # What loading the rows of either preset gives.
            spread_S, row["spread_that_counts"] = normalised_spread_S(of_way), "normalised"
            row["normalised_spread"] = median_of(spread_S).to_json()
        if Way.NAIVE in results and way is not Way.NAIVE:
            naive = results[Way.NAIVE]
            row["rate_over_naive"] = rate_ratio(of_way, naive).to_json()
            difference = difference_of_medians(spread_S, raw[Way.NAIVE])
            row["spread_less_naive"] = difference.to_json()
        summary[way.value] = row
    return summary


def bars(summary: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """What was to be reached and what was seen, a line each."""
    lines = []
    fast, precise = summary.get(Way.FAST.value), summary.get(Way.PRECISE.value)
    if fast and "rate_over_naive" in fast:
        ratio, worse = Interval(**fast["rate_over_naive"]), Interval(**fast["spread_less_naive"])
        met = ratio.value >= RATE_BAR and worse.value <= 0.0
        lines.append(
            f"fast: at least {RATE_BAR:g} times naive's rate at no more spread: {_verdict(met)} "
            f"({ratio} times; spread less naive's: {_points(worse)} percentage points)"
        )
    if precise:
        spread = Interval(**precise["normalised_spread"])
        lines.append(
            f"precise: spread at most {SPREAD_BAR:.0%}: {_verdict(spread.value <= SPREAD_BAR)} "
            f"({_percent(spread)})"
        )
    return lines


def _verdict(met: bool) -> str:
    return "holds" if met else "is missed"


def _percent(spread: Interval) -> str:
    return f"{spread.value:.1%} [{spread.low:.1%}, {spread.high:.1%}]"


def _points(difference: Interval) -> str:
    return (
        f"{100 * difference.value:+.1f} [{100 * difference.low:+.1f}, {100 * difference.high:+.1f}]"
    )


def summary_table(summary: Mapping[str, Mapping[str, Any]], title: str) -> TextTable:
    """A row for each way; intervals in brackets."""
    table = TextTable(title=title, caption="* counts")
    table.add_column("way")
    for column in ("passes", "raw spread", "normalised", "sets/min", "× naive", "start, s"):
        table.add_column(column, justify="right")
    for way, row in summary.items():
        spreads = []
        for kind in ("raw", "normalised"):
            value = row[f"{kind}_spread"]
            mark = "*" if kind == row["spread_that_counts"] else ""
            spreads.append(_percent(Interval(**value)) + mark if value else "–")
        ratio = row.get("rate_over_naive")
        table.add_row(
            way,
            str(row["num_passes"]),
            *spreads,
            f"{row['sets_per_minute']:.1f}",
            str(Interval(**ratio)) if ratio else "–",
            f"{row['process_start_s']:.1f}",
        )
    return table
