"""What every experiment shares: Hydra started the same way, and its values made plain once.

An experiment is a dataclass schema, a YAML of the same shape in `conf/`, and a function
that takes the dataclass and an output folder. `run_experiment` does the rest: it checks
overrides for typing errors before Hydra sees them, keeps the caller's working directory,
gives every job a folder of its own, and turns deliberate errors into one line and exit
code 2. Library code never sees a `DictConfig`.
"""

from __future__ import annotations

import importlib
import logging
import os
import secrets
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, cast, get_args, get_type_hints

import hydra
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from pydantic import TypeAdapter, ValidationError

from autoshard.errors import AutoshardError, InputError, listed, quoted
from autoshard.files import make_folder
from autoshard.suggestions import did_you_mean
from experiments.metrics import LoggerConfig, MetricsLog

CONF_DIR = Path(__file__).resolve().parent.parent / "conf"
C = TypeVar("C")
T = TypeVar("T")

# Two jobs that start in the same microsecond still get folders of their own.
OmegaConf.register_new_resolver(
    "unique", lambda: secrets.token_hex(3), use_cache=True, replace=True
)


def run_experiment(name: str, schema: type[C], run: Callable[[C, Path, MetricsLog], Any]) -> None:
    """Run `conf/<name>.yaml` with the command line's overrides; ends the process.

    Args:
        name: the experiment, and its primary configuration.
        schema: the dataclass that the configuration becomes. Its values validate themselves.
        run: does the work, given the configuration, an existing output folder and the
            record that metrics go to.
    """
    run, schema = _importable(run), _importable(schema)
    # Errors reach us as exceptions, not as Hydra's printed summaries.
    os.environ["HYDRA_FULL_ERROR"] = "1"

    def job(values: DictConfig) -> Any:
        try:
            return _run_job(name, schema, run, values)
        except AutoshardError as error:
            if HydraConfig.get().mode is RunMode.MULTIRUN:
                raise  # to the process that started the jobs, once all of them have ended
            # SystemExit passes through Hydra, which would print a line of its own.
            print(f"error: {error}", file=sys.stderr)
            raise SystemExit(error.exit_code) from None

    code = 0
    try:
        check_overrides(name, sys.argv[1:])
        hydra.main(version_base="1.3", config_path=str(CONF_DIR), config_name=name)(job)()
    except AutoshardError as error:
        print(f"error: {error}", file=sys.stderr)
        code = error.exit_code
    except (HydraException, OmegaConfBaseException) as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        print("interrupted; run the same command again to go on", file=sys.stderr)
        code = 130
    finally:
        logging.shutdown()
    if code:
        sys.exit(code)


def _importable(thing: T) -> T:
    """What `python -m` defined in `__main__`, under the name that other processes import it by.

    Launchers send jobs to other processes. Functions and classes of `__main__` would travel by
    value, with all that they refer to, and some of that (a console, a lock) cannot travel.
    """
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    if getattr(thing, "__module__", None) != "__main__" or spec is None:
        return thing
    return cast(T, getattr(importlib.import_module(spec.name), thing.__name__))  # type: ignore[attr-defined]


def _run_job(
    name: str, schema: type[C], run: Callable[[C, Path, MetricsLog], Any], values: DictConfig
) -> Any:
    """One job: its configuration made plain, its folder, its record."""
    plain = cast(dict[str, Any], OmegaConf.to_container(values, resolve=True))
    out = plain.pop("out", None)
    logger = to_dataclass(LoggerConfig, plain.pop("logger", None) or {})
    config = to_dataclass(schema, plain)
    out_dir = make_folder(out if out else HydraConfig.get().runtime.output_dir)
    with MetricsLog(out_dir, logger, name=name, values=plain) as metrics:
        return run(config, out_dir, metrics)


def to_dataclass(schema: type[C], values: dict[str, Any]) -> C:
    """Turn plain values into the schema's dataclass, nested ones included.

    Raises:
        InputError: a value has the wrong type or is refused by the schema, or a key is unknown.
    """
    _forbid_unknown(schema, values, "")
    adapter = TypeAdapter(schema)
    try:
        return adapter.validate_python(values)
    except ValidationError as error:
        first = error.errors()[0]
        cause = first.get("ctx", {}).get("error")
        where, message = _place_and_message(error)
        if isinstance(cause, AutoshardError):
            prefix = f"{where}: " if where else ""
            raise InputError(f"{prefix}{cause}") from cause
        raise InputError(f"{where}: {message}", got=quoted(first.get("input"))) from error


