"""Results as tables for the terminal, with what may be expected of the ratios."""

from __future__ import annotations

from collections.abc import Sequence

from rich.table import Table as TextTable
from rich.text import Text

from autoshard.shards import ShardingType
from benchmarks.runtime_speed.cases import WAITING
from benchmarks.runtime_speed.comparisons import Comparison, Failure
from benchmarks.runtime_speed.memory import RankMemory
from benchmarks.runtime_speed.statistics import median_ms
from benchmarks.runtime_speed.worker import CALM

#: What may be expected of the ratio to TorchRec, per sharding type.
TORCHREC_BARS = {kind: 0.2 if kind is ShardingType.DATA_PARALLEL else 0.75 for kind in ShardingType}
FLOOR_BAR = 1.25
MEMORY_BAR = 0.10


def comparison_table(
    title: str, comparisons: Sequence[Comparison], failures: Sequence[Failure]
) -> TextTable:
    """One row per contender that ours is compared with, then those that failed."""
    text = _table(title, failures)
    for column in ("model", "sharding_type", "against"):
        text.add_column(column)
    for column in ("theirs, ms", "ours, ms", "ours / theirs [95%]", "bar"):
        text.add_column(column, justify="right", no_wrap=True)
    for comparison in comparisons:
        others = [name for name in comparison.rounds_ms if name != comparison.ours]
        for other in best_of_floors(comparison, others):
            ratio, bar = comparison.ratios[other], bar_of(comparison, other)
            held = "" if bar is None else f"{'≤' if ratio.value <= bar else '>'} {bar:g}"
            text.add_row(
                comparison.model,
                comparison.kind.value,
                other,
                f"{median_ms(comparison.rounds_ms[other]):.2f}",
                f"{median_ms(comparison.rounds_ms[comparison.ours]):.2f}",
                str(ratio),
                held,
            )
    for failure in failures:
        text.add_row(failure.model, failure.kind.value, failure.contender, "failed")
    return text


def memory_table(ranks: Sequence[RankMemory], failures: Sequence[Failure]) -> TextTable:
    """One row per plan and rank, then the plans that failed."""
    text = _table("Peak memory above an idle rank", failures)
    for column in ("sharding_type", "rank", "ledger, MiB", "peak, MiB", "peak / ledger", "bar"):
        text.add_column(column, justify="left" if column == "sharding_type" else "right")
    for rank in ranks:
        within = abs(rank.ratio - 1) <= MEMORY_BAR
        text.add_row(
            rank.kind.value,
            str(rank.rank),
            f"{rank.ledger_bytes / 2**20:,.0f}",
            f"{rank.peak_bytes / 2**20:,.0f}",
            f"{rank.ratio:.3f}",
            f"{'within' if within else 'beyond'} {MEMORY_BAR:.0%}",
        )
    for failure in failures:
        text.add_row(failure.kind.value, "failed")
    return text


def best_of_floors(comparison: Comparison, others: list[str]) -> list[str]:
    """`others` with only the fastest of the floors among them, for each setting of the threads."""
    slower: list[str] = []
    for calm in (False, True):
        floors = [n for n in others if n.startswith("floor/") and n.endswith(CALM) is calm]
        slower += sorted(floors, key=lambda name: median_ms(comparison.rounds_ms[name]))[1:]
    return [name for name in others if name not in slower]


def bar_of(comparison: Comparison, other: str) -> float | None:
    """What our ratio to a contender should not exceed; None where nothing was set."""
    if other.startswith("floor/"):
        return FLOOR_BAR
    if other.startswith("torchrec/") and not other.endswith((WAITING, CALM)):
        return TORCHREC_BARS[comparison.kind]
    return None


def _table(title: str, failures: Sequence[Failure]) -> TextTable:
    """An empty table with the reasons of failures below it."""
    # Errors hold brackets, which are markup to Rich unless they come as `Text`.
    reasons = Text("\n".join(map(str, failures))) if failures else None
    return TextTable(title=title, title_justify="left", caption=reasons, caption_justify="left")
