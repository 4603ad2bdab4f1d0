"""Every error that autoshard raises on purpose.

Each one says what is wrong, what was got, what would be allowed and how to
mend it, for people who may not know Python, and each is also the builtin kind
that a caller would expect.
The command line turns `AutoshardError.exit_code` into its exit status.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from enum import Enum
from itertools import islice

#: How many items a message lists before it says "and n more".
MAX_LISTED = 8
#: What is allowed is worth more room: the right name should be among it.
MAX_ALLOWED = 24
#: Longer texts are cut where a value from outside is quoted.
MAX_QUOTED = 80
#: Lists within lists are written out this deep.
_DEPTH = 3


def listed(items: Iterable[object], limit: int = MAX_LISTED) -> str:
    """The first items, separated by commas, and how many more there are."""
    return _listed(list(items), limit, _DEPTH)


def readable(value: object, limit: int = MAX_LISTED) -> str:
    """A value as people write it, never as Python does.

    Text stays as it is, lists and sets become comma-separated items, mappings `key: value`
    pairs, enum members their values. Beyond `limit` items, the rest is counted.
    """
    return _readable(value, limit, _DEPTH)


def _readable(value: object, limit: int, depth: int) -> str:
    if isinstance(value, str):
        return value
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Enum):
        return value.value if isinstance(value.value, str) else value.name
    if isinstance(value, Mapping):
        pairs = [
            f"{_readable(key, limit, 0)}: {_item(item, limit, depth - 1)}"
            for key, item in islice(value.items(), limit)
        ]
        more = f" and {len(value) - limit} more" if len(value) > limit else ""
        return ", ".join(pairs) + more if pairs else "an empty object"
    if isinstance(value, set | frozenset):
        value = sorted(value, key=str)
    if isinstance(value, list | tuple):
        return _listed(value, limit, depth) or "an empty list"
    if hasattr(value, "tolist"):  # arrays, tensors and their scalars
        return _readable(value.tolist(), limit, depth)
    try:
        text = str(value)
    except ValueError:  # Python does not write out integers of thousands of digits
        return "a number of thousands of digits"
    return f"something of type {type(value).__name__}" if text.startswith("<") else text


def _listed(items: Sequence[object], limit: int, depth: int) -> str:
    shown = ", ".join(_item(item, limit, depth - 1) for item in items[:limit])
    return shown if len(items) <= limit else f"{shown} and {len(items) - limit} more"


def _item(value: object, limit: int, depth: int) -> str:
    """A value among others: what would be taken for several is set apart."""
    if isinstance(value, str):
        is_plain = value == value.strip() and value.isprintable() and "," not in value
        return value if value and is_plain else repr(value)
    is_mapping = isinstance(value, Mapping)
    if is_mapping or isinstance(value, list | tuple | set | frozenset):
        inside = "" if not value else _readable(value, limit, depth) if depth > 0 else "…"
        return f"{{{inside}}}" if is_mapping else f"[{inside}]"
    return _readable(value, limit, depth)


def quoted(value: object) -> str:
    """A value from outside, so that its kind can be seen: "a list of 2: 1, 2", '3', or 3."""
    if isinstance(value, str):
        return _cut(repr(value))
    if isinstance(value, Mapping):
        return _cut(f"an object with {readable(value)}" if value else "an empty object")
    if isinstance(value, list | tuple | set | frozenset):
        return _cut(f"a list of {len(value)}: {readable(value)}" if value else "an empty list")
    return _cut(readable(value))


def _cut(text: str) -> str:
    return text if len(text) <= MAX_QUOTED else f"{text[: MAX_QUOTED - 3]}..."


class AutoshardError(Exception):
    """Base of all deliberate errors; `exit_code` is what the command line returns."""

    exit_code = 1

    def __init__(
        self,
        what: str,
        *,
        got: object | None = None,
        allowed: object | None = None,
        remedy: str | None = None,
    ) -> None:
        """Compose one message.

        Args:
            what: the fault, in one clause, naming the thing at fault.
            got: the offending value; shown by `readable`, so text of other people's making
                goes through `quoted` first.
            allowed: what would have been accepted; shown by `readable`.
            remedy: what the reader can do about it.
        """
        self.what, self.got, self.allowed, self.remedy = what, got, allowed, remedy
        parts = [what]
        if got is not None:
            parts.append(f"got: {readable(got)}")
        if allowed is not None:
            parts.append(f"allowed: {readable(allowed, MAX_ALLOWED)}")
        if remedy is not None:
            parts.append(f"remedy: {remedy}")
        super().__init__("; ".join(parts))


class InputError(AutoshardError, ValueError):
    """A file, option or argument is wrong."""

    exit_code = 2


class PlanError(InputError):
    """A plan is malformed, altered, stale or made for something else."""


class InfeasibleError(AutoshardError, ValueError):
    """The request cannot be met: the tables do not fit the given memory."""

    exit_code = 2


class UnsupportedError(AutoshardError, ValueError):
    """A combination (device, optimizer, data type, sharding type) that does not run."""

    exit_code = 2


class ArtifactError(AutoshardError, ValueError):
    """A trained artifact is missing, damaged or made by other versions."""

    exit_code = 2


class DependencyError(AutoshardError, ImportError):
    """A package that this request needs is missing or does not load."""

    exit_code = 2


class WorkerError(AutoshardError, RuntimeError):
    """A worker process failed, died or did not answer in time."""

    exit_code = 1
