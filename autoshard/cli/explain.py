"""`autoshard explain`: why a plan costs what it costs, and what another would save."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli.console import say, show_json, show_table, waiting
from autoshard.cli.options import (
    DEFAULT_POLICY,
    CostModelOption,
    EvaluationsOption,
    JsonOption,
    PlanArgument,
    PolicyOption,
    SeedOption,
    SharderOption,
    TimeLimitOption,
    check_policy,
    check_sharder,
    load_model,
)

if TYPE_CHECKING:
    from autoshard.explain import PlanExplanation, TableExplanation
    from autoshard.objective import StepCost
    from autoshard.plan import ShardingPlan

#: More tables than this are summarised: the costliest are shown.
MAX_TABLES = 20
#: More shards of a table than this are not listed one by one.
_MAX_SHARDS = 4


def explain_command(
    plan: PlanArgument,
    cost_model: CostModelOption = "default",
    against: Annotated[
        str | None,
        typer.Option(metavar="OTHER.JSON", help="Compare with another plan of these tables."),
    ] = None,
    replan: Annotated[
        bool, typer.Option("--replan", help="Compare with a new plan for the same problem.")
    ] = False,
    sharder: SharderOption = "autoshard",
    policy: PolicyOption = DEFAULT_POLICY,
    seed: SeedOption = 0,
    time_limit: TimeLimitOption = None,
    evaluations: EvaluationsOption = 100_000,
    json_output: JsonOption = False,
) -> None:
    """Say what a plan costs, table by table and rank by rank, and what holds it up.

    For example:

      autoshard explain plan.json
      autoshard explain by_hand.json --replan
      autoshard explain plan.json --against other.json --json

    Every figure is predicted anew, so plans written by hand need no cost of their own.
    """
    if against is not None and replan:
        raise typer.BadParameter("--against and --replan exclude each other")
    from autoshard.explain import explain_plan
    from autoshard.plan import load_plan

    if replan:
        check_sharder(sharder)
        check_policy(policy)
    loaded = load_plan(plan)
    other = None if against is None else load_plan(against)
    model = load_model(cost_model)
    explanation = explain_plan(loaded, model)
    name = against or f"new plan by {sharder}"
    if replan:
        from autoshard.planning import make_plan
        from autoshard.protocols import SearchBudget

        with waiting(f"planning {len(loaded.tables)} tables with {sharder}"):
            other = make_plan(
                loaded.problem,
                sharder=sharder,
                cost_model=model,
                seed=seed,
                budget=SearchBudget(num_evaluations=evaluations, time_limit_s=time_limit),
                policy=policy,
            )
    other_cost = None
    if other is not None:
        _check_comparable(loaded, other)
        other_cost = explain_plan(other, model).cost
    if json_output:
        value: dict[str, Any] = explanation.to_json()
        if other_cost is not None:
            value["other"] = {"name": name, "cost": other_cost.to_json()}
        show_json(value)
        return
    _show(loaded, explanation, name, other_cost)


def _check_comparable(plan: ShardingPlan, other: ShardingPlan) -> None:
    from autoshard.errors import PlanError
    from autoshard.validate import check_made_for

    try:
        check_made_for(other, [entry.table for entry in plan.tables])
    except PlanError as error:
        raise PlanError(
            "the two plans are for different tables", got=error.got, remedy="see 'autoshard diff'"
        ) from error
    for what, first, second in (
        ("topologies", plan.topology, other.topology),
        ("workloads", plan.training, other.training),
    ):
        if first != second:
            raise PlanError(
                f"the two plans are for different {what}", remedy="see 'autoshard diff'"
            )


def _show(
    plan: ShardingPlan,
    explanation: PlanExplanation,
    other_name: str,
    other: StepCost | None,
) -> None:
    from autoshard.cli.views import say_how_good, show_ranks, show_terms, source_label
    from autoshard.plan import PlanCost

    cost = explanation.cost
    _show_tables(explanation.tables, source_label(cost))
    show_ranks(plan, explanation.ledgers, cost)
    show_terms(("this plan", cost), *([] if other is None else [(other_name, other)]))
    for sentence in explanation.sentences():
        say(sentence)
    say_how_good(PlanCost(step=cost, lower_bound_ms=explanation.lower_bound_ms))
    if other is not None:
        say(_comparison(cost, other, other_name))


def _show_tables(tables: tuple[TableExplanation, ...], label: str) -> None:
    from autoshard.cli.views import gib

    costliest = sorted(tables, key=lambda t: -(t.fwd_alone_ms + t.bwd_alone_ms))
    shown = costliest[:MAX_TABLES]
    caption = "Alone: what the table's shards would cost without the others on their ranks."
    if len(tables) > len(shown):
        caption += f" The {len(shown)} costliest of {len(tables)} tables; --json lists all."
    rows = [
        [
            table.name,
            table.sharding_type,
            _ranks(table.ranks),
            _sizes(table.shard_sizes),
            gib(table.memory_bytes),
            f"{table.fwd_alone_ms:.3f}",
            f"{table.bwd_alone_ms:.3f}",
        ]
        for table in shown
    ]
    columns = [
        ("table", False),
        ("sharding type", False),
        ("ranks", False),
        ("rows × columns", False),
        ("memory", True),
        ("fwd alone ms", True),
        ("bwd alone ms", True),
    ]
    show_table(f"Tables (times {label})", columns, rows, caption=caption)


def _ranks(ranks: tuple[int, ...]) -> str:
    if len(ranks) > 1 and ranks == tuple(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    shown = ", ".join(map(str, ranks[:_MAX_SHARDS]))
    return shown if len(ranks) <= _MAX_SHARDS else f"{shown}, … ({len(ranks)})"


def _sizes(sizes: tuple[tuple[int, int], ...]) -> str:
    if len(set(sizes)) == 1:
        rows, cols = sizes[0]
        return f"{rows} × {cols}" + (f" ({len(sizes)} times)" if len(sizes) > 1 else "")
    shown = ", ".join(f"{rows} × {cols}" for rows, cols in sizes[:_MAX_SHARDS])
    return shown if len(sizes) <= _MAX_SHARDS else f"{shown}, … ({len(sizes)})"


def _comparison(cost: StepCost, other: StepCost, other_name: str) -> str:
    both = f"{other_name}: {other.step_ms:.3f} ms a step instead of {cost.step_ms:.3f} ms"
    if cost.extrapolated or other.extrapolated:
        return f"{both}; extrapolated beyond the measurements, so no saving is claimed"
    saved = cost.step_ms - other.step_ms
    share = abs(saved) / cost.step_ms if cost.step_ms else 0.0
    verb = "saves" if saved >= 0 else "costs"
    more = "" if saved >= 0 else " more"
    return f"{both}: predicted to {verb[:-1]} {abs(saved):.3f} ms{more} ({share:.1%})"
