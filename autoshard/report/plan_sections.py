"""The report's sections about plans: the summary, costs per rank, predicted against measured."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePath

import numpy as np
import pandas as pd

from autoshard.objective import CostSource
from autoshard.plan import ShardingPlan
from autoshard.report.data import ReportData
from autoshard.report.figures import predicted_against_measured, rank_costs
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
    percent,
)
from autoshard.report.statistics import kendall_tau, relative_errors
from autoshard.report.tables import ComparisonRow

#: The objective's terms as columns of a validation frame.
_TERMS = ("fwd_compute_ms", "bwd_compute_ms", "fwd_comms_ms", "bwd_comms_ms")
#: More plans than this are told of in the takeaway and the picture only.
_MAX_ROWS = 60


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


def per_plan(validation: pd.DataFrame) -> pd.DataFrame:
    """One row per plan: medians over its passes, the measured range, and marks."""
    usable = validation[
        np.isfinite(validation["measured_ms"]) & np.isfinite(validation["predicted_ms"])
    ]
    usable = usable[(usable["measured_ms"] > 0) & (usable["predicted_ms"] > 0)]
    grouped = usable.groupby(["plan", "sharder", "world_size", "num_tables"], sort=False)
    result = grouped.median(numeric_only=True).reset_index()
    measured = grouped["measured_ms"]
    result["measured_low_ms"] = measured.min().to_numpy()
    result["measured_high_ms"] = measured.max().to_numpy()
    result["num_passes"] = measured.size().to_numpy()
    for name in ("extrapolated", "oversubscribed"):
        result[name] = grouped[name].max().to_numpy() > 0
    result["marked"] = result["extrapolated"] | result["oversubscribed"]
    return result


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
                measured_ms=None if plan is None else _measured_ms(name, plan, runs),
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


def _measured_ms(name: str, plan: ShardingPlan, runs: Mapping[str, pd.Series]) -> float | None:
    run = runs.get(name)
    if (
        run is None
        or int(run["world_size"]) != plan.topology.world_size
        or int(run["num_tables"]) != len(plan.tables)
    ):
        return None
    return float(run["measured_ms"])


def summary_section(data: ReportData) -> Section:
    """All sharders on one problem: predicted and measured side by side, gaps, planning time."""
    command = _plan_command(data)
    rows = comparison(data)
    if not rows:
        return missing_section("summary", "Summary", "No plans here yet.", command)
    plans = one_problem(data.plans)
    sources = [s for s in CostSource if s in {_source(plans, r.sharder) for r in rows}]
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
        source = _source(plans, row.sharder)
        line = [row.sharder]
        line += [milliseconds(row.predicted_ms if source is s else None) for s in sources]
        if measured:
            line.append(milliseconds(row.measured_ms))
        line += [
            gap(row.predicted_ms, row.lower_bound_ms),
            gap(row.predicted_ms, row.best_known_ms),
            MISSING if math.isnan(row.planning_time_s) else f"{row.planning_time_s:.3f}",
        ]
        run = runs.get(row.sharder) if row.measured_ms is not None else None
        remark = marks(
            extrapolated=row.extrapolated,
            oversubscribed=run is not None and bool(run["oversubscribed"]),
        )
        cells.append((*line, "infeasible" if row.infeasible else remark))
    return Section(
        anchor="summary",
        title="Summary",
        takeaway=_summary_takeaway(rows, plans),
        command=command,
        tables=(
            HtmlTable(columns=tuple(columns), rows=tuple(cells), caption=_problem_caption(plans)),
        ),
        notes=_summary_notes(data, plans, rows),
    )


def _source(plans: Mapping[str, ShardingPlan], name: str) -> CostSource | None:
    plan = plans.get(name)
    return None if plan is None or plan.cost is None else plan.cost.step.source


def _problem_caption(plans: Mapping[str, ShardingPlan]) -> str:
    plan = next(iter(plans.values()), None)
    if plan is None:
        return ""
    return (
        f"{count(len(plan.tables), 'table')} on {count(plan.topology.world_size, 'rank')}, "
        f"{plan.training.batch_size:,} samples per rank."
    )


def _summary_takeaway(rows: list[ComparisonRow], plans: Mapping[str, ShardingPlan]) -> str:
    solved = [row for row in rows if row.predicted_ms is not None]
    infeasible = [row.sharder for row in rows if row.infeasible]
    parts = []
    if solved:
        best = solved[0]
        source = _source(plans, best.sharder)
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
        notes.append(f"{count(others, 'plan')} of other problems are left out.")
    if any(row.extrapolated for row in rows):
        notes.append("Extrapolated: something lies outside the measurements behind the cost model.")
    return tuple(notes)


def _plan_command(data: ReportData) -> str:
    folder = data.folder
    plan = next(iter(one_problem(data.plans).values()), None)
    options = []
    if plan is not None:
        options = [
            f"world_size={plan.topology.world_size}",
            f"batch_size={plan.training.batch_size}",
        ]
    return module_command(
        "experiments.plan", f"tables={folder}/tables.csv", *options, f"out={folder}/plans"
    )


def rank_section(data: ReportData) -> Section:
    """How evenly each sharder loads the ranks."""
    plans = {k: p for k, p in one_problem(data.plans).items() if p.cost is not None}
    command = _plan_command(data)
    title, anchor = "Cost of each rank", "ranks"
    if not plans:
        return missing_section(anchor, title, "No plans with a cost here yet.", command)
    plans = dict(sorted(plans.items(), key=lambda item: _step_ms(item[1])))
    groups = [
        {k: p for k, p in plans.items() if _source(plans, k) is source} for source in CostSource
    ]
    groups = [group for group in groups if group]
    cells, imbalance = [], {}
    for name, plan in plans.items():
        assert plan.cost is not None
        step = plan.cost.step
        compute_R = np.array(step.fwd_compute_ms) + np.array(step.bwd_compute_ms)
        mean = float(compute_R.mean())
        imbalance[name] = float(compute_R.max()) / mean if mean > 0 else 1.0
        cells.append(
            (
                name,
                step.source.value,
                milliseconds(max(step.fwd_compute_ms)),
                milliseconds(max(step.bwd_compute_ms)),
                milliseconds(step.fwd_comms_ms),
                milliseconds(step.bwd_comms_ms),
                f"{imbalance[name]:.3f}",
                str(int(compute_R.argmax())),
            )
        )
    num_ranks = next(iter(plans.values())).topology.world_size
    if num_ranks == 1:
        takeaway = "There is one rank, so there is nothing to balance."
    else:
        even = min(imbalance, key=imbalance.__getitem__)
        uneven = max(imbalance, key=imbalance.__getitem__)
        takeaway = (
            f"{even} loads the {num_ranks} ranks most evenly: its slowest rank computes for "
            f"{imbalance[even]:.2f} times the mean"
        )
        takeaway += (
            f"; with {uneven} it is {imbalance[uneven]:.2f} times." if (uneven != even) else "."
        )
    columns = [Column(title="sharder", numeric=False), Column(title="source", numeric=False)]
    columns += [
        Column(title=t)
        for t in (
            "fwd_compute, slowest, ms",
            "bwd_compute, slowest, ms",
            "fwd_comms, ms",
            "bwd_comms, ms",
            "slowest / mean",
            "slowest rank",
        )
    ]
    return Section(
        anchor=anchor,
        title=title,
        takeaway=takeaway,
        command=command,
        pictures=tuple(rank_costs(group, key=f"ranks{i}") for i, group in enumerate(groups)),
        tables=(HtmlTable(columns=tuple(columns), rows=tuple(cells)),),
    )


def _step_ms(plan: ShardingPlan) -> float:
    assert plan.cost is not None
    return plan.cost.step.step_ms


def validation_section(data: ReportData) -> Section:
    """The promise beside the delivery: predicted and measured step time of every plan that ran."""
    folder = data.folder
    anchor, title = "validation", "Predicted against measured"
    files = f"[{','.join(f'{folder}/plans/{name}.json' for name in data.plans)}]"
    command = module_command(
        "experiments.run_plan", f"plans={files if data.plans else '[plan.json]'}",
        f"out={folder}/runs",
    )  # fmt: skip
    if data.validation is None:
        return missing_section(anchor, title, "No plan has been run here yet.", command)
    plans = per_plan(data.validation)
    if plans.empty:
        return missing_section(anchor, title, "No run gave a usable step time.", command)
    error_ms = (plans["predicted_ms"] - plans["measured_ms"]).abs()
    relative = relative_errors(plans["predicted_ms"], plans["measured_ms"])
    takeaway = (
        f"Over {count(len(plans), 'plan')}, the predicted step time is off by "
        f"{milliseconds(float(error_ms.median()))} ms ({percent(float(np.median(relative)))}) "
        f"in the median and by {milliseconds(float(error_ms.max()))} ms at most"
    )
    if len(plans) > 2:
        tau = kendall_tau(plans["predicted_ms"], plans["measured_ms"])
        if math.isfinite(tau.value):
            takeaway += (
                f"; Kendall's tau of the order is {tau.value:.2f} [{tau.low:.2f}, {tau.high:.2f}]"
            )
    notes = ["Medians over passes; bars and ranges span the fastest and the slowest pass."]
    if plans["oversubscribed"].any():
        notes.append("Oversubscribed: measured with more ranks than cores (drawn hollow).")
    if plans["extrapolated"].any():
        notes.append("Extrapolated: predicted beyond the measurements (drawn hollow).")
    shown = plans.head(_MAX_ROWS)
    if len(plans) > len(shown):
        notes.append(f"The table shows the first {len(shown)} of {len(plans)} plans.")
    tables = [_validation_table(shown)]
    if (terms := _terms_table(plans)) is not None:
        tables.append(terms)
    return Section(
        anchor=anchor,
        title=title,
        takeaway=f"{takeaway}.",
        command=command,
        pictures=(predicted_against_measured(plans),),
        tables=tuple(tables),
        notes=tuple(notes),
    )


def _validation_table(plans: pd.DataFrame) -> HtmlTable:
    rows = []
    for row in plans.to_dict("records"):
        predicted, measured = float(row["predicted_ms"]), float(row["measured_ms"])
        low, high = float(row["measured_low_ms"]), float(row["measured_high_ms"])
        name = str(row["plan"])
        rows.append(
            (
                PurePath(name).stem if name.endswith(".json") else name,
                str(row["sharder"]),
                f"{row['world_size']:.0f}",
                milliseconds(predicted),
                milliseconds(measured),
                f"{milliseconds(low)} – {milliseconds(high)}",
                milliseconds(abs(predicted - measured)),
                f"{predicted / measured - 1:+.1%}",
                marks(extrapolated=row["extrapolated"], oversubscribed=row["oversubscribed"]),
            )
        )
    columns = (
        Column(title="plan", numeric=False),
        Column(title="sharder", numeric=False),
        Column(title="ranks"),
        Column(title="step, ms", source="predicted"),
        Column(title="step, ms", source="measured"),
        Column(title="range, ms", source="measured"),
        Column(title="abs. error, ms"),
        Column(title="error"),
        Column(title="remarks", numeric=False),
    )
    return HtmlTable(columns=columns, rows=tuple(rows))


def _terms_table(plans: pd.DataFrame) -> HtmlTable | None:
    """Which term the error comes from; None if the rows do not tell the terms."""
    rows = []
    for term in _TERMS:
        names = [f"predicted_{term}", f"measured_{term}"]
        if not set(names) <= set(plans.columns):
            return None
        predicted, measured = (plans[name].to_numpy(dtype=float) for name in names)
        rows.append(
            (
                term.removesuffix("_ms"),
                milliseconds(float(np.nanmedian(predicted))),
                milliseconds(float(np.nanmedian(measured))),
                milliseconds(float(np.nanmedian(np.abs(predicted - measured)))),
            )
        )
    columns = (
        Column(title="term", numeric=False),
        Column(title="median, ms", source="predicted"),
        Column(title="median, ms", source="measured"),
        Column(title="median abs. error, ms"),
    )
    return HtmlTable(columns=columns, rows=tuple(rows), caption="By term of the objective")
