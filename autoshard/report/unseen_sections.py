"""The report's section about problems of tables that training never saw."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pandas as pd

from autoshard.report.data import ReportData
from autoshard.report.figures import ratio_strips
from autoshard.report.sections import (
    MISSING,
    Column,
    HtmlTable,
    Section,
    count,
    interval,
    missing_section,
    module_command,
    percent,
    ratio,
)
from autoshard.report.statistics import Estimate, geometric_mean_ratio, mean_and_std
from autoshard.report.svg import Picture

BASELINE = "cost_greedy"


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One sharder over all held-out problems, under costs of one source."""

    sharder: str
    num_seeds: int
    num_problems: int
    """Problems it was given (over all training seeds together)."""
    num_infeasible: int
    num_extrapolated: int
    """Of its own plans."""
    ratio_extrapolated: bool
    """Whether the ratio to the baseline rests on an extrapolated cost, of either side."""
    to_baseline: Estimate | None
    """Paired by problem; training seeds are averaged first. None with fewer than two pairs."""
    seed_std: float | None
    """Standard deviation over training seeds of the ratio to the baseline; None for one seed."""
    above_bound: float | None
    """Geometric mean of objective / lower bound, less 1."""
    above_best: float | None
    planning_time_s: float
    """Median."""


def contenders(frame: pd.DataFrame, baseline: str = BASELINE) -> list[Contender]:
    """Compare sharders over held-out problems, best first.

    Ratios are taken problem by problem, over those that both the sharder and the baseline
    solve. With several training seeds, a problem's log ratio is the mean over its seeds, so
    the interval is over problems; the spread over seeds stands beside it.

    Args:
        frame: evaluation rows of one cost source.
        baseline: the sharder that is divided by.
    """
    base = (
        _solved(frame[frame["sharder"] == baseline])
        .groupby("task")[["objective_ms", "extrapolated"]]
        .first()
        .rename(columns={"objective_ms": "base_ms", "extrapolated": "base_extrapolated"})
    )
    found = []
    for sharder, group in frame.groupby("sharder", sort=False):
        solved = _solved(group)
        paired = solved.join(base, on="task").dropna(subset=["base_ms"])
        logs = (paired["objective_ms"] / paired["base_ms"]).map(np.log)
        by_task = np.exp(logs.groupby(paired["task"]).mean())
        by_seed = np.exp(logs.groupby(paired["training_seed"]).mean())
        found.append(
            Contender(
                sharder=str(sharder),
                num_seeds=group["training_seed"].nunique(),
                num_problems=len(group),
                num_infeasible=len(group) - len(solved),
                num_extrapolated=int((solved["extrapolated"].fillna(0) > 0).sum()),
                ratio_extrapolated=bool(
                    (paired[["extrapolated", "base_extrapolated"]].fillna(0) > 0).any(axis=None)
                ),
                to_baseline=(
                    geometric_mean_ratio(by_task, np.ones(len(by_task)))
                    if len(by_task) > 1
                    else None
                ),
                seed_std=mean_and_std(by_seed)[1] if len(by_seed) > 1 else None,
                above_bound=_gap(solved, "lower_bound_ms"),
                above_best=_gap(solved, "best_known_ms"),
                planning_time_s=float(group["planning_time_s"].median()),
            )
        )
    return sorted(found, key=lambda c: (c.above_best is None, c.above_best or 0.0))


def _solved(frame: pd.DataFrame) -> pd.DataFrame:
    return frame[
        ~(frame["infeasible"].fillna(0) > 0)
        & np.isfinite(frame["objective_ms"])
        & (frame["objective_ms"] > 0)
    ]


def _ratios(solved: pd.DataFrame, reference: str) -> pd.Series:
    known = solved[np.isfinite(solved[reference]) & (solved[reference] > 0)]
    ratios: pd.Series = known["objective_ms"] / known[reference]
    return ratios


def _gap(solved: pd.DataFrame, reference: str) -> float | None:
    ratios = _ratios(solved, reference)
    return float(np.exp(np.log(ratios).mean()) - 1) if len(ratios) else None


