"""How text becomes a number: for options, table lists, and wherever else people write one.

Python's own `int` and `float` also take the digits of other scripts, underscores, and names
such as "infinity"; a file or a command line that holds any of these holds a mistake.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

INTEGER = re.compile(r"[+-]?[0-9]+")
DECIMAL = re.compile(r"[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


def parse_integer(text: str) -> int:
    """A whole number in the digits 0 to 9.

    Raises:
        ValueError: anything else, or thousands of digits.
    """
    if not INTEGER.fullmatch(text := text.strip()):
        raise ValueError(f"{text[:80]!r} is not a whole number")
    return int(text)


def parse_decimal(text: str) -> Decimal:
    """A number in the digits 0 to 9, exactly as written.

    Raises:
        ValueError: anything else; there is no text for infinity or NaN.
    """
    _check_decimal(text := text.strip())
    try:
        return Decimal(text)
    except InvalidOperation as error:  # an exponent beyond any use
        raise ValueError(f"{text[:80]!r} is out of range") from error


def parse_float(text: str) -> float:
    """The float nearest to a number in the digits 0 to 9; infinite beyond 1.8e308.

    Raises:
        ValueError: anything else; there is no text for infinity or NaN.
    """
    _check_decimal(text := text.strip())
    return float(text)


def _check_decimal(text: str) -> None:
    if not DECIMAL.fullmatch(text):
        raise ValueError(f"{text[:80]!r} is not a number")
