"""All sharders by name. A new one is one file with `@register_sharder`, imported in `_MODULES`."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable
from typing import TypeVar

from autoshard.errors import InputError
from autoshard.protocols import Sharder

_FACTORIES: dict[str, Callable[..., Sharder]] = {}
#: Modules that register sharders, in the order in which reports list them.
_MODULES = (
    "autoshard.sharders.heuristics",
    "autoshard.sharders.cost_greedy",
    "autoshard.sharders.learned",
    "autoshard.sharders.search",
)

F = TypeVar("F", bound=Callable[..., Sharder])


def register_sharder(name: str) -> Callable[[F], F]:
    """Register a class or function that makes the sharder called `name`."""

    def register(factory: F) -> F:
        if name in _FACTORIES:
            raise ValueError(f"a sharder called {name!r} is registered already")
        _FACTORIES[name] = factory
        return factory

    return register


def sharder_names() -> tuple[str, ...]:
    """Every registered name, plainest first."""
    for module in _MODULES:
        importlib.import_module(module)
    return tuple(_FACTORIES)


def make_sharder(name: str, **options: object) -> Sharder:
    """Make the sharder called `name`.

    Args:
        name: one of `sharder_names()`.
        options: passed to the sharder, such as `policy` for `ppo` and `autoshard`.

    Raises:
        InputError: there is no sharder of that name.
    """
    names = sharder_names()
    if name not in names:
        near = difflib.get_close_matches(name, names, n=1)
        raise InputError(
            f"unknown sharder {name!r}",
            allowed=", ".join(names),
            remedy=f"did you mean {near[0]!r}?" if near else None,
        )
    return _FACTORIES[name](**options)
