"""The nearest right name for a mistyped one, for error messages."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


def did_you_mean(name: object, options: Iterable[str]) -> str | None:
    """A remedy such as "did you mean 'pooling_factor'?", or None if nothing is near."""
    by_folded = {option.casefold(): option for option in options}
    near = get_close_matches(str(name).strip().casefold(), list(by_folded), n=1, cutoff=0.6)
    return f"did you mean {by_folded[near[0]]!r}?" if near else None
