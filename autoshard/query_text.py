"""Options behind a name, `NAME?option=value&option=value`, as workloads and data sets take them."""

from __future__ import annotations

from urllib.parse import parse_qsl

from autoshard.errors import InputError


def parse_query(query: str, whose: str) -> dict[str, str]:
    """The options by name, their values as text; the caller knows which there are.

    Args:
        query: what follows the question mark; empty for no options.
        whose: what has the options, for messages.

    Raises:
        InputError: it is no list of pairs, or names an option twice.
    """
    try:
        pairs = parse_qsl(query, keep_blank_values=True, strict_parsing=True) if query else []
    except ValueError as error:
        raise InputError(
            f"the options of {whose} are not usable",
            got=query,
            allowed="option=value pairs joined by &",
        ) from error
    options: dict[str, str] = {}
    for option, text in pairs:
        if option in options:
            raise InputError(f"{whose}: option {option!r} is given twice")
        options[option] = text
    return options
