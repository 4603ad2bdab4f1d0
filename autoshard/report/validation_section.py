"""The report's section on plans that were run: predicted against measured step time."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

import numpy as np
import pandas as pd

from autoshard.objective import CostSource
from autoshard.report.data import ReportData
from autoshard.report.figures import predicted_against_measured
from autoshard.report.sections import (
    Column,
    HtmlTable,
    Section,
    count,
    marks,
    milliseconds,
    missing_section,
    module_command,
    percent,
)
from autoshard.report.statistics import kendall_tau, relative_errors

#: The objective's terms as columns of a validation frame.
_TERMS = ("fwd_compute_ms", "bwd_compute_ms", "fwd_comms_ms", "bwd_comms_ms")
#: More plans than this are told of in the takeaway and the picture only.
_MAX_ROWS = 60


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
    if "source" in usable:
        result["source"] = grouped["source"].first().to_numpy()
    result["marked"] = result["extrapolated"] | result["oversubscribed"]
    return result


def validation_section(data: ReportData) -> Section:
    """The promise beside the delivery: predicted and measured step time of every plan that ran."""
    folder = data.folder
    anchor, title = "validation", "Predicted against measured"
    files = f"[{','.join(data.plan_file(name) for name in data.plans)}]"
    command = module_command(
        "experiments.run_plan", f"plans={files if data.plans else '[plan.json]'}",
        f"out={folder}/runs",
    )  # fmt: skip
    if data.validation is None:
        return missing_section(anchor, title, "No plan has been run here yet.", command)
    plans = per_plan(data.validation)
    if plans.empty:
        return missing_section(anchor, title, "No run gave a usable step time.", command)
    plans["source"] = [_prediction_source(data, row) for row in plans.to_dict("records")]
    sources = " or ".join(sorted(set(plans["source"])))
    error_ms = (plans["predicted_ms"] - plans["measured_ms"]).abs()
    relative = relative_errors(plans["predicted_ms"], plans["measured_ms"])
    takeaway = (
        f"Over {count(len(plans), 'plan')}, the {sources} step time is off by "
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
    if (terms := _terms_table(plans, sources)) is not None:
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


def _prediction_source(data: ReportData, run: Mapping[Any, Any]) -> str:
    """What the run says; of older runs what the plan says of this step time; else a prediction."""
    if isinstance(run.get("source"), str):
        return str(run["source"])
    for name, plan in data.plans.items():
        if (
            plan.cost is None
            or PurePath(data.plan_file(name)).stem != PurePath(str(run["plan"])).stem
        ):
            continue
        if math.isclose(plan.cost.step.step_ms, float(run["predicted_ms"]), rel_tol=1e-9):
            return plan.cost.step.source.value
    return CostSource.PREDICTED.value


def _validation_table(plans: pd.DataFrame) -> HtmlTable:
    rows = []
    sources = sorted(set(plans["source"]))
    for row in plans.to_dict("records"):
        predicted, measured = float(row["predicted_ms"]), float(row["measured_ms"])
        low, high = float(row["measured_low_ms"]), float(row["measured_high_ms"])
        name = str(row["plan"])
        rows.append(
            (
                PurePath(name).stem if name.endswith(".json") else name,
                str(row["sharder"]),
                f"{row['world_size']:.0f}",
                *(milliseconds(predicted if row["source"] == s else None) for s in sources),
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
        *(Column(title="step, ms", source=source) for source in sources),
        Column(title="step, ms", source="measured"),
        Column(title="range, ms", source="measured"),
        Column(title="abs. error, ms"),
        Column(title="error"),
        Column(title="remarks", numeric=False),
    )
    return HtmlTable(columns=columns, rows=tuple(rows))


def _terms_table(plans: pd.DataFrame, sources: str) -> HtmlTable | None:
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
        Column(title="median, ms", source=sources),
        Column(title="median, ms", source="measured"),
        Column(title="median abs. error, ms"),
    )
    return HtmlTable(columns=columns, rows=tuple(rows), caption="By term of the objective")
