"""`autoshard diff`: what changes from one plan to another, and how many bytes move."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from autoshard.cli.console import say, show_json, show_table
from autoshard.cli.options import JsonOption, load_model

if TYPE_CHECKING:
    from autoshard.objective import StepCost
    from autoshard.plan import ShardingPlan
    from autoshard.plan_diff import PlanDiff

MAX_MOVES = 20


def diff_command(
    first: Annotated[str, typer.Argument(metavar="A.JSON", help="The plan that is in use.")],
    second: Annotated[str, typer.Argument(metavar="B.JSON", help="The plan to go to.")],
    cost_model: Annotated[
        str | None,
        typer.Option(
            metavar="NAME|PATH",
            help="Cost both plans with this model. Without it, the plans' own costs are "
            "compared if one model predicted both.",
        ),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """List the tables that move from one plan to another, and the bytes that move.

    For example:

      autoshard diff running.json new.json
      autoshard diff a.json b.json --cost-model analytic --json

    Bytes are weights that a rank needs and does not hold yet, without optimizer state.
    Equal plans exit with 0, as different ones do; --json says whether they differ.
    """
    from autoshard.plan import load_plan
    from autoshard.plan_diff import diff_plans
    from autoshard.validate import validate_plan

    before, after = load_plan(first), load_plan(second)
    for plan in (before, after):
        validate_plan(plan)
    difference = diff_plans(before, after)
    costs = _costs(before, after, cost_model)
    if json_output:
        value = {"equal": difference.is_empty, **difference.to_json()}
        value["costs"] = None if costs is None else [cost.to_json() for cost in costs]
        show_json(value)
        return
    _show(difference)
    if costs is None:
        say("Costs are not compared: give --cost-model to predict both with one model")
    else:
        from autoshard.cli.views import show_terms

        show_terms((first, costs[0]), (second, costs[1]))
        change = costs[1].step_ms - costs[0].step_ms
        doubt = (
            "; extrapolated beyond the measurements, so no gain is claimed"
            if any(cost.extrapolated for cost in costs)
            else ""
        )
        say(f"Step: {change:+.3f} ms{doubt}")


def _costs(
    before: ShardingPlan, after: ShardingPlan, cost_model: str | None
) -> tuple[StepCost, StepCost] | None:
    """The costs of both plans from one source, or None if there is none."""
    if cost_model is not None:
        from autoshard.costing import predict_plan

        model = load_model(cost_model)
        return predict_plan(before, model), predict_plan(after, model)
    models = [plan.provenance.get("cost_model") for plan in (before, after)]
    if before.cost is None or after.cost is None or models[0] is None or models[0] != models[1]:
        return None
    if before.cost.step.source is not after.cost.step.source:
        return None
    return before.cost.step, after.cost.step


def _show(difference: PlanDiff) -> None:
    from autoshard.cli.views import gib
    from autoshard.validate import listed

    if difference.is_empty:
        say(f"The plans place all {difference.unmoved} tables alike")
        return
    if difference.moved:
        shown = difference.moved[:MAX_MOVES]
        rows = [
            [
                move.name,
                _placement(move.from_type, move.from_ranks),
                _placement(move.to_type, move.to_ranks),
                gib(move.moved_bytes),
            ]
            for move in shown
        ]
        show_table(
            "Tables that move",
            [("table", False), ("from", False), ("to", False), ("weights moved", True)],
            rows,
            caption=f"The {len(shown)} largest of {len(difference.moved)}; --json lists all."
            if len(shown) < len(difference.moved)
            else None,
        )
    for names, what in (
        (difference.removed, "only in the first plan"),
        (difference.added, "only in the second plan"),
        (difference.changed, "of another shape or data type, so nothing carries over"),
    ):
        if names:
            say(f"{len(names)} tables {what}: {listed(names)}")
    for name, (before, after) in difference.settings.items():
        say(f"{name}: {_short(before)} -> {_short(after)}")
    say(
        f"{len(difference.moved)} tables move, {difference.unmoved} stay; "
        f"{gib(difference.moved_bytes)} of weights change place"
    )


def _placement(kind: str, ranks: tuple[int, ...]) -> str:
    from autoshard.validate import listed

    return f"{kind}: {listed(ranks, 6)}"


def _short(value: object) -> str:
    from autoshard.validate import listed

    if isinstance(value, list):
        return str(value[0]) if len(set(value)) == 1 else listed(value, 4)
    return str(value)
