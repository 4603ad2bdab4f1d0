"""Synthetic training batches, drawn from the id distributions that the plan carries.

A batch depends on the seed, the rank and its number only, so runs of different plans for
one problem see the same data.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from autoshard.clicks.drawing import draw_features
from autoshard.errors import InputError
from autoshard.plan import ShardingPlan
from autoshard.runtime.batch import JaggedBatch
from autoshard.runtime.dense import TrainingBatch
from autoshard.tables import Table


class SyntheticBatches:
    """One rank's batches: a sequence that repeats exactly for a seed.

    Drawing takes longer than training on small machines; `num_distinct` batches are drawn
    and used in turn.
    """

    def __init__(
        self,
        plan: ShardingPlan,
        *,
        rank: int,
        num_batches: int,
        seed: int = 0,
        num_distinct: int | None = None,
    ) -> None:
        """Draw the batches.

        Args:
            plan: gives tables, their id distributions and the batch size per rank.
            rank: whose batches these are.
            num_batches: length of the sequence.
            seed: of the run.
            num_distinct: different batches, all of them by default.

        Raises:
            InputError: a number is not usable.
        """
        if num_batches < 0 or (num_distinct is not None and num_distinct < 1):
            raise InputError(
                "the number of batches is not usable",
                got=f"{num_batches}, {num_distinct} distinct",
                allowed="integers >= 0, at least 1 distinct",
            )
        self._num_batches = num_batches
        distinct = num_batches if num_distinct is None else min(num_batches, num_distinct)
        tables = [entry.table for entry in plan.tables]
        self._batches = [
            draw_batch(tables, plan.training.batch_size, np.random.default_rng([seed, rank, index]))
            for index in range(distinct)
        ]

    def __len__(self) -> int:
        return self._num_batches

    def __iter__(self) -> Iterator[TrainingBatch]:
        return (self._batches[i % len(self._batches)] for i in range(self._num_batches))


def draw_batch(
    tables: list[Table], num_samples: int, generator: np.random.Generator
) -> TrainingBatch:
    """Draw one batch of `num_samples` samples with labels that are 0 or 1 at random."""
    drawn = draw_features(tables, num_samples, generator)
    return TrainingBatch(
        JaggedBatch(
            drawn.feature_names,
            torch.from_numpy(drawn.lengths_FB),
            torch.from_numpy(drawn.values_L),
            None if drawn.weights_L is None else torch.from_numpy(drawn.weights_L),
        ),
        torch.from_numpy(generator.integers(0, 2, size=num_samples).astype(np.float32)),
    )
