"""The report's section about transfer: policies on other tables, table counts and rank counts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import pandas as pd

from autoshard.report.data import ReportData
from autoshard.report.figures import transfer_map
from autoshard.report.sections import (
    Column,
    HtmlTable,
    Section,
    count,
    interval,
    missing_section,
    module_command,
    ratio,
)
from autoshard.report.statistics import Estimate, geometric_mean_ratio
from autoshard.report.unseen_sections import BASELINE


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """One policy, trained in one setting, in another setting."""

    value: float | None
    """Geometric mean of the ratio to the baseline; None if no problem was solved by both."""
    estimate: Estimate | None
    """With its interval over problems; None with fewer than two."""
    num_problems: int
    """Problems compared."""
    num_infeasible: int
    """Of `num_attempts`: one for each problem and training seed."""
    num_attempts: int


def transfers(frame: pd.DataFrame) -> dict[tuple[str, str], Transfer]:
    """Results by (trained on, evaluated on), in the order of the rows.

    A problem's log ratio is the mean over its training seeds, so the interval is over
    problems. Where several sharders were evaluated, each is trained "on" a row of its own.
    """
    several = frame["sharder"].nunique() > 1
    found = {}
    keys = ["setting_train", "sharder", "setting_eval"]
    for (train, sharder, evaluated), group in frame.groupby(keys, sort=False):
        ratios = group["ratio_to_cost_greedy"]
        solved = group[np.isfinite(ratios) & (ratios > 0)]
        logs = np.log(solved["ratio_to_cost_greedy"]).groupby(solved["task"]).mean()
        by_task = np.exp(logs)
        label = f"{train} ({sharder})" if several else str(train)
        found[label, str(evaluated)] = Transfer(
            value=float(np.exp(logs.mean())) if len(logs) else None,
            estimate=(
                geometric_mean_ratio(by_task, np.ones(len(by_task))) if len(by_task) > 1 else None
            ),
            num_problems=len(by_task),
            num_infeasible=int((group["infeasible"].fillna(0) > 0).sum()),
            num_attempts=len(group),
        )
    return found


def transfer_section(data: ReportData) -> Section:
    """Does a policy carry over to other tables, table counts and rank counts?"""
    anchor, title = "transfer", "Transfer"
    folder = data.folder
    command = module_command(
        "experiments.transfer",
        *data.option("policy", "policies={{home: {}}}"),
        *data.option("cost_model"),
        f"out={folder}/transfer",
    )
    if data.transfer is None:
        return missing_section(anchor, title, "Transfer was not evaluated here yet.", command)
    found = transfers(data.transfer)
    known = {key: result for key, result in found.items() if result.value is not None}
    if not known:
        return missing_section(anchor, title, "No problem was solved in any setting.", command)
    trains = list(dict.fromkeys(train for train, _ in found))
    settings = list(dict.fromkeys(evaluated for _, evaluated in found))
    grid = pd.DataFrame(
        [[known[t, e].value if (t, e) in known else np.nan for e in settings] for t in trains],
        index=pd.Index(trains),
        columns=pd.Index(settings),
    )
    rows = tuple(
        (
            train,
            evaluated,
            ratio(result.value),
            interval(result.estimate, 4),
            str(result.num_problems),
            f"{result.num_infeasible} of {result.num_attempts}",
        )
        for (train, evaluated), result in found.items()
    )
    columns = (
        Column(title="trained on", numeric=False),
        Column(title="evaluated on", numeric=False),
        Column(title=f"ratio to {BASELINE}"),
        Column(title="95% interval"),
        Column(title="problems compared"),
        Column(title="infeasible"),
    )
    return Section(
        anchor=anchor,
        title=title,
        takeaway=_takeaway(known, sum(result.num_infeasible for result in found.values())),
        command=command,
        pictures=(transfer_map(grid),),
        tables=(HtmlTable(columns=columns, rows=rows),),
        notes=(
            f"Step time under the cost model over {BASELINE}'s, geometric mean over the problems "
            "that both solve, with 95% intervals over problems (Student's t on logarithms); below "
            "1 the policy is better. Each interval stands for itself: of many, some exclude 1 by "
            "chance.",
        ),
    )


def _takeaway(known: Mapping[tuple[str, str], Transfer], num_infeasible: int) -> str:
    values = {key: result.value for key, result in known.items() if result.value is not None}
    intervals = [result.estimate for result in known.values() if result.estimate is not None]
    better = sum(estimate.high < 1 for estimate in intervals)
    worse = sum(estimate.low > 1 for estimate in intervals)
    worst = max(values, key=values.__getitem__)
    best = min(values, key=values.__getitem__)
    text = (
        f"Of {count(len(values), 'setting')}, the policy is better than {BASELINE} in {better} "
        f"and worse in {worse}"
    )
    if better + worse < len(values):
        text += "; the rest shows no clear difference"
    if len(values) > 1:
        text += (
            f". Ratios go from {ratio(values[best])} ({best[1]}, trained on {best[0]}) to "
            f"{ratio(values[worst])} ({worst[1]}, trained on {worst[0]})"
        )
    else:
        text += f" (ratio {ratio(values[best])})"
    if num_infeasible:
        text += f"; it finds no plan in {count(num_infeasible, 'attempt')}"
    return text + "."
