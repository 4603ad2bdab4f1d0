"""Gathers the ids that each entry looks up and applies the out-of-range mode.

This happens on the rank that read the batch, before any id is sent or bucketised, and
in the same way for every sharding type.

Shapes: E=entries, B=samples of this rank, L=ids over all entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from autoshard.errors import InputError
from autoshard.runtime.batch import JaggedBatch
from autoshard.runtime.layout import Entry


class IdsMode(Enum):
    """What becomes of an id outside [0, num_embeddings): FBGEMM's bounds-check modes."""

    FATAL = "fatal"
    """Every rank stops with an error that names table, feature and id."""
    WARNING = "warning"
    """The id becomes 0 and is counted."""
    IGNORE = "ignore"
    """The id becomes 0."""


def parse_ids_mode(name: str | IdsMode) -> IdsMode:
    """The mode called `name`.

    Raises:
        InputError: there is none of that name.
    """
    try:
        return IdsMode(name)
    except ValueError as error:
        raise InputError(
            "ids_mode is not known", got=name, allowed=", ".join(m.value for m in IdsMode)
        ) from error


@dataclass(frozen=True)
class BadId:
    """The first id out of range, by position in the entries."""

    entry: int
    value: int


@dataclass(frozen=True, eq=False)
class EntryIds:
    """The lookups of a list of entries for one local batch, entry-major."""

    lengths_EB: Tensor
    """int64 [E, B]."""
    values: list[Tensor]
    """Per entry, its ids, int64."""
    weights: list[Tensor] | None
    """Per entry, one float32 weight per id."""
    num_out_of_range: int
    bad_id: BadId | None
    """Set in mode `fatal` only."""


class EntryGather:
    """Turns a batch into `EntryIds` for a fixed list of entries."""

    def __init__(self, entries: Sequence[Entry], mode: IdsMode, device: torch.device) -> None:
        self.entries = tuple(entries)
        self.mode = mode
        self._fewest_rows = min((entry.table.num_embeddings for entry in self.entries), default=0)
        self._num_embeddings_E = torch.tensor(
            [entry.table.num_embeddings for entry in self.entries], dtype=torch.int64, device=device
        )

    def __call__(self, batch: JaggedBatch) -> EntryIds:
        """Gather and check.

        Raises:
            InputError: the batch lacks a feature, or weights that a table needs.
        """
        position = {name: index for index, name in enumerate(batch.feature_names)}
        if missing := [e.feature for e in self.entries if e.feature not in position]:
            raise InputError(
                "the batch lacks features of the plan",
                got=sorted(set(missing))[:8],
                allowed=f"all of the plan's features; the batch has {len(position)}",
            )
        if batch.weights_L is None and (
            weighted := [e.feature for e in self.entries if e.table.weighted]
        ):
            raise InputError(
                "the batch carries no weights, but weighted tables look it up",
                got=f"features {sorted(set(weighted))[:8]}",
                remedy="give one weight per id",
            )
        rows = [position[entry.feature] for entry in self.entries]
        in_order = rows == list(range(len(batch.feature_names)))
        counts_F = batch.lengths_FB.sum(1)
        counts = counts_F.tolist()
        parts = batch.values_L.split(counts)
        lengths_EB = batch.lengths_FB if in_order else batch.lengths_FB[rows]
        counts_E = [counts[row] for row in rows]
        values_L = batch.values_L if in_order else torch.cat([parts[row] for row in rows])
        values_L, num_bad, bad_id = self._check(values_L, counts_E)
        weights: list[Tensor] | None = None
        if batch.weights_L is not None:
            weight_parts = batch.weights_L.split(counts)
            weights = [weight_parts[row] for row in rows]
        return EntryIds(lengths_EB, list(values_L.split(counts_E)), weights, num_bad, bad_id)

    def _check(self, values_L: Tensor, counts_E: list[int]) -> tuple[Tensor, int, BadId | None]:
        if not values_L.numel():
            return values_L, 0, None
        lowest, highest = (int(value) for value in torch.aminmax(values_L))
        if lowest >= 0 and highest < self._fewest_rows:
            return values_L, 0, None  # in range for every entry: the common case, in one pass
        counts = torch.tensor(counts_E, dtype=torch.int64, device=values_L.device)
        limit_L = torch.repeat_interleave(
            self._num_embeddings_E, counts, output_size=values_L.numel()
        )
        bad_L = (values_L < 0) | (values_L >= limit_L)
        num_bad = int(bad_L.sum())
        if not num_bad:
            return values_L, 0, None
        values_fixed_L = values_L.masked_fill(bad_L, 0)
        if self.mode is not IdsMode.FATAL:
            return values_fixed_L, num_bad if self.mode is IdsMode.WARNING else 0, None
        first = int(bad_L.nonzero()[0])
        entry = int(torch.searchsorted(counts.cumsum(0), first, right=True))
        return values_fixed_L, num_bad, BadId(entry, int(values_L[first]))
