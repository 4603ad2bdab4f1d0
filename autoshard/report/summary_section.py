"""The report's first section: every sharder on one problem, promised and delivered."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePath

import pandas as pd

from autoshard.objective import CostSource
from autoshard.plan import ShardingPlan
from autoshard.report.data import ReportData
from autoshard.report.sections import (
    MISSING,
    Column,
    HtmlTable,
    Section,
    count,
    gap,
    listed,
    marks,
    milliseconds,
    missing_section,
    module_command,
)
from autoshard.report.tables import ComparisonRow
from autoshard.report.validation_section import per_plan
from autoshard.topology import GIB


def one_problem(plans: Mapping[str, ShardingPlan]) -> dict[str, ShardingPlan]:
    """The plans of the problem that most of them answer; costs of others don't compare."""
    groups: list[dict[str, ShardingPlan]] = []
    for name, plan in plans.items():
        for group in groups:
            if next(iter(group.values())).problem == plan.problem:
                group[name] = plan
                break
        else:
            groups.append({name: plan})
    return max(groups, key=len, default={})


def plan_command(data: ReportData) -> str:
    """What plans this problem again, as far as the plan tells."""
    plan = next(iter(one_problem(data.plans).values()), None)
    options = list(data.option("tables") or ("tables=my_tables.csv",))
    if plan is not None:
        topology, training = plan.topology, plan.training
        options += [
            f"world_size={topology.world_size}",
            f"batch_size={training.batch_size}",
            f"optimizer={training.optimizer.value}",
        ]
        if len(set(topology.hbm_bytes)) == 1:
            options.append(f"hbm_gib={topology.hbm_bytes[0] / GIB:g}")
        options += [
            f"{name}={plan.provenance[name]}"
            for name in ("seed", "max_evaluations")
            if isinstance(plan.provenance.get(name), int)
        ]
    options += [*data.option("cost_model"), *data.option("policy")]
    return module_command("experiments.plan", *options, f"out={data.folder}/plans")


def comparison(data: ReportData) -> list[ComparisonRow]:
    """One row per sharder of the problem: its cost, its measured time if it ran, its gaps."""
    plans = one_problem(data.plans)
    runs = {} if data.validation is None else _runs_by_name(per_plan(data.validation))
    records = {str(record["sharder"]): record for record in data.planning}
    rows = []
    for name in dict.fromkeys([*plans, *records]):
        plan, record = plans.get(name), records.get(name)
        if plan is None and name in data.plans:
            continue  # of another problem
        if plan is None and record is not None and not record.get("infeasible"):
            continue  # its file is gone
        cost = None if plan is None else plan.cost
        seconds = None if record is None else record["planning_time_s"]
        rows.append(
            ComparisonRow(
                sharder=name,
                predicted_ms=None if cost is None else cost.step.step_ms,
                source=CostSource.PREDICTED if cost is None else cost.step.source,
                measured_ms=None
                if plan is None
                else _measured_ms(plan, runs.get(PurePath(data.plan_file(name)).stem)),
                lower_bound_ms=None if cost is None else cost.lower_bound_ms,
                best_known_ms=None if cost is None else cost.best_known_ms,
                planning_time_s=math.nan if seconds is None else float(seconds),
                infeasible=plan is None,
                extrapolated=cost is not None and cost.step.extrapolated,
            )
        )
    return sorted(rows, key=lambda row: (row.predicted_ms is None, row.predicted_ms or 0.0))


def _runs_by_name(runs: pd.DataFrame) -> dict[str, pd.Series]:
    """Runs by the stem of the plan file that was run."""
    return {PurePath(str(row["plan"])).stem: row for _, row in runs.iterrows()}


def _measured_ms(plan: ShardingPlan, run: pd.Series | None) -> float | None:
    """The step time of a run, unless it was of another problem."""
    if (
        run is None
        or int(run["world_size"]) != plan.topology.world_size
        or int(run["num_tables"]) != len(plan.tables)
    ):
        return None
    return float(run["measured_ms"])


