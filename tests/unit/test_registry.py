"""Registries: names in order, found lazily, taken once, and mistyped ones helped with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable

import pytest

from autoshard.errors import InputError
from autoshard.exporters.registry import EXPORTERS
from autoshard.registry import Registry
from autoshard.sharders.registry import SHARDERS
from autoshard.workloads.registry import WORKLOADS


def filled() -> Registry[Callable[[], str]]:
    registry: Registry[Callable[[], str]] = Registry("colour", ())
    for name in ("red", "green"):
        registry.register(name)(lambda name=name: name.upper())
    return registry


def test_entries_are_found_in_the_order_of_registration() -> None:
    registry = filled()
    assert registry.names() == ("red", "green")
    assert registry.find("green")() == "GREEN"


def test_what_is_registered_stays_what_it_is() -> None:
    class Blue:
        pass

    registry = filled()
    assert registry.register("blue")(Blue) is Blue
    assert registry.find("blue") is Blue


def test_a_name_is_taken_once() -> None:
    registry = filled()
    with pytest.raises(InputError, match="colour 'red' is registered twice"):
        registry.register("red")(str)
    assert registry.find("red")() == "RED"


def test_unknown_names_are_refused_with_all_and_the_nearest() -> None:
    with pytest.raises(
        InputError,
        match="unknown colour 'gren'; allowed: red, green; remedy: did you mean 'green'",
    ):
        filled().find("gren")


@pytest.mark.parametrize("registry", [SHARDERS, WORKLOADS, EXPORTERS])
def test_every_registry_refuses_alike(registry: Registry) -> None:
    with pytest.raises(InputError, match=r"unknown .* 'nothing such'; allowed: "):
        registry.find("nothing such")


@pytest.mark.parametrize("package", ["sharders", "workloads", "exporters"])
def test_a_registry_imports_its_modules_when_asked(package: str) -> None:
    """In a process of its own: importing is light, and asking needs no other import."""
    script = f"""
import sys
from autoshard.{package}.registry import {package.upper()} as registry
before = {{name for name in sys.modules if name.startswith("autoshard.{package}.")}}
assert before == {{"autoshard.{package}.registry"}}, before
assert len(registry.names()) > 1
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
