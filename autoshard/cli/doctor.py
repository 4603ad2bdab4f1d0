"""`autoshard doctor`: what works here, what does not, and what to do about it."""

from __future__ import annotations

from typing import Annotated

import typer

from autoshard.cli.console import say, show_json, show_table, waiting
from autoshard.cli.options import JsonOption, seconds_option


def doctor_command(
    timeout_s: Annotated[float, seconds_option("Limit of each check that may hang.")] = 120.0,
    json_output: JsonOption = False,
) -> None:
    """Check this installation: versions, FBGEMM, gloo, CUDA, shipped models, a tiny plan.

    For example:

      autoshard doctor
      autoshard doctor --json

    Exits with 0 if planning works, whatever else does not, and with 1 if it does not.
    """
    from autoshard.doctor import Status, can_plan, diagnose

    with waiting("checking"):
        findings = diagnose(timeout_s=timeout_s)
    works = can_plan(findings)
    if json_output:
        show_json({"can_plan": works, "findings": [finding.to_json() for finding in findings]})
    else:
        rows = [[f.name, f.status.value, f.detail] for f in findings]
        show_table("autoshard doctor", [("check", False), ("", False), ("found", False)], rows)
        problems = [finding for finding in findings if finding.status is Status.PROBLEM]
        for finding in problems:
            say(f"{finding.name}: {finding.detail}")
            say(f"  remedy: {finding.remedy}")
        say("Planning works" if works else "Planning does not work")
    if not works:
        raise typer.Exit(1)
