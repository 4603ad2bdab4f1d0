"""Pictures of plans and of whole comparisons: costs per rank, predicted against measured, ratios.

Each function takes plain data and returns a `Picture`; colours and SVG live in `svg.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from numpy.typing import NDArray

from autoshard.plan import ShardingPlan
from autoshard.report.svg import (
    INK,
    Picture,
    color,
    legend,
    marker,
    new_axes,
    plain_log_ticks,
    render,
    style,
)

#: The four terms of the objective: name in a cost, label, colour, hatching.
_TERMS = (
    ("fwd_compute_ms", "fwd_compute", "#56b4e9", None),
    ("fwd_comms_ms", "fwd_comms", "#e69f00", "//"),
    ("bwd_comms_ms", "bwd_comms", "#d55e00", "\\\\"),
    ("bwd_compute_ms", "bwd_compute", "#0072b2", None),
)
#: With more ranks than this, single bars are too thin to tell apart.
MAX_RANK_BARS = 32
_STRIP_WIDTH = 0.32


def rank_costs(plans: Mapping[str, ShardingPlan], key: str = "ranks") -> Picture:
    """What each rank spends per step, stacked by term, one group of bars per sharder.

    Args:
        plans: by sharder, all of one problem and each with a cost of the same source.
        key: of the picture, unique on the page.
    """
    num_ranks = next(iter(plans.values())).topology.world_size
    source = next(p.cost.step.source.value for p in plans.values() if p.cost is not None)
    width_in = float(
        np.clip(1.6 + 0.24 * len(plans) * (min(num_ranks, MAX_RANK_BARS) + 1), 4.6, 14.0)
    )
    with style():
        figure, axes = new_axes(width_in, 3.6)
        middles, labels = [], []
        for group, (name, plan) in enumerate(plans.items()):
            assert plan.cost is not None
            shown_R = _shown_ranks(plan)
            ranks = np.arange(len(shown_R))
            x_R = group * (len(ranks) + 1.2) + ranks
            bottom_R = np.zeros(len(ranks))
            for term, label, tint, hatch in _TERMS:
                value = getattr(plan.cost.step, term)
                height_R = np.broadcast_to(np.asarray(value, dtype=float), num_ranks)[shown_R]
                axes.bar(
                    x_R,
                    height_R,
                    bottom=bottom_R,
                    width=0.86,
                    color=tint,
                    hatch=hatch,
                    edgecolor="#8c8c8c" if hatch else "none",
                    linewidth=0.0,
                    label=label if group == 0 else None,
                )
                bottom_R = bottom_R + height_R
            step_ms = plan.cost.step.step_ms
            axes.hlines(step_ms, x_R[0] - 0.6, x_R[-1] + 0.6, color=INK, linewidth=1.2)
            middles.append(float(x_R.mean()))
            labels.append(name)
        axes.plot([], [], color=INK, linewidth=1.2, label="step (slowest ranks)")
        axes.set_xticks(middles, labels, rotation=20 if len(plans) > 3 else 0, ha="right")
        if len(plans) <= 3:
            axes.set_xticks(middles, labels, ha="center")
        axes.grid(axis="x", visible=False)
        axes.set_ylabel(f"ms per step ({source})")
        if num_ranks > MAX_RANK_BARS:
            axes.set_xlabel(f"{MAX_RANK_BARS} of {num_ranks} ranks, slowest first")
        legend(axes)
        svg = render(figure, key)
    return Picture(
        svg=svg,
        alt=f"Stacked bars of forward and backward compute and communication for {num_ranks} "
        f"rank(s) under {', '.join(plans)}; a line above each group marks the step time.",
        wide=width_in > 6,
    )


def _shown_ranks(plan: ShardingPlan) -> NDArray[np.int64]:
    """All ranks in order; of very many, some from the slowest to the fastest."""
    num_ranks = plan.topology.world_size
    if num_ranks <= MAX_RANK_BARS:
        return np.arange(num_ranks)
    assert plan.cost is not None
    step = plan.cost.step
    slowest_first_R = np.argsort(
        -(np.array(step.fwd_compute_ms) + np.array(step.bwd_compute_ms)), kind="stable"
    )
    return slowest_first_R[np.linspace(0, num_ranks - 1, MAX_RANK_BARS).round().astype(int)]


def predicted_against_measured(per_plan: pd.DataFrame) -> Picture:
    """Step times of plans that were run, with the identity line and the spread over passes.

    Args:
        per_plan: one row per plan with `sharder`, `predicted_ms`, `measured_ms`,
            `measured_low_ms`, `measured_high_ms` and `marked` (extrapolated or oversubscribed,
            drawn hollow).
    """
    with style():
        figure, axes = new_axes()
        for index, (sharder, rows) in enumerate(per_plan.groupby("sharder", sort=False)):
            tint = color(index)
            measured = rows["measured_ms"].to_numpy()
            spread = np.abs(
                np.vstack([measured - rows["measured_low_ms"], rows["measured_high_ms"] - measured])
            )
            axes.errorbar(
                rows["predicted_ms"],
                measured,
                yerr=spread,
                fmt="none",
                ecolor=tint,
                elinewidth=1.0,
                alpha=0.7,
            )
            for hollow in (False, True):
                some = rows[rows["marked"] == hollow]
                axes.plot(
                    some["predicted_ms"],
                    some["measured_ms"],
                    linestyle="none",
                    marker=marker(index),
                    markersize=5.5,
                    color=tint,
                    fillstyle="none" if hollow else "full",
                    label=str(sharder) if hollow == bool(rows["marked"].all()) else None,
                )
        _identity(axes, per_plan["predicted_ms"], per_plan["measured_ms"])
        plain_log_ticks(axes, x=_wide_range(per_plan), y=_wide_range(per_plan))
        axes.set_xlabel("predicted step, ms")
        axes.set_ylabel("measured step, ms")
        legend(axes)
        svg = render(figure, "validation")
    return Picture(
        svg=svg,
        alt=f"Predicted against measured step time of {len(per_plan)} plans, with error bars for "
        "the spread over passes and the line where both are equal.",
    )


def _wide_range(per_plan: pd.DataFrame) -> bool:
    values = per_plan[["predicted_ms", "measured_ms"]].to_numpy()
    values = values[np.isfinite(values) & (values > 0)]
    return len(values) > 0 and bool(values.max() / values.min() > 8)


def _identity(axes: Axes, first: pd.Series, second: pd.Series) -> None:
    values = np.concatenate([first.to_numpy(), second.to_numpy()])
    values = values[np.isfinite(values)]
    low, high = float(values.min()), float(values.max())
    axes.plot(
        [low, high], [low, high], color=INK, linewidth=0.9, linestyle="--", label="equal", zorder=0
    )


def ratio_strips(
    ratios: Mapping[str, Sequence[float]], *, reference: str, key: str, source: str
) -> Picture:
    """Each problem's ratio to a reference as a point, one strip per sharder, median marked.

    Args:
        ratios: by sharder, best first; finite and > 0.
        reference: what was divided by, such as "lower bound".
        key: of the picture, unique on the page.
        source: of the costs.
    """
    shown = {name: np.asarray(values) for name, values in ratios.items() if len(values)}
    with style():
        figure, axes = new_axes(4.6, 0.9 + 0.34 * max(len(shown), 3))
        generator = np.random.default_rng(0)  # jitter only
        for row, (_, values) in enumerate(shown.items()):
            jitter = generator.uniform(-_STRIP_WIDTH, _STRIP_WIDTH, len(values))
            axes.scatter(
                values,
                row + jitter,
                s=11,
                color=color(row),
                alpha=0.65,
                linewidths=0,
                marker=marker(row),
            )
            axes.plot([np.median(values)] * 2, [row - 0.42, row + 0.42], color=INK, linewidth=1.8)
        axes.axvline(1.0, color=INK, linewidth=0.9, linestyle="--")
        axes.set_yticks(range(len(shown)), list(shown))
        axes.set_ylim(len(shown) - 0.45, -0.55)
        axes.grid(axis="y", visible=False)
        if max(float(values.max()) for values in shown.values()) > 2.5:
            plain_log_ticks(axes, x=True)
        axes.set_xlabel(f"step time / {reference} ({source})")
        svg = render(figure, key)
    medians = ", ".join(f"{name} {np.median(values):.3f}" for name, values in shown.items())
    return Picture(
        svg=svg,
        alt=f"Ratio of {source} step time to the {reference}, one point per problem and sharder; "
        f"medians: {medians}.",
    )


def transfer_map(ratios: pd.DataFrame) -> Picture:
    """Heat map of policy / cost_greedy, with the number in each cell.

    Args:
        ratios: rows are training settings, columns evaluation settings; NaN where unknown.
    """
    values = ratios.to_numpy(dtype=float)
    reach = float(np.nanmax(np.abs(np.log(values)), initial=0.02))
    with style():
        width_in = float(np.clip(1.8 + 0.72 * values.shape[1], 4.6, 12.0))
        figure, axes = new_axes(width_in, 1.3 + 0.42 * max(values.shape[0], 2))
        # Blue: better than the greedy, orange: worse; both ends differ for any colour vision.
        # A mesh is drawn as vectors, an image would be a bitmap inside of the SVG.
        axes.pcolormesh(
            np.arange(values.shape[1] + 1) - 0.5,
            np.arange(values.shape[0] + 1) - 0.5,
            np.ma.masked_invalid(np.log(values)),
            cmap="PuOr_r",
            vmin=-1.6 * reach,
            vmax=1.6 * reach,
            rasterized=False,
        )
        axes.invert_yaxis()
        for (row, column), value in np.ndenumerate(values):
            strong = abs(np.log(value)) > reach if np.isfinite(value) else False
            axes.text(
                column,
                row,
                f"{value:.3f}" if np.isfinite(value) else "–",
                ha="center",
                va="center",
                color="#ffffff" if strong else ("#1a1a1a" if np.isfinite(value) else INK),
                fontsize=8.5,
            )
        axes.set_xticks(range(values.shape[1]), list(ratios.columns), rotation=30, ha="right")
        axes.set_yticks(range(values.shape[0]), list(ratios.index))
        axes.set_ylabel("trained on")
        axes.grid(visible=False)
        axes.spines[:].set_visible(False)
        svg = render(figure, "transfer")
    cells = "; ".join(
        f"{train} on {evaluated} {ratios.loc[train, evaluated]:.3f}"
        for train in ratios.index
        for evaluated in ratios.columns
    )
    return Picture(svg=svg, alt=f"Policy over cost_greedy: {cells}.", wide=width_in > 6)
