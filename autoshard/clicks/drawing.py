"""Draws the ids of all features from the tables' own distributions.

A feature that several tables look up has one list of ids, drawn for the smallest of them so
that all of its ids exist everywhere.

Shapes: F=features, B=samples, L=ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from autoshard.clicks.batches import FloatArray, IntArray
from autoshard.tables import Table
from autoshard.workloads.batches import draw_table_batch


class DrawnFeatures(NamedTuple):
    """Bags of every feature, feature-major."""

    feature_names: tuple[str, ...]
    lengths_FB: IntArray
    values_L: IntArray
    weights_L: FloatArray | None
    """float32; None unless some table is weighted."""


def smallest_tables(tables: Sequence[Table]) -> dict[str, Table]:
    """Per feature, in order of first use, the smallest table that looks it up."""
    owner: dict[str, Table] = {}
    for table in tables:
        for feature in table.feature_names:
            if feature not in owner or table.num_embeddings < owner[feature].num_embeddings:
                owner[feature] = table
    return owner


def draw_features(
    tables: Sequence[Table], num_samples: int, generator: np.random.Generator
) -> DrawnFeatures:
    """Draw what `num_samples` samples ask of all tables.

    Raises:
        InputError: the batch would not fit any memory.
    """
    owner = smallest_tables(tables)
    weighted = {f for table in tables if table.weighted for f in table.feature_names}
    drawn: dict[str, tuple[IntArray, IntArray, FloatArray | None]] = {}
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
    weight_parts: list[FloatArray] = []
    for feature in owner:
        _, values_L, own_weights = drawn[feature]
        if own_weights is None:
            own_weights = np.ones(len(values_L), dtype=np.float32)
            if feature in weighted:
                # The owner has none of its own, but a larger table asks for some.
                own_weights *= generator.random(len(values_L), dtype=np.float32) + np.float32(0.5)
        weight_parts.append(own_weights)
    return DrawnFeatures(
        tuple(owner),
        np.stack([drawn[feature][0] for feature in owner]),
        np.concatenate([drawn[feature][1] for feature in owner]),
        np.concatenate(weight_parts) if weighted else None,
    )
