"""`autoshard validate`: is a plan sound, does it fit, and is it for these tables."""

from __future__ import annotations

from typing import Annotated

import typer

from autoshard.cli.console import say, show_json
from autoshard.cli.options import JsonOption, PlanArgument, load_tables


def validate_command(
    plan: PlanArgument,
    tables: Annotated[
        str | None,
        typer.Argument(
            metavar="TABLES",
            help="The table list that the plan must be for: a file or a workload: name.",
        ),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Check a plan before anything is allocated, and print its memory ledger.

    For example:

      autoshard validate plan.json
      autoshard validate plan.json tables.csv

    Checked are the checksum, ranks, that each table's shards tile it exactly and have the
    shape of its sharding type, that every rank has the memory it needs and, if tables are
    given, that the plan was made for them.
    """
    from autoshard.cli.views import ledger_json, show_ledger, show_ranks
    from autoshard.plan import load_plan
    from autoshard.validate import validate_plan

    loaded = load_plan(plan)
    ledgers = validate_plan(loaded, tables=None if tables is None else load_tables(tables))
    if json_output:
        show_json({"valid": True, "ledger": ledger_json(ledgers)})
        return
    show_ranks(loaded, ledgers, None if loaded.cost is None else loaded.cost.step)
    show_ledger(ledgers)
    where = "" if tables is None else f" and made for {tables}"
    say(f"{plan} is valid{where}")