def _place_and_message(error: ValidationError) -> tuple[str, str]:
    """Where the first error is, and what it says; of a choice of enums, all their values."""
    errors = error.errors()
    place, message = errors[0]["loc"], errors[0]["msg"]
    if place and str(place[-1]).startswith("enum["):  # pydantic tells of each enum apart
        place = place[:-1]
        expected = [e["ctx"]["expected"] for e in errors if e["loc"][:-1] == place]
        message = f"Input should be {' or '.join(expected)}"
    return ".".join(map(str, place)), message


def _forbid_unknown(kind: Any, values: Any, where: str) -> None:
    """Refuse keys that a dataclass does not have, at any depth; pydantic would drop them.

    Args:
        kind: the type of `values`: a dataclass, a container of them, or anything else.
        values: plain values.
        where: the dotted place, with a dot behind it.
    """
    if is_dataclass(kind) and isinstance(values, Mapping):
        hints = get_type_hints(kind)
        names = [field.name for field in fields(kind)]
        for key, value in values.items():
            if key not in names:
                raise InputError(
                    f"unknown configuration key {f'{where}{key}'!r}",
                    allowed=", ".join(names),
                    remedy=did_you_mean(key, names),
                )
            _forbid_unknown(hints[key], value, f"{where}{key}.")
        return
    inner = [argument for argument in get_args(kind) if argument not in (Ellipsis, type(None))]
    if isinstance(kind, UnionType) and len(inner) == 1:
        _forbid_unknown(inner[0], values, where)
        return
    if not inner:
        return
    if isinstance(values, Mapping):
        for key, value in values.items():
            _forbid_unknown(inner[-1], value, f"{where}{key}.")
    elif isinstance(values, list | tuple):
        for index, value in enumerate(values):
            _forbid_unknown(inner[min(index, len(inner) - 1)], value, f"{where}{index}.")


def check_overrides(name: str, arguments: list[str]) -> None:
    """Refuse overrides of keys that do not exist, with the nearest right one.

    Hydra's own message names the wrong key but not the right one, and a mistyped key
    under `hydra.` or behind `+` would pass unnoticed.

    Raises:
        InputError: a key is unknown.
    """
    overrides = [argument for argument in arguments if _is_override(argument)]
    if not overrides:
        return
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3"):
        base = hydra.compose(config_name=name, return_hydra_config=True)
        loader = GlobalHydra.instance().config_loader()
        launchers = loader.get_group_options("hydra/launcher")
    values = dict(_dotted(OmegaConf.to_container(base, resolve=False)))
    keys = set(values)
    groups = {path.name for path in CONF_DIR.iterdir() if path.is_dir()}
    free = {key for key, value in values.items() if value == {}}  # open dictionaries
    for override in OverridesParser.create().parse_overrides(overrides):
        key = override.key_or_group
        if key == "hydra/launcher" and override.value() not in launchers:
            raise InputError(
                "this launcher is not installed",
                got=quoted(override.value()),
                allowed=listed(launchers),
                remedy="pip install 'autoshard[launchers]' for joblib and submitit, "
                "hydra-ray-launcher for ray",
            )
        if key in keys or key in groups or key.split("/")[0] == "hydra":
            continue
        if any(key.startswith(f"{parent}.") for parent in free | {"hydra.env", "hydra.launcher"}):
            continue
        if override.is_add() and key.rpartition(".")[0] in keys:
            continue  # `+parent.new=…` is how an open dictionary gets a new key
        own = {k for k in keys if not k.startswith("hydra.")} | groups
        pool = keys if key.startswith("hydra.") else own
        raise InputError(
            f"unknown configuration key {key!r}",
            remedy=did_you_mean(key, pool) or f"see `python -m experiments.{name} --help`",
        )


def _is_override(argument: str) -> bool:
    return not argument.startswith("-") and "=" in argument


def _dotted(values: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every dotted key with its value, inner nodes included."""
    if isinstance(values, dict):
        for key, value in values.items():
            name = f"{prefix}{key}"
            yield name, value
            yield from _dotted(value, f"{name}.")
