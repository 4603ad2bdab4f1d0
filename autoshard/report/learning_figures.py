"""Pictures of what was measured and learned: timings, cost-model errors, learning curves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pandas as pd

from autoshard.measure.config import SimulatedDevice
from autoshard.objective import CostSource
from autoshard.report.svg import (
    INK,
    Picture,
    byte_ticks,
    color,
    legend,
    marker,
    new_axes,
    plain_log_ticks,
    render,
    style,
)

#: A scatter plot shows no more points than this.
MAX_POINTS = 600
_PHASES = {"fwd": "forward", "bwd": "backward", "total": "total"}
_PHASE_COLORS = ("#009e73", "#0072b2", "#8c8c8c")


def thinned(rows: pd.DataFrame) -> pd.DataFrame:
    """At most `MAX_POINTS` rows, evenly picked, so that the page stays small."""
    if len(rows) <= MAX_POINTS:
        return rows
    return rows.iloc[np.linspace(0, len(rows) - 1, MAX_POINTS).round().astype(int)]


def how_timed(rows: pd.DataFrame) -> str:
    """Whether rows were `measured` or `simulated`, or both, for words and axes."""
    simulated = rows["device"] == SimulatedDevice.SIMULATED.value
    if simulated.all():
        return CostSource.SIMULATED.value
    measured = CostSource.MEASURED.value
    return f"{measured} or {CostSource.SIMULATED.value}" if simulated.any() else measured


def kernel_times(rows: pd.DataFrame) -> Picture:
    """Measured forward and backward time over the number of shards measured together."""
    rows = thinned(rows)
    timed = how_timed(rows)
    with style():
        figure, axes = new_axes()
        generator = np.random.default_rng(0)  # jitter only: many sets share a count
        for index, phase in enumerate(("fwd", "bwd")):
            jitter = generator.uniform(0.93, 1.07, len(rows))
            axes.scatter(
                rows["num_slices"] * jitter,
                rows[f"{phase}_ms"],
                s=9,
                alpha=0.55,
                linewidths=0,
                color=_PHASE_COLORS[index],
                marker=marker(index),
                label=_PHASES[phase],
            )
        plain_log_ticks(axes, x=True, y=True)
        axes.set_xlabel("shards in one kernel call")
        axes.set_ylabel(f"{timed} kernel, ms")
        legend(axes)
        svg = render(figure, "kernels")
    return Picture(
        svg=svg,
        alt=f"{timed.capitalize()} forward and backward kernel times of {len(rows)} shard sets "
        "over the number of shards in each.",
    )


def collective_times(rows: pd.DataFrame, kind: str) -> Picture:
    """Measured transfer time of a kind of collective over the bytes that the busiest rank sends."""
    rows = thinned(rows)
    timed = how_timed(rows)
    with style():
        figure, axes = new_axes()
        for index, (world_size, some) in enumerate(rows.groupby("world_size")):
            oversubscribed = bool(some["oversubscribed"].any())
            axes.plot(
                np.maximum(some["max_sent_bytes"], 1.0),
                some["transfer_ms"],
                linestyle="none",
                marker=marker(index),
                markersize=4.5,
                alpha=0.8,
                fillstyle="none" if oversubscribed else "full",
                color=color(index),
                label=f"{world_size:.0f} ranks" + (", oversubscribed" if oversubscribed else ""),
            )
        plain_log_ticks(axes, y=True)
        byte_ticks(axes)
        axes.set_xlabel("sent by the busiest rank")
        axes.set_ylabel(f"{timed} {kind}, ms")
        legend(axes, columns=2)
        svg = render(figure, "collectives" if kind == "all-to-all" else f"collectives-{kind}")
    return Picture(
        svg=svg,
        alt=f"{timed.capitalize()} transfer times of {len(rows)} {kind}s over the bytes sent "
        "by the busiest rank, by number of ranks.",
    )


def prediction_scatter(
    predictions: pd.DataFrame, phase: str, split: str, timed: str = CostSource.MEASURED.value
) -> Picture:
    """Predicted against measured kernel time of one phase on one split, logarithmic.

    Args:
        predictions: rows of that phase and split, with both times > 0.
        phase: `fwd` or `bwd`.
        split: for the text only.
        timed: whether what the model learned from was `measured` or `simulated`.
    """
    predictions = thinned(predictions)
    with style():
        figure, axes = new_axes()
        axes.scatter(
            predictions["measured_ms"],
            predictions["predicted_ms"],
            s=12,
            alpha=0.6,
            linewidths=0,
            color=_PHASE_COLORS[0 if phase == "fwd" else 1],
        )
        both = predictions[["measured_ms", "predicted_ms"]].to_numpy()
        ends = [float(both.min()), float(both.max())]
        axes.plot(ends, ends, color=INK, linewidth=0.9, linestyle="--", zorder=0)
        plain_log_ticks(axes, x=True, y=True)
        axes.set_title(_PHASES[phase].capitalize())
        axes.set_xlabel(f"{timed}, ms")
        axes.set_ylabel("predicted, ms")
        svg = render(figure, f"predictions-{phase}")
    return Picture(
        svg=svg,
        alt=f"Predicted against {timed} {_PHASES[phase]} time of {len(predictions)} shard sets "
        f"of the {split} split, with the line where both are equal.",
    )


def error_bars(models: Mapping[str, Mapping[str, float]]) -> Picture:
    """Median relative error per phase, one group of bars for each predictor.

    Args:
        models: by label, best first; each with the medians of `fwd`, `bwd` and `total`.
    """
    with style():
        figure, axes = new_axes(4.6, 1.0 + 0.5 * max(len(models), 2))
        y_M = np.arange(len(models))
        for index, phase in enumerate(_PHASES):
            axes.barh(
                y_M + (index - 1) * 0.26,
                [100 * scores[phase] for scores in models.values()],
                height=0.24,
                color=_PHASE_COLORS[index],
                label=_PHASES[phase],
            )
        axes.set_yticks(y_M, list(models))
        axes.invert_yaxis()
        axes.grid(axis="y", visible=False)
        axes.set_xlabel("median relative error, %")
        legend(axes)
        svg = render(figure, "errors")
    cells = "; ".join(f"{name} {scores['total']:.1%}" for name, scores in models.items())
    return Picture(svg=svg, alt=f"Median relative error of the total by predictor: {cells}.")


def learning_curves(
    runs: Mapping[str, Sequence[tuple[float, float]]], *, top: float | None = None
) -> Picture:
    """Validation objective over the greedy's by training progress, one line per run.

    Args:
        runs: by name, (placements made, objective ratio), the first one untrained.
        top: cut the picture off there, to show how the end goes.
    """
    with style():
        figure, axes = new_axes()
        for index, (name, points) in enumerate(runs.items()):
            x, y = zip(*points, strict=True)
            axes.plot(x, y, color=color(index), linewidth=1.6, label=name)
            axes.plot(x[1:], y[1:], ".", color=color(index), markersize=4)
            if x[0] == 0 and top is None:
                axes.plot(
                    x[0], y[0], "o", color=color(index), fillstyle="none", clip_on=False,
                    label="untrained" if index == 0 else None,
                )  # fmt: skip
        axes.axhline(1.0, color=INK, linewidth=0.9, linestyle="--", label="cost_greedy")
        values = np.array([ratio for points in runs.values() for _, ratio in points])
        if top is not None:
            low = min(float(values.min()), 1.0)
            axes.set_ylim(low - 0.08 * (top - low), top + 0.08 * (top - low))
        elif values.max() / values.min() > 1.5:
            plain_log_ticks(axes, y=True)
            axes.set_yticks(_ratio_ticks(float(values.min()), float(values.max())))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:,.6g}")
        axes.set_xlabel("thousand placements made in training")
        axes.set_ylabel("step time / cost_greedy" + ("" if top is None else ", enlarged"))
        legend(axes)
        svg = render(figure, "learning" if top is None else "learning-near")
    ends = "; ".join(
        f"{name} from {points[0][1]:.3f} to {points[-1][1]:.3f}" for name, points in runs.items()
    )
    return Picture(
        svg=svg,
        alt=f"Learning curve: step time on validation tasks relative to cost_greedy; {ends}.",
    )


def top_of_later_part(runs: Mapping[str, Sequence[tuple[float, float]]]) -> float | None:
    """Where to cut the curves off to see their later three quarters; None if that hides nothing."""
    later = [r for points in runs.values() for _, r in points[max(1, len(points) // 4) :]]
    everything = [r for points in runs.values() for _, r in points]
    if len(later) < 3:
        return None
    top = max(1.0, *later)
    return top if max(everything) > 1.1 * top else None


def _ratio_ticks(low: float, high: float) -> list[float]:
    ticks = [0.25, 0.5, 0.75, 0.9, 1.0, 1.1, 1.25, 1.5, 2, 3, 4, 6, 8, 12, 20, 50, 100]
    return [tick for tick in ticks if low * 0.9 <= tick <= high * 1.1]
