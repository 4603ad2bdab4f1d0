"""Options that several commands share, and how their text becomes values."""

from __future__ import annotations

import inspect
import os
from collections.abc import Callable
from decimal import Decimal
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.errors import InputError, quoted
from autoshard.files import check_folder_of, check_replaceable
from autoshard.number_text import parse_decimal, parse_float, parse_integer
from autoshard.query_text import parse_query

if TYPE_CHECKING:
    from autoshard.protocols import CostModel
    from autoshard.tables import Table

#: In place of a file: `workload:NAME?option=value&option=value`.
WORKLOAD_PREFIX = "workload:"
#: Files of facebookresearch/dlrm_datasets; their tables are measured.
DATASET_SUFFIXES = (".pt", ".pt.gz")
_GIB = 2**30
#: 1 EiB; beyond it, sums over ranks would leave int64.
MAX_GIB = 2**30

PlanArgument = Annotated[
    str, typer.Argument(metavar="PLAN.JSON", help="A plan, made or written by hand.")
]
TablesArgument = Annotated[
    str,
    typer.Argument(
        metavar="TABLES",
        help="A table list (.csv, .json or .parquet), or workload:NAME?option=value&…",
    ),
]


def integer_option(
    explanation: str, *names: str, low: int, high: int | None = None, panel: str | None = None
) -> Any:
    """A `typer.Option` for a whole number from `low` to `high`, both included.

    Unlike typer's own, the same text is refused whatever version of typer is installed.

    Args:
        explanation: the help.
        names: such as `--steps`; by default the parameter's own.
        low: the smallest number.
        high: the largest number; None for no limit.
        panel: of the help, in which the option stands.
    """
    allowed = f"a whole number >= {low}" + ("" if high is None else f" and <= {high}")

    def parse(text: str | int) -> int:
        try:
            value = parse_integer(text) if isinstance(text, str) else text  # else the default
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise typer.BadParameter(f"{quoted(text)} is not {allowed}")
        return value

    return typer.Option(
        *names,
        parser=parse,
        metavar=f"INTEGER>={low}",
        help=explanation,
        rich_help_panel=panel,
    )


#: Longer waits than a month are mistakes, and overflow the system's clocks.
MAX_SECONDS = 30 * 24 * 3600.0


def seconds_option(explanation: str, *names: str) -> Any:
    """A `typer.Option` for a time limit in seconds, more than 0 and at most `MAX_SECONDS`."""

    def parse(text: str | float) -> float:
        try:
            value = parse_float(text) if isinstance(text, str) else text  # else the default
        except ValueError:
            value = 0.0
        if not 0 < value <= MAX_SECONDS:
            raise typer.BadParameter(
                f"{quoted(text)} is not a number of seconds, > 0 and at most {MAX_SECONDS:g}"
            )
        return value

    return typer.Option(*names, parser=parse, metavar="SECONDS", help=explanation)


SharderOption = Annotated[str, typer.Option(metavar="NAME", help="What searches for the plan.")]
CostModelOption = Annotated[
    str,
    typer.Option(
        metavar="NAME|PATH",
        help="What predicts costs: an exported model's folder, the name of a shipped one, "
        "'analytic', a model without measurements behind it, or 'simulated:a100-80gb' (or "
        "h100-80gb), a GPU by its datasheet.",
    ),
]
PolicyOption = Annotated[
    str,
    typer.Option(
        metavar="NAME|PATH",
        help="The learned policy of the sharders 'autoshard' and 'ppo': shipped or exported.",
    ),
]
DEFAULT_POLICY = "default"
#: torch's generators take seeds up to here.
MAX_SEED = 2**63 - 1
SeedOption = Annotated[int, integer_option("Decides every random choice.", low=0, high=MAX_SEED)]
TimeLimitOption = Annotated[
    float | None,
    seconds_option("Cut the search short after this long. A plan that was cut short says so."),
]
EvaluationsOption = Annotated[
    int, integer_option("Placements that the search may cost, at most.", low=1)
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print machine-readable output on stdout.")
]


def parse_gib(text: str, option: str) -> int:
    """Bytes in a number of GiB, exactly, rounded down.

    Raises:
        InputError: not a number in [0, MAX_GIB].
    """
    try:
        value = parse_decimal(text)
    except ValueError:
        value = Decimal(-1)
    if not 0 <= value <= MAX_GIB:
        raise InputError(
            f"{option} is not usable",
            got=quoted(text),
            allowed=f"numbers of GiB, up to {MAX_GIB}",
        )
    return int(value * _GIB)


def parse_hbm_gib(text: str, world_size: int) -> tuple[int, ...]:
    """Each rank's memory in bytes from one value, or one per rank separated by commas.

    Raises:
        InputError: a value is not a number > 0, or their count is neither 1 nor `world_size`.
    """
    values = tuple(parse_gib(part, "--hbm-gib") for part in text.split(","))
    if min(values) == 0:
        raise InputError("a rank without memory", got=f"--hbm-gib {text}", allowed="more than 0")
    if len(values) == 1:
        return values * world_size
    if len(values) != world_size:
        raise InputError(
            "--hbm-gib does not name every rank",
            got=f"{len(values)} values for {world_size} ranks",
            allowed=f"one value, or {world_size} separated by commas",
        )
    return values


