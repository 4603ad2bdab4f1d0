"""Data sets by name: `NAME[:PATH][?option=value&…]`, as a command line gives them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from autoshard.clicks.batches import ClickData, check_features
from autoshard.errors import InputError
from autoshard.number_text import parse_float, parse_integer
from autoshard.query_text import parse_query
from autoshard.suggestions import did_you_mean
from autoshard.tables import Table

_Parser = Callable[[str], Any]
#: Per data set, its options and how their text is read.
OPTIONS: Mapping[str, Mapping[str, _Parser]] = {
    "clicks": {
        "samples": parse_integer,
        "evaluation_samples": parse_integer,
        "numeric": parse_integer,
        "signal": parse_float,
        "seed": parse_integer,
    },
    "criteo": {
        "evaluation": str,
        "holdout": parse_integer,
        "malformed": str,
        "shuffle": parse_integer,
    },
    "movielens-100k": {"split": str},
}


def open_clicks(source: str, tables: Sequence[Table], *, seed: int = 0) -> ClickData:
    """Open a data set for the tables of a plan.

    Args:
        source: such as `movielens-100k`, `criteo:/data/train.txt?malformed=skip` or
            `clicks?samples=10000`.
        tables: the plan's; the data set must have their features.
        seed: of the run: of the order of samples, or of generated ones.

    Raises:
        InputError: the source is not known, has no such option, or cannot be read.
        PlanError: the tables do not match the data set.
        DependencyError: a package that carries the data is missing.
    """
    name, path, options = parse_source(source)
    if name == "clicks":
        from autoshard.clicks.generated import generated_clicks

        return generated_clicks(tables, **{"seed": seed, **options})
    if name == "criteo":
        from autoshard.clicks.criteo import criteo

        evaluation_path = options.pop("evaluation", None)
        return criteo(path, tables=tables, evaluation_path=evaluation_path, seed=seed, **options)
    from autoshard.clicks.movielens import NAME, movielens_100k
    from autoshard.workloads.movielens import ROWS

    check_features(tables, dict(ROWS), NAME)
    return movielens_100k(seed=seed, **options)


def parse_source(source: str) -> tuple[str, str, dict[str, Any]]:
    """Name, path and options of a source, before anything is opened.

    Raises:
        InputError: the name or an option is not known, or a value is not usable.
    """
    head, _, query = source.partition("?")
    name, _, path = head.partition(":")
    if name not in OPTIONS:
        raise InputError(
            f"data set {name!r} is not known",
            allowed=", ".join(OPTIONS),
            remedy=did_you_mean(name, OPTIONS),
        )
    if (name == "criteo") != bool(path):
        raise InputError(
            f"data set {source!r} is not usable",
            got="no path" if not path else f"a path for {name}",
            allowed="criteo:PATH" if name == "criteo" else name,
        )
    options: dict[str, Any] = dict(parse_query(query, f"data set {name!r}"))
    for option, text in options.items():
        parsers = OPTIONS[name]
        if option not in parsers:
            raise InputError(
                f"data set {name!r} has no option {option!r}",
                allowed=", ".join(parsers),
                remedy=did_you_mean(option, parsers),
            )
        try:
            options[option] = parsers[option](text)
        except ValueError as error:
            raise InputError(
                f"data set {name!r}: option {option!r} is not usable",
                got=text,
                allowed="a whole number" if parsers[option] is parse_integer else "a number",
            ) from error
    return name, path, options
