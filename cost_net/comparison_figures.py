"""Pictures of the comparison of cost models, as PNG and SVG files.

Three small pictures side by side, one for each phase and one for the total, with one line per
cost model: its median error with a band for the 95% interval over sets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from autoshard.files import write_atomically
from autoshard.report.svg import INK, color, marker, plain_log_ticks, style
from cost_net.comparison_text import FLOOR_NAME
from cost_net.errors import QUANTITIES

Report = Mapping[str, Any]
_TITLES = {"fwd": "Forward", "bwd": "Backward", "total": "Total"}
_TICKS = (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)
_DOTS_PER_INCH = 160
#: One x position, and the median there with its interval.
Point = tuple[float, Mapping[str, float]]


def write_figures(report: Report, out_dir: Path) -> list[Path]:
    """Draw and write all figures.

    Args:
        report: from `cost_net.comparison.compare`.
        out_dir: an existing folder.

    Returns:
        The files.
    """
    paths = []
    figures = {"learning_curve": learning_figure, "errors_by_num_shards": shards_figure}
    for name, draw in figures.items():
        with style():
            figure = draw(report)
            for suffix in ("svg", "png"):
                path = out_dir / f"{name}.{suffix}"
                write_atomically(path, partial(_save, figure, suffix))
                paths.append(path)
    return paths


def _save(figure: Figure, suffix: str, path: Path) -> None:
    metadata = {"Date": None} if suffix == "svg" else None
    figure.savefig(path, format=suffix, dpi=_DOTS_PER_INCH, facecolor="white", metadata=metadata)


def learning_figure(report: Report) -> Figure:
    """Median error over the number of training sets; call within `style()`."""
    curves = report["learning_curve"]
    floor = report["floor"]

    def points(name: str, quantity: str) -> list[Point]:
        return [(point["num_sets"], point[quantity]) for point in curves[name]]

    figure = _small_multiples(
        list(curves),
        points,
        {q: None if floor is None else [(1.0, floor[q]["median"]["value"])] for q in QUANTITIES},
        "training sets",
    )
    sizes = [point["num_sets"] for point in next(iter(curves.values()))]
    for axes in figure.axes:
        axes.xaxis.set_major_locator(FixedLocator(_apart(sizes)))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    return figure


def shards_figure(report: Report) -> Figure:
    """Median error over the number of shards in a set; call within `style()`."""
    bands = {name: part for name, part in report["by_num_shards"].items() if part["num_sets"]}

    def points(name: str, quantity: str) -> list[Point]:
        return [
            (place + 1.0, part["models"][name][quantity])
            for place, part in enumerate(bands.values())
        ]

    floors = {
        quantity: [
            (place + 1.0, part["floor"][quantity])
            for place, part in enumerate(bands.values())
            if part["floor"] is not None
        ]
        for quantity in QUANTITIES
    }
    figure = _small_multiples(list(report["test"]), points, floors, "shards in a set")
    for axes in figure.axes:
        axes.set_xscale("linear")
        axes.xaxis.set_major_locator(FixedLocator([place + 1.0 for place in range(len(bands))]))
        axes.set_xticklabels(list(bands))
    return figure


def _apart(sizes: Sequence[int]) -> list[int]:
    """The sizes whose labels do not run into the next one's; the last one has its label."""
    return [s for s, following in itertools.pairwise(sizes) if following >= 1.8 * s] + [sizes[-1]]


def _small_multiples(
    names: Sequence[str],
    points: Callable[[str, str], Sequence[Point]],
    floors: Mapping[str, Sequence[tuple[float, float]] | None],
    label: str,
) -> Figure:
    """One picture for each quantity, with a common legend and a common y axis.

    Args:
        names: of the cost models.
        points: of a cost model and a quantity.
        floors: the noise floor's points; a single one is drawn as a line across.
        label: of the x axes.
    """
    figure = Figure(figsize=(10.4, 4.2), layout="constrained")
    all_axes = figure.subplots(1, len(QUANTITIES), sharey=True)
    for axes, quantity in zip(all_axes, QUANTITIES, strict=True):
        for index, name in enumerate(names):
            _line(axes, points(name, quantity), index, name)
        floor = floors[quantity]
        if floor:
            look: dict[str, Any] = {"color": INK, "linewidth": 1.1, "linestyle": "--"}
            if len(floor) == 1:
                axes.axhline(100 * floor[0][1], label=FLOOR_NAME, **look)
            else:
                x, y = zip(*floor, strict=True)
                axes.plot(x, [100 * value for value in y], label=FLOOR_NAME, **look)
        plain_log_ticks(axes, x=True, y=True)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.set_title(_TITLES[quantity])
        axes.set_xlabel(label)
    first = all_axes[0]
    first.set_ylabel("median relative error, %")
    low, high = first.get_ylim()
    first.yaxis.set_major_locator(FixedLocator([tick for tick in _TICKS if low <= tick <= high]))
    first.yaxis.set_minor_formatter(NullFormatter())
    handles, labels = first.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _line(axes: Axes, points: Sequence[Point], index: int, name: str) -> None:
    x = [place for place, _ in points]
    value, low, high = (
        [100 * interval[key] for _, interval in points] for key in ("value", "low", "high")
    )
    tint = color(index)
    # Ours stands out: it is drawn last and thicker.
    order = 3.0 if index == 0 else 2.0
    axes.fill_between(x, low, high, color=tint, alpha=0.16, linewidth=0, zorder=order - 1)
    axes.plot(
        x,
        value,
        color=tint,
        marker=marker(index),
        markersize=4.0,
        linewidth=2.0 if index == 0 else 1.2,
        label=name,
        zorder=order,
    )
