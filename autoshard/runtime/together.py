"""Work that every rank does for itself, and that fails on all ranks if it fails on one.

A rank that raised alone would leave the others waiting in their next collective.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from autoshard import errors
from autoshard.errors import AutoshardError, WorkerError
from autoshard.runtime.collectives import Collectives

T = TypeVar("T")


def each(collectives: Collectives, what: str, function: Callable[[], T]) -> T:
    """Like `together`, for values that stay on their rank, such as modules.

    Raises:
        AutoshardError: as for `together`.
    """
    kept: list[T] = []
    together(collectives, what, lambda: kept.append(function()))
    return kept[0]


def together(collectives: Collectives, what: str, function: Callable[[], T]) -> list[T]:
    """Call `function` on every rank; what each returned, on every rank.

    Args:
        collectives: of all ranks; its time limit covers the slowest rank's work.
        what: such as "reading the data set", for messages.
        function: local work without collectives; returns something picklable.

    Raises:
        AutoshardError: on every rank what the first failing rank raised, its rank named;
            a `WorkerError` for errors that autoshard did not foresee.
        CollectiveError: a rank died, or did not answer in time.
    """
    failure: Exception | None = None
    value: T | None = None
    try:
        value = function()
    except Exception as error:
        failure = error
    report = None if failure is None else (type(failure).__name__, str(failure))
    gathered = collectives.gather_objects(what, (report, value))
    failed = [(rank, told) for rank, (told, _) in enumerate(gathered) if told is not None]
    if failed:
        rank, (kind, text) = failed[0]
        where = f"rank {rank}: " if collectives.world_size > 1 else ""
        known = getattr(errors, kind, None)
        if isinstance(known, type) and issubclass(known, AutoshardError):
            raise known(f"{where}{text}") from failure
        raise WorkerError(f"{where}{what} failed", got=f"{kind}: {text}") from failure
    return [value for _, value in gathered]
