"""Checks of configurations: which fields must be integers or numbers, and from where on."""

from __future__ import annotations

import math

from autoshard.errors import InputError, quoted


def check_integers(config: object, **lowest: int) -> None:
    """Refuse fields that are no integers, or smaller than their lowest value.

    Args:
        config: what has the fields.
        lowest: the lowest allowed value by field name.

    Raises:
        InputError: names the first field that is wrong. Truth values are no integers.
    """
    for name, low in lowest.items():
        value = getattr(config, name)
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise InputError(
                f"{name} is not usable", got=quoted(value), allowed=f"integers >= {low}"
            )


def check_numbers(config: object, **lowest: float) -> None:
    """Refuse fields that are no finite numbers, or smaller than their lowest value.

    Args:
        config: what has the fields.
        lowest: the lowest allowed value by field name.

    Raises:
        InputError: names the first field that is wrong. Truth values are no numbers.
    """
    for name, low in lowest.items():
        value = getattr(config, name)
        if not is_finite_number(value) or value < low:
            raise InputError(
                f"{name} is not usable", got=quoted(value), allowed=f"a finite number >= {low:g}"
            )


def is_finite_number(value: object) -> bool:
    """Whether it is an int or float (and no truth value) that a finite float can hold."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer beyond every float
        return False
