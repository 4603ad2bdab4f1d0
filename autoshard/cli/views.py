"""Tables that several commands print: terms, ranks, the memory ledger."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from autoshard.cli.console import say, show_table
from autoshard.memory import LEDGER_LINES, RankLedger
from autoshard.objective import StepCost
from autoshard.plan import PlanCost, ShardingPlan

GIB = 2**30
#: More ranks than this are summarised.
MAX_RANKS = 16
#: Wider ledgers show smallest, mean and largest instead of every rank.
MAX_LEDGER_COLUMNS = 8

TERMS: tuple[tuple[str, Callable[[StepCost], float]], ...] = (
    ("fwd_compute (slowest rank)", lambda cost: max(cost.fwd_compute_ms)),
    ("fwd_comms", lambda cost: cost.fwd_comms_ms),
    ("bwd_comms", lambda cost: cost.bwd_comms_ms),
    ("bwd_compute (slowest rank)", lambda cost: max(cost.bwd_compute_ms)),
    ("step", lambda cost: cost.step_ms),
)


def source_label(cost: StepCost) -> str:
    """Where a cost comes from, such as `predicted, extrapolated`."""
    marks = [cost.source.value]
    if cost.extrapolated:
        marks.append("extrapolated")
    if cost.oversubscribed:
        marks.append("oversubscribed")
    return ", ".join(marks)


def gib(num_bytes: float) -> str:
    """Bytes as GiB, or as MiB where GiB would show as 0."""
    if 0 < abs(num_bytes) < 0.0095 * GIB:
        return f"{num_bytes / 2**20:.3f} MiB"
    return f"{num_bytes / GIB:.3f} GiB"


def show_terms(*columns: tuple[str, StepCost]) -> None:
    """Print the four terms and their sum, one column per cost."""
    headings = [("term, ms", False)]
    headings += [(f"{name} ({source_label(cost)})", True) for name, cost in columns]
    rows = [[name, *(f"{term(cost):.3f}" for _, cost in columns)] for name, term in TERMS]
    show_table("Training step", headings, rows, last_row_is_total=True)


def gap_to_bound(step_ms: float, bound_ms: float | None) -> float | None:
    """How far a step is above its lower bound, 0.05 for 5%; None without a bound."""
    return step_ms / bound_ms - 1 if bound_ms else None


def say_how_good(cost: PlanCost) -> None:
    """Print the total beside its lower bound and the best plan known."""
    step = cost.step
    say(f"Step: {step.step_ms:.3f} ms ({source_label(step)})")
    gap = gap_to_bound(step.step_ms, cost.lower_bound_ms)
    if gap is None:
        say("Lower bound: none is known under this cost model")
    else:
        say(
            f"Lower bound for these shards under the same cost model: "
            f"{cost.lower_bound_ms:.3f} ms; this plan is {gap:.1%} above it"
        )
    if cost.is_best_known:
        say("Best plan known: this one; no other search has found a better plan")
    elif cost.best_known_ms:
        above = step.step_ms / cost.best_known_ms - 1
        say(f"Best plan known: {cost.best_known_ms:.3f} ms; this plan is {above:.2%} above it")
    if step.extrapolated:
        say(
            "Extrapolated: something here lies outside the measurements behind the cost model, "
            "so no gain is claimed"
        )


def show_ranks(plan: ShardingPlan, ledgers: Sequence[RankLedger], cost: StepCost | None) -> None:
    """Print a line per rank: shards, memory, and predicted times if there is a cost.

    Beyond `MAX_RANKS`, only the ranks that decide something: the slowest, then the fullest.
    """
    counts = [len(held) for held in plan.slices_by_rank()]
    shown = list(range(len(ledgers)))
    caption = None
    if len(shown) > MAX_RANKS:
        shown = sorted(_ranks_of_interest(ledgers, cost))
        caption = f"{len(shown)} slowest and fullest of {len(ledgers)} ranks; --json lists all"
    columns = [("rank", True), ("shards", True), ("memory", True), ("of", True), ("full", True)]
    title = "Ranks"
    if cost is not None:
        columns += [("fwd_compute ms", True), ("bwd_compute ms", True)]
        title = f"Ranks (times {source_label(cost)})"
    rows = []
    for rank in shown:
        ledger = ledgers[rank]
        row = [
            str(rank),
            str(counts[rank]),
            gib(ledger.total_bytes),
            gib(ledger.hbm_bytes),
            f"{ledger.total_bytes / ledger.hbm_bytes:.1%}" if ledger.hbm_bytes else "-",
        ]
        if cost is not None:
            row += [f"{cost.fwd_compute_ms[rank]:.3f}", f"{cost.bwd_compute_ms[rank]:.3f}"]
        rows.append(row)
    show_table(title, columns, rows, caption=caption)


def _ranks_of_interest(ledgers: Sequence[RankLedger], cost: StepCost | None) -> list[int]:
    ranks = range(len(ledgers))
    by_memory = sorted(ranks, key=lambda rank: ledgers[rank].free_bytes)
    if cost is None:
        return by_memory[:MAX_RANKS]
    by_time = sorted(ranks, key=lambda r: -(cost.fwd_compute_ms[r] + cost.bwd_compute_ms[r]))
    chosen = by_time[: MAX_RANKS - 4]
    return chosen + [rank for rank in by_memory if rank not in chosen][:4]


def show_ledger(ledgers: Sequence[RankLedger]) -> None:
    """Print the memory ledger: a column per rank, or smallest, mean and largest of many."""
    names = [name for name in LEDGER_LINES if any(lg.lines_bytes[name] for lg in ledgers)]
    lines = [(name, [ledger.lines_bytes[name] for ledger in ledgers]) for name in names]
    lines.append(("total", [ledger.total_bytes for ledger in ledgers]))
    lines.append(("free", [ledger.free_bytes for ledger in ledgers]))
    if len(ledgers) <= MAX_LEDGER_COLUMNS:
        headings = [f"rank {ledger.rank}" for ledger in ledgers]
        rows = [[name, *map(_mib, values)] for name, values in lines]
    else:
        headings = ["smallest", "mean", "largest"]
        rows = [
            [name, _mib(min(values)), _mib(sum(values) / len(values)), _mib(max(values))]
            for name, values in lines
        ]
    columns = [("MiB", False), *((heading, True) for heading in headings)]
    show_table("Memory ledger", columns, rows)


def _mib(num_bytes: float) -> str:
    return f"{num_bytes / 2**20:,.2f}"


def ledger_json(ledgers: Sequence[RankLedger]) -> list[dict[str, Any]]:
    """The ledger as plain dictionaries, in bytes."""
    return [
        {
            "rank": ledger.rank,
            "lines_bytes": dict(ledger.lines_bytes),
            "total_bytes": ledger.total_bytes,
            "hbm_bytes": ledger.hbm_bytes,
            "free_bytes": ledger.free_bytes,
        }
        for ledger in ledgers
    ]


def cost_json(cost: PlanCost) -> dict[str, Any]:
    """A plan's cost with its gap to the bound, and whether the best known is the plan itself."""
    return {
        **cost.to_json(),
        "gap_to_bound": gap_to_bound(cost.step.step_ms, cost.lower_bound_ms),
        "is_best_known": cost.is_best_known,
    }
