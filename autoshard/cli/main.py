"""The console script `autoshard`: the commands, and how errors become exit codes.

0 success; 2 bad input or an infeasible request, told in one line on stderr; 1 an internal
fault; 130 interrupted; 141 the reader of stdout went away (128 + SIGPIPE, as other tools).
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer

from autoshard.cli import calibrate, convert, diff, doctor, explain, export, plan, run, validate
from autoshard.cli.console import printable
from autoshard.errors import AutoshardError

EXIT_INTERNAL, EXIT_INPUT, EXIT_INTERRUPTED, EXIT_BROKEN_PIPE = 1, 2, 130, 141
TRACEBACK_VARIABLE = "AUTOSHARD_TRACEBACK"
# Usage errors are click's, which typer brings along under a name that differs by version.
_ClickException: type[Exception] = typer.BadParameter.__mro__[2]


def _ending_quietly(command: Callable[..., None]) -> Callable[..., None]:
    """The command, with a lost reader turned into an exit code before typer sees it."""

    @functools.wraps(command)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except BrokenPipeError as error:
            _discard_stdout()
            raise typer.Exit(EXIT_BROKEN_PIPE) from error

    return run


def _discard_stdout() -> None:
    # Python flushes stdout once more at exit; give it something that takes it.
    descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(descriptor, sys.stdout.fileno())
    os.close(descriptor)


app = typer.Typer(
    name="autoshard",
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120},
)
for _command in (
    plan.plan_command,
    validate.validate_command,
    explain.explain_command,
    diff.diff_command,
    export.export_command,
    run.run_command,
    convert.convert_command,
    calibrate.calibrate_command,
    doctor.doctor_command,
):
    app.command(_command.__name__.removesuffix("_command"))(_ending_quietly(_command))


def _show_version(value: bool) -> None:
    if value:
        print(importlib.metadata.version("autoshard"))
        raise typer.Exit


@app.callback()
def _root(
    show_traceback: Annotated[
        bool,
        typer.Option("--traceback", help=f"Show Python tracebacks; also {TRACEBACK_VARIABLE}=1."),
    ] = False,
    version: Annotated[
        bool,
        typer.Option("--version", help="Show the version.", callback=_show_version, is_eager=True),
    ] = False,
) -> None:
    """Learn where embedding tables go, and run them there.

    A first plan, its check, and its run:

      autoshard plan tables.csv --world-size 8 --hbm-gib 16 --out plan.json
      autoshard validate plan.json tables.csv
      autoshard run plan.json --steps 20

    Exit codes: 0 success, 2 bad input or an infeasible request, 1 an internal fault.
    """
    if show_traceback:
        os.environ[TRACEBACK_VARIABLE] = "1"  # for worker processes, too


def main(arguments: Sequence[str] | None = None) -> None:
    """Run one command and exit.

    Args:
        arguments: without the program's name; those of the process by default.
    """
    sys.exit(run_command_line(arguments))


def run_command_line(
    arguments: Sequence[str] | None = None, *, app: typer.Typer = app, name: str = "autoshard"
) -> int:
    """Run one command; returns the exit code.

    Args:
        arguments: without the program's name; those of the process by default.
        app: whose commands; those of `autoshard` by default.
        name: what the program is called in its help.
    """
    try:
        code = app(
            args=None if arguments is None else list(arguments),
            prog_name=name,
            standalone_mode=False,
        )
    except AutoshardError as error:
        _report(str(error))
        return error.exit_code
    except _ClickException as error:  # unknown command or option, missing argument, wrong type
        return _report_usage(error)
    except (KeyboardInterrupt, typer.Abort):
        return EXIT_INTERRUPTED
    except MemoryError:
        _report("not enough memory on this machine")
        return EXIT_INTERNAL
    except Exception as error:
        if _wants_traceback():
            raise
        _report(
            f"internal fault: {type(error).__name__}: {error}; "
            f"remedy: set {TRACEBACK_VARIABLE}=1 to see where, and report it",
            show_cause=False,
        )
        return EXIT_INTERNAL
    return code if isinstance(code, int) else 0


def _wants_traceback() -> bool:
    return os.environ.get(TRACEBACK_VARIABLE, "") not in ("", "0")


def _report(message: str, *, show_cause: bool = True) -> None:
    if show_cause and _wants_traceback():
        traceback.print_exc()
    print(f"error: {printable(' '.join(message.split()))}", file=sys.stderr)


def _report_usage(error: Exception) -> int:
    context = getattr(error, "ctx", None)
    message = error.format_message() if hasattr(error, "format_message") else str(error)
    if type(error).__name__ == "NoArgsIsHelpError":  # the help is the message
        if message:
            print(message, file=sys.stderr)
        return EXIT_INPUT
    path = context.command_path if context is not None else "autoshard"
    _report(f"{message.rstrip('.')}; remedy: see '{path} --help'", show_cause=False)
    return EXIT_INPUT


if __name__ == "__main__":
    main()
