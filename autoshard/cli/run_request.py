"""What a run is asked for on the command line; `autoshard run` and torchrun share it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli.options import (
    JsonOption,
    PlanArgument,
    SeedOption,
    integer_option,
    seconds_option,
)
from autoshard.errors import InputError, quoted
from autoshard.number_text import parse_float, parse_integer

if TYPE_CHECKING:
    from autoshard.plan import ShardingPlan
    from autoshard.runtime.results import RunOptions
    from autoshard.training.options import TrainingOptions

DEFAULT_STEPS, DEFAULT_WARMUP = 20, 3
_PANEL = "Training"


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """A run of a plan, on random batches or, with `training`, on data."""

    plan: ShardingPlan
    options: RunOptions
    training: TrainingOptions | None
    json_output: bool


def _training(explanation: str, *names: str, metavar: str | None = None) -> Any:
    return typer.Option(*names, help=explanation, metavar=metavar, rich_help_panel=_PANEL)


def command_for(
    execute: Callable[[RunRequest], None], description: str, *, default_timeout_s: float
) -> Callable[..., None]:
    """The command with the options of a run.

    Args:
        execute: does what is asked for.
        description: the command's help.
        default_timeout_s: of a collective.
    """

    def run_command(
        plan: PlanArgument,
        steps: Annotated[
            int | None,
            integer_option(
                f"Timed steps, {DEFAULT_STEPS} by default; when training, the steps to end at.",
                low=1,
            ),
        ] = None,
        warmup: Annotated[
            int | None,
            integer_option(
                f"Steps before the timed ones, {DEFAULT_WARMUP} by default.",
                "--warmup",
                "--warmup-steps",
                low=0,
            ),
        ] = None,
        seed: SeedOption = 0,
        timeout_s: Annotated[
            float, seconds_option("How long one collective may take.", "--timeout-s", "--timeout")
        ] = default_timeout_s,
        device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
        ids_mode: Annotated[
            str,
            typer.Option(
                help="Ids out of range: fatal stops every rank, warning makes them 0 and counts "
                "them, ignore makes them 0."
            ),
        ] = "fatal",
        pipelined: Annotated[
            bool,
            typer.Option(
                "--pipelined/--plain",
                help="Distribute the next batch while one is trained on; or one after the other, "
                "with every term of a step timed.",
            ),
        ] = False,
        json_output: JsonOption = False,
        data: Annotated[
            str | None,
            _training(
                "Train on movielens-100k, criteo:PATH or clicks (generated, for any plan); "
                "options follow as ?name=value&…",
                metavar="DATA",
            ),
        ] = None,
        model: Annotated[str | None, _training("dlrm (default) or mlp.", metavar="NAME")] = None,
        epochs: Annotated[
            int | None,
            integer_option("Passes over the data, 1 by default.", low=1, panel=_PANEL),
        ] = None,
        eval_every: Annotated[
            int | None,
            integer_option(
                "Steps between evaluations; by default one after each epoch.", low=1, panel=_PANEL
            ),
        ] = None,
        eval_samples: Annotated[
            int | None,
            integer_option("Samples of an evaluation; by default all.", low=1, panel=_PANEL),
        ] = None,
        out_dir: Annotated[
            str | None,
            _training("Where the learning curve goes, as rows and as a picture.", metavar="DIR"),
        ] = None,
        checkpoint: Annotated[
            str | None,
            _training("Where checkpoints go; one is written at the end.", metavar="DIR"),
        ] = None,
        checkpoint_every: Annotated[
            int | None, integer_option("Steps between checkpoints.", low=1, panel=_PANEL)
        ] = None,
        resume: Annotated[
            bool,
            _training(
                "Go on from the newest checkpoint there, whatever plan wrote it; start if "
                "there is none.",
                "--resume",
            ),
        ] = False,
        learning_rate: Annotated[
            str | None,
            _training("Of the tables; by default the plan's.", metavar="NUMBER"),
        ] = None,
        dense_optimizer: Annotated[
            str | None,
            _training("Of the dense layers: adam (default), adagrad or sgd.", metavar="NAME"),
        ] = None,
        dense_learning_rate: Annotated[
            str | None,
            _training(
                "Of the dense layers; by default 0.001 with adam, else 0.01.", metavar="NUMBER"
            ),
        ] = None,
        bottom: Annotated[
            str | None,
            _training("Hidden widths of DLRM's bottom MLP, 64 by default.", metavar="N,N,…"),
        ] = None,
        top: Annotated[
            str | None,
            _training("Hidden widths of the top MLP, 64 by default.", metavar="N,N,…"),
        ] = None,
        interaction_dim: Annotated[
            int | None,
            integer_option(
                "Dimension of DLRM's dot products; by default the one most tables have.",
                low=1,
                panel=_PANEL,
            ),
        ] = None,
    ) -> None:
        from autoshard.plan import load_plan
        from autoshard.runtime.capabilities import parse_device
        from autoshard.runtime.ids import parse_ids_mode
        from autoshard.runtime.results import RunOptions

        given = {
            "model": model,
            "epochs": epochs,
            "eval_every": eval_every,
            "eval_samples": eval_samples,
            "out_dir": out_dir,
            "checkpoint": checkpoint,
            "checkpoint_every": checkpoint_every,
            "resume": resume or None,
            "learning_rate": _number(learning_rate, "--learning-rate"),
            "dense_optimizer": dense_optimizer,
            "dense_learning_rate": _number(dense_learning_rate, "--dense-learning-rate"),
            "bottom": _widths(bottom, "--bottom"),
            "top": _widths(top, "--top"),
            "interaction_dim": interaction_dim,
        }
        given = {name: value for name, value in given.items() if value is not None}
        options = RunOptions(
            num_steps=DEFAULT_STEPS if steps is None else steps,
            warmup_steps=DEFAULT_WARMUP if warmup is None else warmup,
            seed=seed,
            device=parse_device(device),
            timeout_s=timeout_s,
            ids_mode=parse_ids_mode(ids_mode),
            pipelined=pipelined,
        )
        training = _training_options(options, data, steps, warmup, given)
        execute(
            RunRequest(
                plan=load_plan(plan),
                options=options,
                training=training,
                json_output=json_output,
            )
        )

    run_command.__doc__ = description
    return run_command


def _training_options(
    options: RunOptions,
    data: str | None,
    steps: int | None,
    warmup: int | None,
    given: Mapping[str, Any],
) -> TrainingOptions | None:
    """The options of training; None without data to train on."""
    if data is None:
        if given:
            names = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise InputError(
                f"{names}: for training only",
                remedy="say what to train on with --data, such as --data clicks",
            )
        return None
    if warmup is not None:
        raise InputError(
            "--warmup: for timed runs on random batches only", remedy="leave it out to train"
        )
    from autoshard.training.options import TrainingOptions

    return TrainingOptions(run=options, max_steps=steps, data=data, **given)


def _number(text: str | None, option: str) -> float | None:
    try:
        return None if text is None else parse_float(text)
    except ValueError as error:
        raise InputError(f"{option} is not usable", got=quoted(text), allowed="a number") from error


def _widths(text: str | None, option: str) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(parse_integer(part) for part in text.split(","))
    except ValueError as error:
        raise InputError(
            f"{option} is not usable",
            got=quoted(text),
            allowed="whole numbers separated by commas",
        ) from error
