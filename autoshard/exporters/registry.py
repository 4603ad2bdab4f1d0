"""All export formats by name. A new one is one file with `@register_exporter`, named below."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import TypeVar

from autoshard.errors import InputError
from autoshard.protocols import Exporter
from autoshard.suggestions import did_you_mean

_FACTORIES: dict[str, Callable[[], Exporter]] = {}
#: Modules that register exporters, in the order in which help texts list them.
_MODULES = ("autoshard.exporters.plan_json", "autoshard.exporters.shards_csv")

F = TypeVar("F", bound=Callable[[], Exporter])


def register_exporter(name: str) -> Callable[[F], F]:
    """Register a class or function that makes the exporter called `name`.

    Raises:
        InputError: the name is taken.
    """

    def register(factory: F) -> F:
        if name in _FACTORIES:
            raise InputError(f"exporter {name!r} is registered twice", remedy="choose another name")
        _FACTORIES[name] = factory
        return factory

    return register


def exporter_names() -> tuple[str, ...]:
    """Every registered format."""
    for module in _MODULES:
        importlib.import_module(module)
    return tuple(_FACTORIES)


def make_exporter(name: str) -> Exporter:
    """Make the exporter called `name`.

    Raises:
        InputError: there is no format of that name.
    """
    names = exporter_names()
    if name not in names:
        raise InputError(
            f"unknown export format {name!r}",
            allowed=", ".join(names),
            remedy=did_you_mean(name, names),
        )
    return _FACTORIES[name]()
