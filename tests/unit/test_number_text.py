"""Numbers as people write them, in ASCII digits only."""

from __future__ import annotations

from decimal import Decimal

import pytest

from autoshard.number_text import parse_decimal, parse_float, parse_integer


def test_what_people_write_is_read() -> None:
    assert [parse_integer(text) for text in ("7", " -3 ", "+0", "0012")] == [7, -3, 0, 12]
    assert [parse_float(text) for text in ("7", ".5", "1.", "-2.5e-3")] == [7.0, 0.5, 1.0, -0.0025]
    assert parse_decimal("0.1") == Decimal("0.1")


@pytest.mark.parametrize(
    "text", ["", " ", "x", "1_000", "٣", "３", "½", "²", "0x10", "1 000", "1,5", "--1", "1e", "+"]
)
def test_everything_else_is_refused(text: str) -> None:
    for parse in (parse_integer, parse_float, parse_decimal):
        with pytest.raises(ValueError, match="is not a"):
            parse(text)


@pytest.mark.parametrize("text", ["inf", "-infinity", "nan"])
def test_there_is_no_text_for_what_is_not_finite(text: str) -> None:
    for parse in (parse_integer, parse_float, parse_decimal):
        with pytest.raises(ValueError, match="is not a"):
            parse(text)


def test_numbers_beyond_all_use_are_refused_or_infinite() -> None:
    with pytest.raises(ValueError, match="digits"):
        parse_integer("9" * 5000)
    with pytest.raises(ValueError, match="out of range"):
        parse_decimal("1e" + "9" * 30)
    assert parse_float("1e400") == float("inf")
