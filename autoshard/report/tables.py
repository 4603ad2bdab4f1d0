"""Comparisons for the terminal: one row per sharder, predicted and measured side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.table import Table as RichTable

from autoshard.objective import CostSource
from autoshard.planning import SharderResult


@dataclass(frozen=True, kw_only=True)
class ComparisonRow:
    """What one sharder made of a problem. Costs of different sources are different columns."""

    sharder: str
    predicted_ms: float | None
    """What the cost model says; None if it found no plan."""
    source: CostSource = CostSource.PREDICTED
    """Of `predicted_ms`: a model that was not fitted to measurements simulates."""
    measured_ms: float | None = None
    """None if its plan was not run."""
    lower_bound_ms: float | None = None
    best_known_ms: float | None = None
    planning_time_s: float
    infeasible: bool = False
    extrapolated: bool = False


def comparison_rows(results: Sequence[SharderResult]) -> list[ComparisonRow]:
    """Rows of what `autoshard.planning.compare_sharders` returned."""
    rows = []
    for result in results:
        cost = None if result.plan is None else result.plan.cost
        rows.append(
            ComparisonRow(
                sharder=result.sharder,
                predicted_ms=None if cost is None else cost.step.step_ms,
                source=CostSource.PREDICTED if cost is None else cost.step.source,
                lower_bound_ms=None if cost is None else cost.lower_bound_ms,
                best_known_ms=None if cost is None else cost.best_known_ms,
                planning_time_s=result.planning_time_s,
                infeasible=result.plan is None,
                extrapolated=cost is not None and cost.step.extrapolated,
            )
        )
    return rows


def comparison_table(rows: Sequence[ComparisonRow]) -> RichTable:
    """The comparison, fastest prediction first; a column for each source of costs that occurs.

    The measured column, of plans that were run, is there only if something was run.
    """
    sources = [s for s in CostSource if any(r.source is s for r in rows if r.predicted_ms)]
    sources = sources or [CostSource.PREDICTED]
    measured = any(row.measured_ms is not None for row in rows)
    extrapolated = any(row.extrapolated for row in rows)
    table = RichTable(title="Sharders compared")
    table.add_column("sharder", no_wrap=True)
    for source in sources:
        table.add_column(f"step ms\n{source.value}", justify="right")
    if measured:
        table.add_column("run, ms\nmeasured", justify="right")
    for column in ("above the\nlower bound", "above the\nbest known", "planning\ns"):
        table.add_column(column, justify="right")
    order = sorted(rows, key=lambda r: (r.predicted_ms is None, r.predicted_ms or 0.0))
    for row in order:
        cells = [row.sharder]
        for number, source in enumerate(sources):
            own = row.source is source and not row.infeasible
            infeasible = row.infeasible and number == 0
            cells.append("infeasible" if infeasible else _ms(row.predicted_ms if own else None))
        if measured:
            cells.append(_ms(row.measured_ms))
        cells += [
            _gap(row.predicted_ms, row.lower_bound_ms),
            _gap(row.predicted_ms, row.best_known_ms),
            f"{row.planning_time_s:.2f}",
        ]
        table.add_row(*cells)
    if extrapolated:
        table.caption = (
            "extrapolated: something lies outside the measurements behind the cost model, "
            "so no gain is claimed"
        )
    return table


def _ms(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _gap(value: float | None, reference: float | None) -> str:
    if value is None or reference is None or reference <= 0:
        return "–"
    return f"{value / reference - 1:.1%}"
