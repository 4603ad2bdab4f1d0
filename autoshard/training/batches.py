"""Click batches as the runtime takes them."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from autoshard.clicks.batches import ClickBatch, ClickSplit, Share
from autoshard.runtime.batch import JaggedBatch
from autoshard.runtime.dense import TrainingBatch


def to_training_batch(batch: ClickBatch) -> TrainingBatch:
    """The same samples as tensors, sharing memory where possible."""
    weights_L, numeric_BN = batch.weights_L, batch.numeric_BN
    return TrainingBatch(
        JaggedBatch(
            batch.feature_names,
            torch.from_numpy(batch.lengths_FB),
            torch.from_numpy(batch.values_L),
            None if weights_L is None else torch.from_numpy(weights_L),
        ),
        torch.from_numpy(batch.labels_B),
        None if numeric_BN is None else torch.from_numpy(numeric_BN),
    )


def training_batches(
    split: ClickSplit, share: Share, *, epoch: int, first_step: int
) -> Iterator[TrainingBatch]:
    """One rank's batches of an epoch, whole steps only."""
    return map(to_training_batch, split.read(share, epoch=epoch, first_step=first_step))


def evaluation_batches(split: ClickSplit, share: Share) -> Iterator[TrainingBatch]:
    """One rank's batches of all samples; the last may be smaller than the others, or empty."""
    return map(to_training_batch, split.read(share, whole_steps=False))
