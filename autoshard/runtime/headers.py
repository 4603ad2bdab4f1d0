"""What every rank tells every other before a step, and whether the step may go on.

The header rides on the first collective of the step, so that ranks stop together: at the
end of the data, at an id out of range, or when one of them could not read its batch.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from autoshard.errors import InputError
from autoshard.runtime.collectives import CollectiveError
from autoshard.runtime.layout import Entry


class Status(IntEnum):
    """What a rank says about its batch."""

    READY = 0
    ENDED = 1
    """It has no more batches."""
    BAD_ID = 2
    FAILED = 3
    """It could not prepare its batch."""


class Header(NamedTuple):
    """One rank's message; all fields travel as int64, in this order."""

    step: int
    status: int
    training: int
    """1 if gradients will follow."""
    batch_size: int = 0
    bad_entry: int = 0
    """Position of the entry with an id out of range."""
    bad_value: int = 0
    ids_follow: int = 0
    """1 if this rank's ids did not fit into the room left for them."""


HEADER_SIZE = len(Header._fields)


def stop_if_told(headers: Sequence[Header], own_rank: int, entries: Sequence[Entry]) -> None:
    """Raise what all ranks have to stop for, the same on each of them.

    Args:
        headers: of every rank, in order.
        own_rank: this rank; it raises its own failure itself.
        entries: to name the table and feature of an id out of range.

    Raises:
        InputError: some rank's batch holds an id out of range.
        CollectiveError: ranks disagree on the step, or another rank failed.
    """
    own = headers[own_rank]
    where = f"rank {own_rank}, step {own.step}"
    for rank, header in enumerate(headers):
        if (header.step, header.training) != (own.step, own.training):
            raise CollectiveError(
                f"{where}: rank {rank} runs another step",
                got=f"step {header.step}, gradients {'on' if header.training else 'off'}",
                allowed=f"step {own.step}, gradients {'on' if own.training else 'off'}",
                remedy="give every rank the same sequence of steps",
            )
    for rank, header in enumerate(headers):
        if header.status == Status.BAD_ID:
            bad = entries[header.bad_entry]
            raise InputError(
                f"rank {rank}, step {header.step}: an id of feature {bad.feature!r} is out of "
                f"range for table {bad.table.name!r}",
                got=header.bad_value,
                allowed=f"0..{bad.table.num_embeddings - 1}",
                remedy="mend the data, or set ids_mode to warning or ignore",
            )
    for rank, header in enumerate(headers):
        if header.status == Status.FAILED and rank != own_rank:
            raise CollectiveError(
                f"{where}: rank {rank} failed to prepare its batch",
                remedy=f"see the error of rank {rank}",
            )
