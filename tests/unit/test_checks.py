"""Fields of configurations are refused by name, whatever their wrong value is."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from autoshard.checks import check_integers, check_numbers
from autoshard.errors import InputError


def config(value: object) -> SimpleNamespace:
    return SimpleNamespace(first=1, second=value)


def test_what_fits_is_accepted() -> None:
    check_integers(config(3), first=1, second=3)
    check_numbers(config(0.5), first=1, second=0.5)
    check_numbers(config(2**1000), second=0)


@pytest.mark.parametrize("value", [2, True, None, "3", 3.0, float("nan"), [3]])
def test_what_is_no_integer_or_too_small_is_refused_by_name(value: object) -> None:
    with pytest.raises(InputError, match=r"second is not usable; got: .*; allowed: integers >= 3"):
        check_integers(config(value), first=0, second=3)


@pytest.mark.parametrize(
    "value", [-1, True, None, "3", float("nan"), float("inf"), -1e-9, 10**400, [3], 1j]
)
def test_what_is_no_finite_number_or_too_small_is_refused_by_name(value: object) -> None:
    with pytest.raises(InputError, match=r"second is not usable; got: .*; allowed: a finite"):
        check_numbers(config(value), first=0, second=0)
