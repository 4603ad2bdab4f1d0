"""What one rank runs under torchrun: the command of `autoshard run`, without its launcher."""

from __future__ import annotations

from collections.abc import Sequence

import typer

from autoshard.cli.main import run_command_line
from autoshard.cli.run_request import RunRequest, command_for
from autoshard.cli.run_views import show_run, show_training
from autoshard.runtime.torchrun import DEFAULT_TIMEOUT_S, torchrun_rank

DESCRIPTION = """Run a plan, or train a model under it, as one of torchrun's processes.

For example on one machine, and on two (the same command on both):

  torchrun --standalone --nproc-per-node 2 -m autoshard.runtime plan.json --steps 20
  torchrun --nnodes 2 --nproc-per-node 4 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \
-m autoshard.runtime plan.json --data criteo:/shared/train.txt --checkpoint /shared/ckpt --resume

Rank 0 prints the result. The plan's world size and ranks per node must be torchrun's. On one
machine, 'autoshard run' does the same without torchrun.
"""


def _run_rank(request: RunRequest) -> None:
    with torchrun_rank(request.plan, request.options) as process:
        if request.training is None:
            from autoshard.runtime.worker import execute_plan

            result = execute_plan(process, request.plan, request.options)
            if process.rank == 0:
                show_run(request, result)
        else:
            from autoshard.runtime.together import each
            from autoshard.training.launch import check_training
            from autoshard.training.worker import train_plan

            plan, training = request.plan, request.training
            each(
                process.patient_collectives(),
                "checking what to train",
                lambda: check_training(plan, training),
            )
            trained = train_plan(process, plan, training)
            if process.rank == 0:
                show_training(request, trained)


app = typer.Typer(
    name="autoshard.runtime",
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
app.command()(command_for(_run_rank, DESCRIPTION, default_timeout_s=DEFAULT_TIMEOUT_S))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run this rank's part; returns the exit code."""
    return run_command_line(arguments, app=app, name="torchrun … -m autoshard.runtime")
