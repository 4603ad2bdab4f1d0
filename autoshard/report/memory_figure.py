"""The picture of what a plan needs of each rank's memory, beside what the rank has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autoshard.memory import RankLedger
from autoshard.report.figures import MAX_RANK_BARS
from autoshard.report.svg import INK, Picture, color, legend, new_axes, render, style
from autoshard.topology import GIB

_MIB = 2**20


def rank_memory(ledgers: Mapping[str, Sequence[RankLedger]], key: str = "memory") -> Picture:
    """Each rank's memory, one group of bars per sharder; a line marks what the rank has.

    Args:
        ledgers: by sharder, all of one problem, each [world_size] in rank order.
        key: of the picture, unique on the page.
    """
    num_ranks = len(next(iter(ledgers.values())))
    largest_bytes = max(ledger.total_bytes for ranks in ledgers.values() for ledger in ranks)
    unit, unit_bytes = ("GiB", GIB) if largest_bytes >= GIB / 10 else ("MiB", _MIB)
    num_bars = min(num_ranks, MAX_RANK_BARS)
    width_in = float(np.clip(1.6 + 0.24 * len(ledgers) * (num_bars + 1), 4.6, 14.0))
    with style():
        figure, axes = new_axes(width_in, 3.0)
        middles = []
        limit_seen = False
        for group, ranks in enumerate(ledgers.values()):
            shown = _shown(ranks)
            x_R = group * (num_bars + 1.2) + np.arange(num_bars)
            used_R = np.array([ledger.total_bytes / unit_bytes for ledger in shown])
            has_R = np.array([ledger.hbm_bytes / unit_bytes for ledger in shown])
            axes.bar(x_R, used_R, width=0.86, color=color(2), label="needed" if not group else None)
            # Far above the bars, the lines would press them flat; the table tells them then.
            near_R = has_R * unit_bytes <= 4 * largest_bytes
            axes.hlines(
                has_R[near_R], x_R[near_R] - 0.5, x_R[near_R] + 0.5, color=INK, linewidth=1.2
            )
            limit_seen = limit_seen or bool(near_R.any())
            middles.append(float(x_R.mean()))
        if limit_seen:
            axes.plot([], [], color=INK, linewidth=1.2, label="what the rank has")
        few = len(ledgers) <= 3
        axes.set_xticks(
            middles, list(ledgers), rotation=0 if few else 20, ha="center" if few else "right"
        )
        axes.grid(axis="x", visible=False)
        axes.set_ylim(bottom=0)
        axes.set_ylabel(f"{unit} on each rank")
        if num_ranks > MAX_RANK_BARS:
            axes.set_xlabel(f"{MAX_RANK_BARS} of {num_ranks} ranks, fullest first")
        legend(axes)
        svg = render(figure, key)
    fullest = "; ".join(
        f"{name} at most {max(ledger.total_bytes for ledger in ranks) / unit_bytes:.3g} {unit}"
        for name, ranks in ledgers.items()
    )
    return Picture(
        svg=svg,
        alt=f"Bars of the memory that each of {num_ranks} rank(s) needs: {fullest}.",
        wide=width_in > 6,
    )


def _shown(ranks: Sequence[RankLedger]) -> list[RankLedger]:
    """All ranks in order; of very many, some from the fullest to the emptiest."""
    if len(ranks) <= MAX_RANK_BARS:
        return list(ranks)
    by_free = sorted(ranks, key=lambda ledger: ledger.free_bytes)
    return [by_free[i] for i in np.linspace(0, len(ranks) - 1, MAX_RANK_BARS).round().astype(int)]
