"""Synthetic training batches, drawn from the id distributions that the plan carries.

A batch depends on the seed, the rank and its number only, so runs of different plans for
one problem see the same data. A feature that several tables look up has one list of ids,
drawn for the smallest of them so that all of its ids exist everywhere.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from autoshard.errors import InputError
from autoshard.plan import ShardingPlan
from autoshard.runtime.batch import JaggedBatch
from autoshard.runtime.dense import TrainingBatch
from autoshard.tables import Table
from autoshard.workloads.batches import IntArray, WeightArray, draw_table_batch


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
    owner: dict[str, Table] = {}
    for table in tables:
        for feature in table.feature_names:
            if feature not in owner or table.num_embeddings < owner[feature].num_embeddings:
                owner[feature] = table
    weighted = {f for table in tables if table.weighted for f in table.feature_names}
    drawn: dict[str, tuple[IntArray, IntArray, WeightArray | None]] = {}
    for table in tables:
        if not any(owner[feature] is table for feature in table.feature_names):
            continue
        batch = draw_table_batch(table, num_samples, generator)
        cuts = np.cumsum(batch.lengths.sum(axis=1))[:-1]
        values = np.split(batch.values, cuts)
        weights = None if batch.weights is None else np.split(batch.weights, cuts)
        for index, feature in enumerate(table.feature_names):
            if owner[feature] is table:
                part = None if weights is None else weights[index]
                drawn[feature] = (batch.lengths[index], values[index], part)
    weight_parts: list[WeightArray] = []
    for feature in owner:
        _, values_L, own_weights = drawn[feature]
        if own_weights is None:
            own_weights = np.ones(len(values_L), dtype=np.float32)
            if feature in weighted:
                # The owner has none of its own, but a larger table asks for some.
                own_weights *= generator.random(len(values_L), dtype=np.float32) + np.float32(0.5)
        weight_parts.append(own_weights)
    return TrainingBatch(
        JaggedBatch(
            tuple(owner),
            torch.from_numpy(np.stack([drawn[feature][0] for feature in owner])),
            torch.from_numpy(np.concatenate([drawn[feature][1] for feature in owner])),
            torch.from_numpy(np.concatenate(weight_parts)) if weighted else None,
        ),
        torch.from_numpy(generator.integers(0, 2, size=num_samples).astype(np.float32)),
    )
