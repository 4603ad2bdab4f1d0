"""Samples held in memory: any order, any part, at no reading cost.

Shapes: S=samples, F=features, B=samples of one rank, N=numeric features.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from autoshard.clicks.batches import ClickBatch, FloatArray, IntArray, Share, num_steps
from autoshard.errors import InputError


@dataclass(frozen=True, kw_only=True, eq=False)
class BagColumn:
    """The bags of one feature: those of sample s are ids[starts[s] : starts[s + 1]]."""

    ids: IntArray
    starts: IntArray
    """int64 [S + 1]."""

    @classmethod
    def single(cls, ids_S: IntArray) -> BagColumn:
        """One id per sample."""
        return cls(ids=ids_S.astype(np.int64), starts=np.arange(len(ids_S) + 1, dtype=np.int64))

    def take(self, samples_B: IntArray) -> tuple[IntArray, IntArray]:
        """Lengths [B] and ids [L] of some samples, in their order."""
        first_B = self.starts[samples_B]
        lengths_B = self.starts[samples_B + 1] - first_B
        # Position in `ids` of every id: its bag's start, plus its place within the bag.
        ends_B = np.cumsum(lengths_B)
        within_L = np.arange(int(lengths_B.sum())) - np.repeat(ends_B - lengths_B, lengths_B)
        return lengths_B, self.ids[np.repeat(first_B, lengths_B) + within_L]


class MemorySplit:
    """A split whose samples are all in memory; see `ClickSplit`."""

    def __init__(
        self,
        bags: Mapping[str, BagColumn],
        labels_S: FloatArray,
        numeric_SN: FloatArray | None = None,
        *,
        shuffle_seed: int | None = None,
    ) -> None:
        """Keep the columns.

        Args:
            bags: per feature, the bags of S samples.
            labels_S: 0 or 1.
            numeric_SN: numeric features.
            shuffle_seed: of the order of each epoch, the same on every rank; None to keep
                the samples' own order.
        """
        for name, column in bags.items():
            if len(column.starts) != len(labels_S) + 1:
                raise InputError(
                    f"feature {name!r} has another number of samples than there are labels",
                    got=len(column.starts) - 1,
                    allowed=len(labels_S),
                )
        self.num_samples: int | None = len(labels_S)
        self._bags = dict(bags)
        self._labels_S = labels_S.astype(np.float32)
        self._numeric_SN = None if numeric_SN is None else numeric_SN.astype(np.float32)
        self._shuffle_seed = shuffle_seed

    def read(
        self, share: Share, *, epoch: int = 0, first_step: int = 0, whole_steps: bool = True
    ) -> Iterator[ClickBatch]:
        """This rank's batches of one epoch; see `ClickSplit.read`."""
        total = len(self._labels_S)
        order_S = np.arange(total)
        if self._shuffle_seed is not None:
            np.random.default_rng([self._shuffle_seed, epoch]).shuffle(order_S)
        for step in range(first_step, num_steps(total, share, whole_steps=whole_steps)):
            yield self.take(order_S[share.slice_of_step(step)])

    def take(self, samples_B: IntArray) -> ClickBatch:
        """The samples at the given positions."""
        parts = [column.take(samples_B) for column in self._bags.values()]
        return ClickBatch(
            feature_names=tuple(self._bags),
            lengths_FB=np.stack([lengths for lengths, _ in parts]),
            values_L=np.concatenate([ids for _, ids in parts]),
            labels_B=self._labels_S[samples_B],
            numeric_BN=None if self._numeric_SN is None else self._numeric_SN[samples_B],
        )
