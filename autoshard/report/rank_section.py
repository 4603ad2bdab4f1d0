"""The report's section on how evenly each sharder loads the ranks, and how full they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from autoshard.memory import RankLedger, memory_ledger
from autoshard.objective import CostSource
from autoshard.plan import ShardingPlan
from autoshard.report.data import ReportData
from autoshard.report.figures import rank_costs
from autoshard.report.memory_figure import rank_memory
from autoshard.report.sections import (
    Column,
    HtmlTable,
    Section,
    marks,
    milliseconds,
    missing_section,
    percent,
)
from autoshard.report.summary_section import cost_source, one_problem, plan_command
from autoshard.topology import GIB


def rank_section(data: ReportData) -> Section:
    """How evenly each sharder loads the ranks."""
    plans = {k: p for k, p in one_problem(data.plans).items() if p.cost is not None}
    command = plan_command(data)
    title, anchor = "Cost and memory of each rank", "ranks"
    if not plans:
        return missing_section(anchor, title, "No plans with a cost here yet.", command)
    plans = dict(sorted(plans.items(), key=lambda item: _step_ms(item[1])))
    groups = [
        {k: p for k, p in plans.items() if cost_source(plans, k) is source} for source in CostSource
    ]
    groups = [group for group in groups if group]
    imbalance = {name: _imbalance(plan) for name, plan in plans.items()}
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
    ledgers = {name: memory_ledger(p.problem, p.slices_by_rank()) for name, p in plans.items()}
    pictures = [rank_costs(group, key=f"ranks{i}") for i, group in enumerate(groups)]
    return Section(
        anchor=anchor,
        title=title,
        takeaway=f"{takeaway} {_memory_sentence(ledgers)}",
        command=command,
        pictures=(*pictures, rank_memory(ledgers)),
        tables=(*(_rank_table(group) for group in groups), _memory_table(ledgers)),
    )


def _rank_table(plans: Mapping[str, ShardingPlan]) -> HtmlTable:
    """The terms of plans whose costs come from the same source."""
    rows, source = [], ""
    for name, plan in plans.items():
        assert plan.cost is not None
        step = plan.cost.step
        source = step.source.value
        rows.append(
            (
                name,
                milliseconds(max(step.fwd_compute_ms)),
                milliseconds(max(step.bwd_compute_ms)),
                milliseconds(step.fwd_comms_ms),
                milliseconds(step.bwd_comms_ms),
                f"{_imbalance(plan):.3f}",
                str(int(_compute_R(plan).argmax())),
                marks(extrapolated=step.extrapolated, oversubscribed=step.oversubscribed),
            )
        )
    terms = ("fwd_compute, slowest, ms", "bwd_compute, slowest, ms", "fwd_comms, ms")
    columns = (
        Column(title="sharder", numeric=False),
        *(Column(title=title, source=source) for title in (*terms, "bwd_comms, ms")),
        Column(title="slowest / mean"),
        Column(title="slowest rank"),
        Column(title="remarks", numeric=False),
    )
    return HtmlTable(columns=columns, rows=tuple(rows))


def _memory_sentence(ledgers: Mapping[str, Sequence[RankLedger]]) -> str:
    name, fullest = max(
        ((name, _fullest(ranks)) for name, ranks in ledgers.items()), key=lambda e: _share(e[1])
    )
    return f"No rank is fuller than {percent(_share(fullest))} (rank {fullest.rank} under {name})."


def _memory_table(ledgers: Mapping[str, Sequence[RankLedger]]) -> HtmlTable:
    """Memory by the ledger: counted from the plan, neither predicted nor measured."""
    rows = []
    for name, ranks in ledgers.items():
        fullest = _fullest(ranks)
        mean_bytes = sum(ledger.total_bytes for ledger in ranks) / len(ranks)
        rows.append(
            (
                name,
                str(fullest.rank),
                f"{fullest.total_bytes / GIB:.3f}",
                f"{fullest.hbm_bytes / GIB:.3f}",
                percent(_share(fullest)),
                f"{mean_bytes / GIB:.3f}",
            )
        )
    columns = (
        Column(title="sharder", numeric=False),
        Column(title="fullest rank"),
        Column(title="needs, GiB"),
        Column(title="has, GiB"),
        Column(title="full"),
        Column(title="mean over ranks, GiB"),
    )
    return HtmlTable(
        columns=columns, rows=tuple(rows), caption="Memory, counted by the plan's ledger"
    )


def _fullest(ranks: Sequence[RankLedger]) -> RankLedger:
    return max(ranks, key=_share)


def _share(ledger: RankLedger) -> float:
    """How full a rank is, 1 for full; infinite where something is put on a rank without memory."""
    if ledger.hbm_bytes:
        return ledger.total_bytes / ledger.hbm_bytes
    return float("inf") if ledger.total_bytes else 0.0


def _compute_R(plan: ShardingPlan) -> NDArray[np.float64]:
    """Forward and backward compute of each rank, ms."""
    assert plan.cost is not None
    step = plan.cost.step
    return np.array(step.fwd_compute_ms) + np.array(step.bwd_compute_ms)


def _imbalance(plan: ShardingPlan) -> float:
    """The slowest rank's compute over the mean; 1 where nothing is computed."""
    compute_R = _compute_R(plan)
    mean = float(compute_R.mean())
    return float(compute_R.max()) / mean if mean > 0 else 1.0


def _step_ms(plan: ShardingPlan) -> float:
    assert plan.cost is not None
    return plan.cost.step.step_ms
