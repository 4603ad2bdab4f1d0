"""`autoshard export`: a plan in somebody else's format."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from autoshard.cli.console import note
from autoshard.cli.options import PlanArgument, check_output


def export_command(
    plan: PlanArgument,
    format_name: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAME",
            help="json: the canonical plan; csv: one row per shard. A wrong name lists all.",
        ),
    ] = "json",
    out: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Where it goes, in a folder that exists; stdout without it."
        ),
    ] = None,
) -> None:
    """Write a plan in another format, once it is validated.

    For example:

      autoshard export plan.json --format csv --out shards.csv
      autoshard export by_hand.json --format json --out plan.json
    """
    check_output(out, plan)
    from autoshard.exporters.registry import make_exporter
    from autoshard.files import write_text
    from autoshard.plan import load_plan
    from autoshard.validate import validate_plan

    exporter = make_exporter(format_name)
    loaded = load_plan(plan)
    validate_plan(loaded)
    text = exporter.export(loaded)
    if out is None:
        sys.stdout.write(text)
        return
    write_text(out, text)
    note(f"wrote {out}")
