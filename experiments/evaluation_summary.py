"""What a comparison of sharders amounts to: paired ratios, infeasible counts, times."""

from __future__ import annotations

import numpy as np
import pandas as pd
from rich.table import Table as RichTable

from autoshard.report.statistics import geometric_mean_ratio

BASELINE = "cost_greedy"


def per_contender(frame: pd.DataFrame, baseline: str = BASELINE) -> pd.DataFrame:
    """One row per sharder and training seed, over the tasks feasible for both it and `baseline`.

    Args:
        frame: evaluation rows.
        baseline: the sharder that ratios are taken to.

    Returns:
        Columns sharder, training_seed, num_tasks, num_infeasible, ratio, ratio_low, ratio_high,
        ratio_upper_95 (one-sided), gap_to_bound, gap_to_best, planning_time_s.
    """
    base = frame[frame["sharder"] == baseline].set_index("task")["objective_ms"]
    rows = []
    for (sharder, seed), group in frame.groupby(["sharder", "training_seed"], sort=False):
        own = group.set_index("task")
        paired = own.join(base.rename("base_ms"))
        paired = paired[np.isfinite(paired["objective_ms"]) & np.isfinite(paired["base_ms"])]
        row: dict[str, object] = {
            "sharder": sharder,
            "training_seed": seed,
            "num_tasks": len(paired),
            "num_infeasible": int(own["infeasible"].sum()),
            "planning_time_s": float(own["planning_time_s"].median()),
        }
        if len(paired) > 1:
            ratio = geometric_mean_ratio(paired["objective_ms"], paired["base_ms"])
            row |= {
                "ratio": ratio.value,
                "ratio_low": ratio.low,
                "ratio_high": ratio.high,
                "ratio_upper_95": ratio.upper_95,
            }
        solved = own[~own["infeasible"].astype(bool)]
        if len(solved):
            row["gap_to_best"] = _gap(solved["objective_ms"], solved["best_known_ms"])
            bounded = solved[solved["lower_bound_ms"].notna()]
            if len(bounded):
                row["gap_to_bound"] = _gap(bounded["objective_ms"], bounded["lower_bound_ms"])
        rows.append(row)
    return pd.DataFrame(rows)


def _gap(values: pd.Series, reference: pd.Series) -> float:
    return float(np.exp(np.log(values.astype(float) / reference.astype(float)).mean()) - 1.0)


def summary_table(frame: pd.DataFrame, baseline: str = BASELINE) -> RichTable:
    """`per_contender` for the terminal, best first."""
    rows = per_contender(frame, baseline)
    table = RichTable(
        title=f"Predicted step time on {frame['task'].nunique()} held-out problems",
        caption=f"ratios are geometric means over problems feasible for both, to {baseline}; "
        "gaps are to the lower bound and to the best plan known",
    )
    table.add_column("sharder", no_wrap=True)
    table.add_column("training\nseed", justify="right")
    for column in (
        f"ratio to\n{baseline}",
        "95%\ninterval",
        "above\nbound",
        "above\nbest",
        "infea-\nsible",
        "planning\ns",
    ):
        table.add_column(column, justify="right", no_wrap=True)
    order = rows.sort_values("gap_to_best") if "gap_to_best" in rows else rows
    for row in order.to_dict("records"):
        seed = row["training_seed"]
        table.add_row(
            str(row["sharder"]),
            "" if seed < 0 else str(seed),
            _number(row.get("ratio"), ".4f"),
            f"{_number(row.get('ratio_low'), '.3f')}–{_number(row.get('ratio_high'), '.3f')}",
            _number(row.get("gap_to_bound"), ".1%"),
            _number(row.get("gap_to_best"), ".2%"),
            str(row["num_infeasible"]),
            _number(row["planning_time_s"], ".3f"),
        )
    return table


def _number(value: object, form: str) -> str:
    if not isinstance(value, float) or not np.isfinite(value):
        return "–"
    return format(value, form)
