"""Table lists by name: what a configuration or a command line can ask for.

A new workload is one function in one file with `@register_workload("name")`, imported
in the package's `__init__`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from autoshard.errors import InputError
from autoshard.suggestions import did_you_mean
from autoshard.tables import Table, check_tables

#: What makes a table list; all parameters are keywords.
Workload = Callable[..., tuple[Table, ...]]

WORKLOADS: dict[str, Workload] = {}


def register_workload(name: str) -> Callable[[Workload], Workload]:
    """Make a workload known under `name`.

    Raises:
        InputError: the name is taken.
    """

    def register(workload: Workload) -> Workload:
        if name in WORKLOADS:
            raise InputError(f"workload {name!r} is registered twice", remedy="choose another name")
        WORKLOADS[name] = workload
        return workload

    return register


def make_workload(name: str, **options: Any) -> tuple[Table, ...]:
    """Make the table list called `name`.

    Args:
        name: one of `WORKLOADS`.
        options: passed on by keyword, such as `num_tables` and `seed`.

    Raises:
        InputError: no workload has that name, or it has no such option.
    """
    if name not in WORKLOADS:
        raise InputError(
            f"workload {name!r} is not known",
            allowed=", ".join(sorted(WORKLOADS)),
            remedy=did_you_mean(name, WORKLOADS),
        )
    workload = WORKLOADS[name]
    parameters = inspect.signature(workload).parameters
    for option in options:
        if option not in parameters:
            raise InputError(
                f"workload {name!r} has no option {option!r}",
                allowed=", ".join(parameters),
                remedy=did_you_mean(option, parameters),
            )
    for option, parameter in parameters.items():
        if parameter.default is parameter.empty and option not in options:
            raise InputError(f"workload {name!r} needs the option {option!r}")
    return check_tables(workload(**options))
