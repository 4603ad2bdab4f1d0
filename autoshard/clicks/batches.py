"""What a click data set gives: batches, and who of all ranks reads which samples.

The samples of an epoch form one sequence, whatever the number of ranks. Step s takes the
next W·B samples of it, and rank r of W the r-th B of these: W ranks with batches of B see
together exactly what one process with batches of W·B sees, in every step.

Shapes: F=features, B=samples of one rank, L=ids, N=numeric features.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InputError, PlanError
from autoshard.suggestions import did_you_mean
from autoshard.tables import Table

IntArray = NDArray[np.int64]
FloatArray = NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, eq=False)
class ClickBatch:
    """Some samples, without any framework's types."""

    feature_names: tuple[str, ...]
    lengths_FB: IntArray
    """Ids per bag, int64 [F, B]."""
    values_L: IntArray
    """Ids, int64 [L]: all bags of the first feature, then the second, …"""
    labels_B: FloatArray
    """1 for a click, else 0; float32 [B]."""
    numeric_BN: FloatArray | None = None
    """float32 [B, N]; None for a data set without numeric features."""
    weights_L: FloatArray | None = None
    """One weight per id, float32 [L]."""

    @property
    def num_samples(self) -> int:
        """B."""
        return len(self.labels_B)


@dataclass(frozen=True, kw_only=True)
class Share:
    """Which samples of every step one rank reads."""

    batch_size: int
    """B, >= 1."""
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        if self.batch_size < 1 or not 0 <= self.rank < self.world_size:
            raise InputError(
                "a share of a data set is not usable",
                got=f"batches of {self.batch_size} on rank {self.rank} of {self.world_size}",
                allowed="batches of at least 1 on a rank below world_size",
            )

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self.batch_size * self.world_size

    def slice_of_step(self, step: int) -> slice:
        """Where this rank's samples of a step lie in the epoch."""
        start = step * self.global_batch_size + self.rank * self.batch_size
        return slice(start, start + self.batch_size)


class ClickSplit(Protocol):
    """The training or the evaluation part of a data set."""

    num_samples: int | None
    """Per epoch; None where only reading to the end tells."""

    def read(
        self, share: Share, *, epoch: int = 0, first_step: int = 0, whole_steps: bool = True
    ) -> Iterator[ClickBatch]:
        """This rank's batches of one epoch.

        Args:
            share: whose.
            epoch: decides the order, where there is one to decide.
            first_step: steps to leave out, because they were done before.
            whole_steps: leave out the samples at the end that fill no step of all ranks.
                Otherwise all are read, and the last batch may be smaller, even empty; every
                rank still gets as many batches as the others.
        """


@dataclass(frozen=True, kw_only=True)
class ClickData:
    """A data set."""

    name: str
    feature_names: tuple[str, ...]
    num_numeric: int
    """N."""
    train: ClickSplit
    evaluation: ClickSplit
    description: str
    """One line: what it is, what counts as a click, and how it was split."""


def num_steps(num_samples: int, share: Share, *, whole_steps: bool) -> int:
    """Steps of an epoch of `num_samples` samples."""
    size = share.global_batch_size
    return num_samples // size if whole_steps else -(-num_samples // size)


def check_features(
    tables: Sequence[Table],
    num_ids: dict[str, int],
    name: str,
    *,
    weighted: bool = False,
) -> None:
    """Refuse tables that a data set has no ids for, or that are too small for its ids.

    Args:
        tables: the plan's.
        num_ids: of each feature of the data set, how many ids there are, from 0 on.
        name: of the data set.
        weighted: whether its ids carry weights.

    Raises:
        PlanError: names the table, the feature and what the data set has.
    """
    for table in tables:
        for feature in table.feature_names:
            if feature not in num_ids:
                raise PlanError(
                    f"table {table.name!r}: data set {name} has no feature {feature!r}",
                    allowed=", ".join(num_ids),
                    remedy=did_you_mean(feature, num_ids)
                    or "train with the data set that the plan's tables were made for",
                )
            if table.num_embeddings < num_ids[feature]:
                raise PlanError(
                    f"table {table.name!r} is too small for feature {feature!r} of data set {name}",
                    got=f"{table.num_embeddings} rows",
                    allowed=f"at least {num_ids[feature]}",
                    remedy="plan again with the data set's own tables",
                )
        if table.weighted and not weighted:
            raise PlanError(
                f"table {table.name!r} is weighted, but the ids of data set {name} carry no weights"
            )
