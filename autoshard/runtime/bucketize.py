"""Deals the ids of a batch out to the slices of rows that hold them.

FBGEMM's bucketize kernel does it in one pass over the ids and makes them relative to
their slice.

Shapes: E=entries, B=samples of this rank, K=buckets.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.fbgemm import load_fbgemm
from autoshard.runtime.layout import Entry


@dataclass(frozen=True, eq=False)
class Buckets:
    """The ids of E entries in K·E streams, bucket-major."""

    lengths_SB: Tensor
    """Ids per bag, int64 [K·E, B]."""
    values: list[Tensor]
    """Per stream, rows relative to the slice, int64, in the order of the batch."""
    weights: list[Tensor]
    """Per stream, float32; empty if the batch has none."""


class RowBucketizer:
    """Cuts the ids of a fixed list of entries."""

    def __init__(
        self, entries: Sequence[Entry], starts: Sequence[Sequence[int]], device: torch.device
    ) -> None:
        """Prepare the cuts.

        Args:
            entries: E of them.
            starts: per entry, the first row of each of its at least two buckets, ascending from 0.
            device: of the batches.
        """
        load_fbgemm()  # registers the operator
        self._num_buckets = max((len(own) for own in starts), default=0)
        self._bounds: list[Tensor] = []
        for entry, own in zip(entries, starts, strict=True):
            # Entries with fewer buckets than others get empty ones behind their last row.
            missing = self._num_buckets + 1 - len(own)
            bounds = [*own, *[entry.table.num_embeddings] * missing]
            self._bounds.append(torch.tensor(bounds, dtype=torch.int64, device=device))
        # Even cuts need no search; where some are not, the operator asks for sizes all the same.
        blocks = [own[1] for own in starts]
        self._block_sizes = torch.tensor(blocks, dtype=torch.int64, device=device)
        self._is_even = all(
            own == [block * index for index in range(len(own))]
            and entry.table.num_embeddings <= block * len(own)
            for entry, own, block in zip(entries, starts, blocks, strict=True)
        )

    def __call__(
        self, lengths_EB: Tensor, values: Sequence[Tensor], weights: Sequence[Tensor] | None
    ) -> Buckets:
        """Cut one batch.

        Args:
            lengths_EB: int64.
            values: per entry, ids within its table, int64.
            weights: per entry, float32.
        """
        cut: Any = torch.ops.fbgemm.block_bucketize_sparse_features(
            lengths_EB.flatten(),
            torch.cat(list(values)),
            bucketize_pos=False,
            sequence=False,
            block_sizes=self._block_sizes,
            my_size=self._num_buckets,
            weights=None if weights is None else torch.cat(list(weights)),
            block_bucketize_pos=None if self._is_even else self._bounds,
        )
        num_streams = self._num_buckets * len(self._bounds)
        lengths_SB = cut[0].view(num_streams, lengths_EB.shape[1])
        counts = lengths_SB.sum(1).tolist()
        return Buckets(
            lengths_SB,
            list(cut[1].split(counts)),
            [] if weights is None else list(cut[2].split(counts)),
        )
