"""The terminal's comparison: order, gaps by hand, one column for each source of costs."""

import io

import pytest
from rich.console import Console

from autoshard.errors import InfeasibleError
from autoshard.objective import CostSource
from autoshard.planning import SharderResult, make_plan
from autoshard.report.tables import ComparisonRow, comparison_rows, comparison_table
from tests.placement_cases import COST_MODEL, make_problem, random_tables


def row(sharder, predicted_ms, **values):
    return ComparisonRow(
        sharder=sharder, predicted_ms=predicted_ms, **{"planning_time_s": 0.25, **values}
    )


def cells(rows):
    """The table's headings and its cells, row by row."""
    table = comparison_table(rows)
    columns = [list(column.cells) for column in table.columns]
    headings = [str(column.header).replace("\n", " ") for column in table.columns]
    return headings, list(zip(*columns, strict=True))


def test_gaps_and_order():
    headings, lines = cells(
        [
            row("slow", 12.0, lower_bound_ms=8.0, best_known_ms=10.0),
            row("none", None, infeasible=True),
            row("fast", 10.0, lower_bound_ms=8.0, best_known_ms=10.0),
        ]
    )
    assert headings == [
        "sharder",
        "step ms predicted",
        "above the lower bound",
        "above the best known",
        "planning s",
    ]
    assert lines == [
        ("fast", "10.000", "25.0%", "0.0%", "0.25"),
        ("slow", "12.000", "50.0%", "20.0%", "0.25"),
        ("none", "infeasible", "–", "–", "0.25"),
    ]


def test_a_measured_column_only_if_something_ran():
    headings, lines = cells([row("a", 3.0, measured_ms=4.5), row("b", 5.0)])
    assert headings[2] == "run, ms measured"
    assert [line[2] for line in lines] == ["4.500", "–"]
    assert "run, ms measured" not in cells([row("b", 5.0)])[0]


def test_sources_never_share_a_column():
    headings, lines = cells([row("a", 3.0), row("b", 5.0, source=CostSource.SIMULATED)])
    assert headings[1:3] == ["step ms predicted", "step ms simulated"]
    assert [line[1:3] for line in lines] == [("3.000", "–"), ("–", "5.000")]


def test_extrapolation_is_told():
    assert comparison_table([row("a", 3.0)]).caption is None
    caption = comparison_table([row("a", 3.0, extrapolated=True)]).caption
    assert "no gain is claimed" in str(caption)


def test_a_bound_of_zero_gives_no_gap():
    assert cells([row("a", 3.0, lower_bound_ms=0.0)])[1][0][2] == "–"


def test_only_infeasible_rows_can_be_printed():
    console = Console(file=io.StringIO(), width=100)
    console.print(comparison_table([row("a", None, infeasible=True)]))
    assert "infeasible" in console.file.getvalue()


def test_rows_of_results():
    problem = make_problem(random_tables(4), 2)
    plan = make_plan(problem, sharder="size_greedy", cost_model=COST_MODEL)
    found, failed = comparison_rows(
        [
            SharderResult(sharder="size_greedy", plan=plan, error=None, planning_time_s=0.5),
            SharderResult(
                sharder="random", plan=None, error=InfeasibleError("no"), planning_time_s=1.5
            ),
        ]
    )
    assert found.predicted_ms == pytest.approx(plan.cost.step.step_ms)
    assert found.source is plan.cost.step.source
    assert (found.infeasible, failed.infeasible) == (False, True)
    assert (failed.predicted_ms, failed.planning_time_s) == (None, 1.5)
