"""What is chosen by name: sharders, workloads, exporters.

A new one is one file with a decorated class or function, and that file's module in the
registry's list. The modules are imported when a name is first asked for, so that importing
a registry stays light.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from autoshard.errors import InputError
from autoshard.suggestions import did_you_mean

Entry = TypeVar("Entry", bound=Callable[..., object])
Given = TypeVar("Given", bound=Callable[..., object])


class Registry(Generic[Entry]):
    """Callables of one kind by name, in the order of their modules."""

    def __init__(self, kind: str, modules: Sequence[str]) -> None:
        """Start empty.

        Args:
            kind: such as "sharder", for messages.
            modules: what to import to have everything registered.
        """
        self._kind, self._modules = kind, tuple(modules)
        self._entries: dict[str, Entry] = {}

    def register(self, name: str) -> Callable[[Given], Given]:
        """A decorator that makes a class or function known under `name`.

        Raises:
            InputError: the name is taken.
        """

        def register(entry: Given) -> Given:
            if name in self._entries:
                raise InputError(
                    f"{self._kind} {name!r} is registered twice", remedy="choose another name"
                )
            self._entries[name] = entry  # type: ignore[assignment]
            return entry

        return register

    def names(self) -> tuple[str, ...]:
        """Every registered name, in the order of the modules."""
        for module in self._modules:
            importlib.import_module(module)
        return tuple(self._entries)

    def find(self, name: str) -> Entry:
        """What is registered under `name`.

        Raises:
            InputError: nothing is; the message lists all names and suggests the nearest.
        """
        names = self.names()
        if name not in names:
            raise InputError(
                f"unknown {self._kind} {name!r}", allowed=names, remedy=did_you_mean(name, names)
            )
        return self._entries[name]
