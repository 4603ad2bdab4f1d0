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

    def __init__(self, entries: Sequence[Entry], mode: IdsMode) -> None:
        self.entries = tuple(entries)
        self.mode = mode
        self._num_rows_E = [entry.table.num_embeddings for entry in self.entries]
        self._weighted_features = {e.feature for e in self.entries if e.table.weighted}
        self._known_names: tuple[str, ...] = ()
        self._known_rows: list[int] = []

    def __call__(self, batch: JaggedBatch) -> EntryIds:
        """Gather and check.

        Raises:
            InputError: the batch lacks a feature, or weights that a table needs. Without ids it
                needs none.
        """
        rows = self._rows_of(batch.feature_names)
        weights_L = batch.weights_L
        if weights_L is None and self._weighted_features:
            if batch.num_ids:
                raise InputError(
                    "the batch carries no weights, but weighted tables look it up",
                    got=f"features {sorted(self._weighted_features)[:8]}",
                    remedy="give one weight per id",
                )
            weights_L = batch.values_L.new_zeros(0, dtype=torch.float32)
        counts = batch.num_ids_F
        parts = batch.values_L.split(counts)
        in_order = rows == list(range(len(counts)))
        # A copy: the backward needs them, and a loader may have refilled its tensor by then.
        lengths_EB = batch.lengths_FB.clone() if in_order else batch.lengths_FB[rows]
        values = list(parts) if in_order else [parts[row] for row in rows]
        weights: list[Tensor] | None = None
        if weights_L is not None:
            weight_parts = weights_L.split(counts)
            weights = [weight_parts[row] for row in rows]
        if self._are_in_range(batch.values_L, values):
            return EntryIds(lengths_EB, values, weights, 0, None)
        counts_E = [counts[row] for row in rows]
        values_L, num_bad, bad_id = self._mended(torch.cat(values), counts_E)
        return EntryIds(lengths_EB, list(values_L.split(counts_E)), weights, num_bad, bad_id)

    def _rows_of(self, feature_names: tuple[str, ...]) -> list[int]:
        """Per entry, the position of its feature in the batch."""
        if feature_names != self._known_names:
            position = {name: index for index, name in enumerate(feature_names)}
            if missing := [e.feature for e in self.entries if e.feature not in position]:
                raise InputError(
                    "the batch lacks features of the plan",
                    got=sorted(set(missing))[:8],
                    allowed=f"all of the plan's features; the batch has {len(position)}",
                )
            self._known_rows = [position[entry.feature] for entry in self.entries]
            self._known_names = feature_names
        return self._known_rows

    def _are_in_range(self, values_L: Tensor, values: list[Tensor]) -> bool:
        """Whether every entry's ids are; one pass, and another over small tables only."""
        if not values_L.numel():
            return True
        lowest, highest = (int(value) for value in torch.aminmax(values_L))
        if lowest < 0:
            return False
        small = [
            (ids, num_rows)
            for ids, num_rows in zip(values, self._num_rows_E, strict=True)
            if num_rows <= highest and ids.numel()
        ]
        if not small:
            return True
        highest_S = torch.stack([ids.max() for ids, _ in small]).tolist()
        return all(top < rows for top, (_, rows) in zip(highest_S, small, strict=True))

    def _mended(self, values_L: Tensor, counts_E: list[int]) -> tuple[Tensor, int, BadId | None]:
        """The ids with 0 for those out of range, how many are counted, and the first one."""
        counts = torch.tensor(counts_E, dtype=torch.int64, device=values_L.device)
        num_rows_E = torch.tensor(self._num_rows_E, dtype=torch.int64, device=values_L.device)
        limit_L = torch.repeat_interleave(num_rows_E, counts, output_size=values_L.numel())
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