def evaluation_section(data: ReportData) -> Section:
    """All sharders on problems of unseen tables."""
    anchor, title = "evaluation", "Problems of unseen tables"
    folder = data.folder
    command = module_command(
        "experiments.evaluate",
        *data.option("cost_model"),
        *data.option("policy", "policies={{0: {}}}"),
        f"out={folder}/evaluation",
    )
    if data.evaluation is None:
        return missing_section(anchor, title, "No evaluation here yet.", command)
    pictures: list[Picture] = []
    tables, said = [], []
    sources = sorted(data.evaluation["source"].unique())
    for number, source in enumerate(sources):
        frame = data.evaluation[data.evaluation["source"] == source]
        found = contenders(frame)
        num_tasks = frame["task"].nunique()
        said.append(_evaluation_takeaway(found, num_tasks, source))
        tables.append(_contender_table(found, num_tasks, source))
        for column, words in (("best_known_ms", "best known"), ("lower_bound_ms", "lower bound")):
            ratios = {
                c.sharder: _ratios(_solved(frame[frame["sharder"] == c.sharder]), column).tolist()
                for c in found
            }
            if any(ratios.values()):
                key = f"{column.removesuffix('_ms').replace('_', '-')}-{number}"
                pictures.append(ratio_strips(ratios, reference=words, key=key, source=source))
    return Section(
        anchor=anchor,
        title=title,
        takeaway=" ".join(said),
        command=command,
        pictures=tuple(pictures),
        tables=tuple(tables),
        notes=(
            f"Ratios are geometric means over the problems that both the sharder and {BASELINE} "
            "solve, with 95% intervals over problems (Student's t on logarithms). Best known: "
            "the best of all sharders here, problem by problem.",
        ),
    )


def _evaluation_takeaway(found: list[Contender], num_tasks: int, source: str) -> str:
    over = f"Over {count(num_tasks, 'problem')} ({source} costs), "
    solving = [c for c in found if c.above_best is not None]
    if not solving:
        return f"{over}no sharder finds a plan."
    # A gap counts only the problems that are solved, so solving few must not win.
    most = max(_share_solved(c) for c in solving)
    best = next(c for c in solving if _share_solved(c) == most)
    text = f"{over}{best.sharder} comes closest to the best known plans"
    if best is not solving[0]:
        text = f"{over}{best.sharder} comes closest of those that solve most problems"
    text += (
        f" ({percent(best.above_best, 2)} above{', extrapolated' * bool(best.num_extrapolated)})"
    )
    for c in solving[: solving.index(best)]:
        text += (
            f"; {c.sharder} is closer ({percent(c.above_best, 2)}), but only on the "
            f"{c.num_problems - c.num_infeasible} of {c.num_problems} that it solves"
        )
    policy = next((c for c in found if c.sharder == "ppo"), None)
    subject = policy if policy is not None else best
    if subject.to_baseline is not None and subject.sharder != BASELINE:
        estimate = subject.to_baseline
        text += (
            f"; {subject.sharder} takes {ratio(estimate.value)} times the step time of "
            f"{BASELINE} on the {count(estimate.num, 'problem')} that both solve, "
            f"95% interval {interval(estimate, 4)}, {_verdict(subject)}"
        )
    failing = [f"{c.sharder} {c.num_infeasible}" for c in found if c.num_infeasible]
    text += f"; without a plan: {', '.join(failing)}" if failing else "; all found a plan each time"
    return text + "."


def _share_solved(contender: Contender) -> float:
    return 1 - contender.num_infeasible / contender.num_problems


def _verdict(contender: Contender) -> str:
    estimate = contender.to_baseline
    assert estimate is not None
    if contender.ratio_extrapolated:
        return "with extrapolated costs, so no gain is claimed"
    if estimate.high < 1:
        return "which is better"
    return "which is worse" if estimate.low > 1 else "which shows no difference"


def _contender_table(found: list[Contender], num_tasks: int, source: str) -> HtmlTable:
    rows = []
    for c in found:
        estimate = c.to_baseline
        rows.append(
            (
                c.sharder,
                MISSING if estimate is None else ratio(estimate.value),
                interval(estimate, 4),
                MISSING if c.seed_std is None else f"±{c.seed_std:.4f} ({c.num_seeds})",
                percent(c.above_best, 2),
                percent(c.above_bound),
                f"{c.num_infeasible} of {c.num_problems}",
                ratio(c.planning_time_s, 3),
                f"extrapolated ({c.num_extrapolated})" if c.num_extrapolated else "",
            )
        )
    columns = (
        Column(title="sharder", numeric=False),
        Column(title=f"ratio to {BASELINE}", source=source),
        Column(title="95% interval"),
        Column(title="over training seeds"),
        Column(title="above best known", source=source),
        Column(title="above lower bound", source=source),
        Column(title="infeasible"),
        Column(title="planning time, s"),
        Column(title="remarks", numeric=False),
    )
    return HtmlTable(
        columns=columns,
        rows=tuple(rows),
        caption=f"{count(num_tasks, 'problem')}, {source} costs; smallest gap to the best "
        "known first, each over the problems that the sharder solves",
    )