def check_output(path: str | Path | None, *inputs: str | Path | None) -> None:
    """Refuse an output path that cannot be written, before time is spent on what goes there.

    Args:
        path: where the output goes; None for nowhere.
        inputs: files that the command reads, which it must not overwrite.

    Raises:
        InputError: the path is a folder, a device or one of the inputs, or lies in a folder
            that does not exist or is not writable.
    """
    if path is None:
        return
    if not str(path):
        raise InputError("the output path is empty", allowed="a file name")
    path = Path(path)
    try:
        check_replaceable(path)
        for given in inputs:
            if given is not None and Path(given).exists() and path.exists():
                _refuse_same_file(path, given)
        check_folder_of(path)
    except OSError as error:
        raise InputError(f"cannot write {str(path)[:200]}", got=error.strerror) from error
    if not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(
            f"cannot write {path}",
            got=f"no permission to write in {path.parent}",
            remedy="choose a writable folder",
        )


def _refuse_same_file(path: Path, given: str | Path) -> None:
    if path.samefile(given):
        raise InputError(f"the output {path} is the input", remedy="choose another output file")


def load_tables(source: str) -> tuple[Table, ...]:
    """The tables of a file, or of a workload by name.

    Raises:
        InputError: the file or the workload is not usable.
    """
    if source.startswith(WORKLOAD_PREFIX):
        return _make_workload(source)
    if source.lower().endswith(DATASET_SUFFIXES):
        from autoshard.workloads.registry import make_workload

        return make_workload("dlrm_dataset", path=source)
    from autoshard.table_io import read_tables

    return read_tables(source)


def _integers(text: str) -> tuple[int, ...]:
    return tuple(parse_integer(part) for part in text.split(","))


def _names(text: str) -> tuple[str, ...]:
    return tuple(text.split(","))


#: How the text of a workload's option is read, by the option's annotation. Options of other
#: types, such as id distributions, can be given in Python and in a table list only.
_PARSERS: dict[str, tuple[Callable[[str], Any], str]] = {
    "int": (parse_integer, "a whole number"),
    "int | None": (parse_integer, "a whole number"),
    "float": (parse_float, "a number"),
    "float | None": (parse_float, "a number"),
    "str | Path": (str, "a path"),
    "int | Mapping[str, int] | None": (parse_integer, "a whole number"),
    "Sequence[int]": (_integers, "whole numbers separated by commas"),
    "Sequence[int] | None": (_integers, "whole numbers separated by commas"),
    "Sequence[str] | None": (_names, "names separated by commas"),
}


def _make_workload(source: str) -> tuple[Table, ...]:
    from autoshard.workloads.registry import WORKLOADS, make_workload

    name, _, query = source.removeprefix(WORKLOAD_PREFIX).partition("?")
    options: dict[str, Any] = dict(parse_query(query, f"workload {name!r}"))
    parameters = inspect.signature(WORKLOADS.find(name)).parameters
    for option, text in options.items():
        if option not in parameters:
            continue  # refused by name below
        annotation = str(parameters[option].annotation)
        if annotation not in _PARSERS:
            raise InputError(
                f"workload {name!r}: option {option!r} cannot be given as text",
                remedy="write the tables to a file from Python",
            )
        parse, allowed = _PARSERS[annotation]
        try:
            options[option] = parse(text)
        except ValueError as error:
            raise InputError(
                f"workload {name!r}: option {option!r} is not usable", got=text, allowed=allowed
            ) from error
    return make_workload(name, **options)


def check_sharder(name: str) -> None:
    """Refuse an unknown sharder before anything is loaded for it.

    Raises:
        InputError: there is none of that name.
    """
    from autoshard.sharders.registry import SHARDERS

    SHARDERS.find(name)


def check_policy(path_or_name: str) -> None:
    """Refuse a policy that cannot be used before anything is loaded, whoever asks for it.

    Raises:
        ArtifactError: it is not there, damaged or of another version.
    """
    if path_or_name == DEFAULT_POLICY:  # shipped; whoever needs it loads it
        return
    from autoshard.policies import find_policy

    find_policy(path_or_name)


def load_model(path_or_name: str) -> CostModel:
    """The cost model of that name or path; 'analytic' and simulated devices need no files.

    Raises:
        ArtifactError: there is none, or it is damaged.
        InputError: an option of a simulated device is not usable.
    """
    if path_or_name == "analytic":
        from autoshard.cost_models.analytic import AnalyticCostModel

        return AnalyticCostModel()
    from autoshard.cost_models.exported import load_cost_model

    return load_cost_model(path_or_name)
