"""The comparison of cost models as text: Markdown for documents, one table for the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table as RichTable

from autoshard.measure.config import SimulatedDevice
from cost_net.errors import QUANTITIES
from cost_net.monotonicity import SWITCHED
from cost_net.probe_sets import GROWTHS

FLOOR_NAME = "a second measurement"
_NAMES = {"fwd": "forward", "bwd": "backward", "total": "total"}
Report = Mapping[str, Any]


def comparison_markdown(report: Report) -> str:
    """All tables, each under a heading."""
    parts = [
        "# Cost models compared",
        _facts(report),
        *(_scores(report, quantity) for quantity in reversed(QUANTITIES)),
        _bar(report),
        _parts(report, "by_num_shards", "Errors by number of shards", "shards"),
        _parts(report, "by_kind", "Errors by kind of set", "sets"),
        _parts(report, "by_split", "Errors by split", "split"),
        _learning(report),
        _growth(report),
        _ranges(report),
    ]
    return "\n\n".join(parts) + "\n"


def _facts(report: Report) -> str:
    sets, facts = report["num_sets"], report["measurements"]
    floor = report["floor"]
    groups = ", ".join(f"{size} of {count}" for count, size in report["tau_groups"].items())
    return "\n".join(
        [
            f"{sets['train']:,} shard sets for training, {sets['validation']:,} for validation, "
            f"{sets['test']:,} for the test, with tables that occur in no other split; "
            f"{0 if floor is None else floor['num_sets']:,} of those were measured twice.",
            f"Device `{facts['device']}`, {facts['threads']} thread(s), caches "
            f"{facts['cache']}, {facts['concurrent_workers']} process(es) at once, "
            f"{_timed(report)} from {facts['measured_from']} to {facts['measured_to']}.",
            f"Networks: means of {report['num_seeds']} seed(s). In brackets 95% intervals over "
            "sets (bootstrap).",
            "Kendall's tau within sets of equally many shards "
            f"({f'sets of how many shards: {groups}' if groups else 'no group is large enough'}).",
        ]
    )


def _timed(report: Report) -> str:
    simulated = report["measurements"]["device"] == SimulatedDevice.SIMULATED.value
    return "simulated" if simulated else "measured"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [f"| {' | '.join(columns)} |", f"|---|{'---:|' * (len(columns) - 1)}"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def _percent(interval: Mapping[str, float]) -> str:
    return (
        f"{100 * interval['value']:.2f}% "
        f"[{100 * interval['low']:.2f}, {100 * interval['high']:.2f}]"
    )


def _number(interval: Mapping[str, float] | None) -> str:
    if interval is None:
        return "–"
    return f"{interval['value']:.3f} [{interval['low']:.3f}, {interval['high']:.3f}]"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.1%}"


def _with_floor(report: Report) -> dict[str, Any]:
    rows = dict(report["test"])
    if report["floor"] is not None:
        rows[FLOOR_NAME] = report["floor"]
    return rows


def _scores(report: Report, quantity: str) -> str:
    rows = []
    for name, scores in _with_floor(report).items():
        own = scores[quantity]
        errors = [_percent(own[statistic]) for statistic in ("median", "mean", "p90")]
        seeds = own["seeds"]
        spread = f"{100 * min(seeds):.2f}–{100 * max(seeds):.2f}%" if len(seeds) > 1 else "–"
        rows.append([name, *errors, _number(own["tau"]), spread])
    columns = ("cost model", "median", "mean", "90th percentile", "tau", "median by seed")
    return f"## Relative error of the {_NAMES[quantity]} time\n\n" + _table(columns, rows)


def _bar(report: Report) -> str:
    bar = report["bar"]
    median = bar["median"]
    rows = [
        [
            "median error of the total",
            f"{median['value']:.2%}",
            f"at most {median['at_most']:.2%}",
            _yes(median["passed"]),
        ]
    ]
    for quantity, tau in bar["tau"].items():
        name = f"tau, {_NAMES[quantity]}, on sets measured twice"
        if tau is None:
            rows.append([name, "–", "too few sets were measured twice", _yes(False)])
            continue
        asked = f"at least {tau['at_least']:.3f} (repeats: {tau['of_repeats']:.3f})"
        rows.append([name, f"{tau['value']:.3f}", asked, _yes(tau["passed"])])
    verdict = "The bar is cleared." if bar["passed"] else "The bar is not cleared."
    differences = [
        [f"less {other}", *(_points(by_quantity[q]) for q in QUANTITIES)]
        for other, by_quantity in bar["better_than"].items()
    ]
    return "\n\n".join(
        [
            "## The bar",
            verdict,
            _table(("what", "reached", "asked", "passed"), rows),
            "Median error less that of every other contender, in percentage points, over the same "
            "resamples: a difference counts where its whole interval is below 0.",
            _table(
                (
                    "difference",
                    *(_NAMES[q] for q in QUANTITIES),
                ),
                differences,
            ),
        ]
    )


def _points(one: Mapping[str, Any]) -> str:
    return (
        f"{100 * one['value']:+.2f} [{100 * one['low']:+.2f}, {100 * one['high']:+.2f}]"
        f"{'' if one['passed'] else ' (no)'}"
    )


def _yes(passed: bool) -> str:
    return "yes" if passed else "no"


def _parts(report: Report, key: str, title: str, column: str) -> str:
    """Median error of the total for each part of the sets."""
    parts = {name: part for name, part in report[key].items() if part["num_sets"]}
    names = list(report["test"])
    rows = []
    for part_name, part in parts.items():
        medians = [_percent(part["models"][name]["total"]) for name in names]
        floor = "–" if part["floor"] is None else f"{part['floor']['total']:.2%}"
        rows.append([part_name, f"{part['num_sets']:,}", *medians, floor])
    columns = (column, "sets", *names, FLOOR_NAME)
    return f"## {title}\n\nMedian relative error of the total.\n\n" + _table(columns, rows)


def _learning(report: Report) -> str:
    curves = report["learning_curve"]
    sizes = [point["num_sets"] for point in next(iter(curves.values()))]
    text = ["## Learning curve", "Median relative error over the number of training sets."]
    for quantity in reversed(QUANTITIES):
        rows = [
            [name, *(_percent(point[quantity]) for point in points)]
            for name, points in curves.items()
        ]
        columns = (_NAMES[quantity], *(f"{size:,} sets" for size in sizes))
        text.append(_table(columns, rows))
    return "\n\n".join(text)


def _growth(report: Report) -> str:
    growths = ("all", *GROWTHS, SWITCHED)
    rows = []
    for name, by_growth in report["growth"].items():
        cells = []
        for growth in growths:
            own = by_growth[growth]["total"]
            cells.append(
                f"{_share(own['share_cheaper'])} / {_share(own['share_beyond_noise'])} / "
                f"{_share(own['largest_decrease'])}"
            )
        rows.append([name, *cells])
    return (
        "## Sets that grew\n\nHow often the grown set is predicted to cost less in total / less by "
        "more than two measurements differ (median) / the largest decrease. A replica that grows "
        "may exchange bags instead of rows, or rows instead of bags: then it runs another update, "
        f"which may be the cheaper one. Such sets stand apart under {SWITCHED!r}.\n\n"
        + _table(("cost model", *growths), rows)
    )


def _ranges(report: Report) -> str:
    kinds = list(next(iter(report["ranges"].values())))
    rows = [
        [
            name,
            *(
                f"{by_kind[kind]['negative']} / {by_kind[kind]['not_finite']} of "
                f"{by_kind[kind]['num']:,}"
                for kind in kinds
            ),
        ]
        for name, by_kind in report["ranges"].items()
    ]
    return "## Predictions that are no costs\n\nNegative / not finite.\n\n" + _table(
        ("cost model", *(f"{kind} sets" for kind in kinds)), rows
    )


def comparison_table(report: Report) -> RichTable:
    """The main numbers for the terminal."""
    sets = report["num_sets"]
    simulated = "simulated " if _timed(report) == "simulated" else ""
    table = RichTable(
        title=f"Median errors on {sets['test']:,} {simulated}shard sets of test tables, "
        f"trained on {sets['train']:,}",
        box=None,  # narrow enough for a terminal of 80 columns
        padding=(0, 2, 0, 0),
    )
    table.add_column("cost model", no_wrap=True)
    for quantity in QUANTITIES:
        table.add_column(quantity, justify="right", no_wrap=True)
    for column in ("95%", "p90", "tau", "grown"):
        table.add_column(column, justify="right", no_wrap=True)
    for name, scores in _with_floor(report).items():
        total = scores["total"]
        median = total["median"]
        growth = report["growth"].get(name)
        table.add_row(
            name,
            *(f"{scores[quantity]['median']['value']:.1%}" for quantity in QUANTITIES),
            f"{100 * median['low']:.1f}–{100 * median['high']:.1f}",
            f"{total['p90']['value']:.0%}",
            "–" if total["tau"] is None else f"{total['tau']['value']:.3f}",
            "–" if growth is None else f"{growth['all']['total']['share_cheaper']:.0%}",
        )
    bar = report["bar"]
    table.caption = (
        "95%, p90 and tau: of the total; grown: sets that grew and are called cheaper\n"
        f"the bar is {'cleared' if bar['passed'] else 'not cleared'}: median "
        f"{bar['median']['value']:.2%}, at most {bar['median']['at_most']:.2%}"
    )
    return table
