"""Table lists by name: what a configuration or a command line can ask for.

A new workload is one function in one file with `@register_workload("name")`, named below.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from autoshard.errors import InputError
from autoshard.registry import Registry
from autoshard.suggestions import did_you_mean
from autoshard.tables import Table, check_tables

#: What makes a table list; all parameters are keywords.
Workload = Callable[..., tuple[Table, ...]]

WORKLOADS: Registry[Workload] = Registry(
    "workload",
    (
        "autoshard.workloads.dlrm_datasets",
        "autoshard.workloads.dlrm_tables",
        "autoshard.workloads.laptop",
        "autoshard.workloads.movielens",
        "autoshard.workloads.presets",
        "autoshard.workloads.production",
        "autoshard.workloads.traces",
    ),
)
register_workload = WORKLOADS.register
workload_names = WORKLOADS.names


def make_workload(name: str, **options: Any) -> tuple[Table, ...]:
    """Make the table list called `name`.

    Args:
        name: one of `workload_names()`.
        options: passed on by keyword, such as `num_tables` and `seed`.

    Raises:
        InputError: no workload has that name, or it has no such option.
    """
    workload = WORKLOADS.find(name)
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
