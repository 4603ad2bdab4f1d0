"""Matplotlib figures as inline SVG that suits light and dark pages.

Text and axes take the page's own colour (`currentColor`), series the colours of Okabe and
Ito (2008), which people with any colour vision can tell apart. The backgrounds are
transparent, and text stays text: small files, and nothing is loaded from elsewhere.
"""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

#: Okabe & Ito's palette without black, and without yellow, which is faint on white.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#d55e00", "#cc79a7", "#56b4e9", "#8c8c8c")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "*")
#: Stands for the page's text colour until the SVG is written.
INK = "#010203"
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "autoshard",
    "text.parse_math": False,  # a table may be called a$b$c
    "font.size": 9.5,
    "axes.titlesize": 10,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "axes.grid": True,
    "grid.color": "#8c8c8c",
    "grid.alpha": 0.25,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 8.5,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "figure.facecolor": "none",
    "axes.facecolor": "none",
    "savefig.facecolor": "none",
}


@dataclass(frozen=True, kw_only=True)
class Picture:
    """One picture of the page."""

    svg: str
    """An `<svg>` element."""
    alt: str
    """What it shows, for those who do not see it."""
    wide: bool = False
    """Whether it needs the whole width of the page."""


@contextmanager
def style() -> Iterator[None]:
    """The look of every figure; draw and render inside of it."""
    with rc_context(_STYLE):
        yield


def new_axes(width_in: float = 4.6, height_in: float = 3.3) -> tuple[Figure, Axes]:
    """A figure with one pair of axes, laid out without overlaps."""
    figure = Figure(figsize=(width_in, height_in), layout="constrained")
    return figure, figure.add_subplot()


def color(index: int) -> str:
    """The colour of the `index`-th series."""
    return PALETTE[index % len(PALETTE)]


def marker(index: int) -> str:
    """Its marker: colours repeat sooner than pairs of colour and marker."""
    return MARKERS[index % len(MARKERS)]


def legend(axes: Axes, columns: int = 3) -> None:
    """A legend above the axes, where it hides nothing."""
    axes.legend(
        loc="lower left",
        bbox_to_anchor=(0, 1.0),
        ncols=columns,
        borderaxespad=0.2,
        handletextpad=0.5,
        columnspacing=1.2,
    )


def plain_log_ticks(axes: Axes, *, x: bool = False, y: bool = False) -> None:
    """Logarithmic axes labelled 0.1, 1, 10 rather than with powers."""
    for wanted, axis, scale in ((x, axes.xaxis, axes.set_xscale), (y, axes.yaxis, axes.set_yscale)):
        if wanted:
            scale("log")
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axis.set_minor_formatter(NullFormatter())


def byte_ticks(axes: Axes) -> None:
    """A logarithmic x axis of bytes, labelled 1, 32, 1 Ki, 32 Ki and so on."""
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_locator(LogLocator(base=32))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: _binary(value)))
    axes.xaxis.set_minor_locator(NullLocator())


def _binary(value: float) -> str:
    for prefix, size in (("Gi", 2**30), ("Mi", 2**20), ("Ki", 2**10)):
        if value >= size:
            return f"{value / size:g} {prefix}B"
    return f"{value:g} B"


def render(figure: Figure, key: str) -> str:
    """The figure as an `<svg>` element.

    Args:
        figure: drawn within `style()`.
        key: unique on the page; ids get it as a prefix, since inline SVGs share one space.
    """
    buffer = io.StringIO()
    with warnings.catch_warnings():
        # Matplotlib lacks glyphs that the browser has; it needs them for nothing but widths.
        warnings.filterwarnings("ignore", message="Glyph .* missing from font")
        figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.DOTALL)
    text = re.sub(r'\bid="', f'id="{key}-', text)
    text = re.sub(r"url\(#", f"url(#{key}-", text)
    text = re.sub(r'href="#', f'href="#{key}-', text)
    text = text.replace(INK, "currentColor")
    # Dark blue is hard to see on a dark page, which therefore sets a lighter one.
    text = text.replace(PALETTE[0], f"var(--series-blue, {PALETTE[0]})")
    # Only the view box: the page decides how wide it is.
    head, bar, rest = text.partition(">")
    head = re.sub(r' (?:width|height|version|xmlns:xlink)="[^"]*"', "", head)
    width_pt, height_pt = (72 * inches for inches in figure.get_size_inches())
    head += f' style="max-width:{width_pt * 1.6:.0f}px" data-size="{width_pt:.0f}x{height_pt:.0f}"'
    rest = rest.replace("xlink:href=", "href=")
    return re.sub(r"\n\s*", "\n", head + bar + rest).strip()