def summary_section(data: ReportData) -> Section:
    """All sharders on one problem: predicted and measured side by side, gaps, planning time."""
    command = plan_command(data)
    rows = comparison(data)
    if not rows:
        return missing_section("summary", "Summary", "No plans here yet.", command)
    plans = one_problem(data.plans)
    sources = [s for s in CostSource if s in {cost_source(plans, r.sharder) for r in rows}]
    measured = any(row.measured_ms is not None for row in rows)
    runs = {} if data.validation is None else _runs_by_name(per_plan(data.validation))
    columns = [Column(title="sharder", numeric=False)]
    columns += [Column(title="step, ms", source=source.value) for source in sources]
    if measured:
        columns.append(Column(title="step as run, ms", source="measured"))
    columns += [
        Column(title=title)
        for title in ("above lower bound", "above best known", "planning time, s")
    ]
    columns.append(Column(title="remarks", numeric=False))
    cells = []
    for row in rows:
        source = cost_source(plans, row.sharder)
        line = [row.sharder]
        line += [milliseconds(row.predicted_ms if source is s else None) for s in sources]
        if measured:
            line.append(milliseconds(row.measured_ms))
        line += [
            gap(row.predicted_ms, row.lower_bound_ms),
            gap(row.predicted_ms, row.best_known_ms),
            MISSING if math.isnan(row.planning_time_s) else f"{row.planning_time_s:.3f}",
        ]
        file = PurePath(data.plan_file(row.sharder))
        run = runs.get(file.stem) if row.measured_ms is not None else None
        remark = marks(
            extrapolated=row.extrapolated,
            oversubscribed=run is not None and bool(run["oversubscribed"]),
        )
        cells.append((*line, "infeasible" if row.infeasible else remark))
    return Section(
        anchor="summary",
        title="Summary",
        takeaway=_summary_takeaway(rows, plans, _num_overlapping(data, rows, runs)),
        command=command,
        tables=(
            HtmlTable(columns=tuple(columns), rows=tuple(cells), caption=_problem_caption(plans)),
        ),
        notes=_summary_notes(data, plans, rows),
    )


def cost_source(plans: Mapping[str, ShardingPlan], name: str) -> CostSource | None:
    """Where a plan's cost comes from; None without plan or cost."""
    plan = plans.get(name)
    return None if plan is None or plan.cost is None else plan.cost.step.source


def _num_overlapping(
    data: ReportData, rows: list[ComparisonRow], runs: Mapping[str, pd.Series]
) -> int:
    """How many plans had a pass as fast as some pass of the fastest plan; its own not counted."""
    ran = {
        row.sharder: runs[PurePath(data.plan_file(row.sharder)).stem]
        for row in rows
        if row.measured_ms is not None
    }
    if not ran:
        return 0
    fastest = min(ran, key=lambda name: float(ran[name]["measured_ms"]))
    return sum(
        float(run["measured_low_ms"]) <= float(ran[fastest]["measured_high_ms"])
        for name, run in ran.items()
        if name != fastest
    )


def _problem_caption(plans: Mapping[str, ShardingPlan]) -> str:
    plan = next(iter(plans.values()), None)
    if plan is None:
        return ""
    return (
        f"{count(len(plan.tables), 'table')} on {count(plan.topology.world_size, 'rank')}, "
        f"{plan.training.batch_size:,} samples per rank."
    )


def _summary_takeaway(
    rows: list[ComparisonRow], plans: Mapping[str, ShardingPlan], num_overlapping: int
) -> str:
    solved = [row for row in rows if row.predicted_ms is not None]
    infeasible = [row.sharder for row in rows if row.infeasible]
    parts = []
    if solved:
        best = solved[0]
        source = cost_source(plans, best.sharder)
        assert source is not None
        assert best.predicted_ms is not None
        if best.extrapolated:
            parts.append(
                f"{best.sharder} has the lowest {source.value} step time, "
                f"{milliseconds(best.predicted_ms)} ms, but it is extrapolated beyond the "
                "measurements, so no gain is claimed"
            )
        else:
            text = (
                f"{best.sharder} has the lowest {source.value} step time: "
                f"{milliseconds(best.predicted_ms)} ms"
            )
            if best.lower_bound_ms:
                text += f", {gap(best.predicted_ms, best.lower_bound_ms)} above the lower bound"
            parts.append(text)
    elif plans:
        parts.append(f"{count(len(plans), 'plan')}, none with a cost")
    runs = [row for row in rows if row.measured_ms is not None]
    if runs:
        fastest = min(runs, key=lambda row: row.measured_ms or 0.0)
        also = "it is also" if solved and fastest.sharder == solved[0].sharder else fastest.sharder
        verb = "" if also == "it is also" else " is"
        parts.append(
            f"{also}{verb} the fastest of {count(len(runs), 'plan')} as measured, "
            f"with {milliseconds(fastest.measured_ms)} ms"
            + (
                f", though passes of {count(num_overlapping, 'other plan')} were as fast"
                if num_overlapping
                else ""
            )
        )
    elif solved:
        parts.append("no plan has been run")
    if infeasible:
        verb = "finds" if len(infeasible) == 1 else "find"
        parts.append(f"{listed(infeasible)} {verb} no plan that fits")
    return "; ".join(parts) + "."


def _summary_notes(
    data: ReportData, plans: Mapping[str, ShardingPlan], rows: list[ComparisonRow]
) -> tuple[str, ...]:
    notes = []
    if others := len(data.plans) - len(plans):
        notes.append(f"Left out: {count(others, 'plan')} of other problems.")
    if any(row.extrapolated for row in rows):
        notes.append("Extrapolated: something lies outside the measurements behind the cost model.")
    return tuple(notes)
