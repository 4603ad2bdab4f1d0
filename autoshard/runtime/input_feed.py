"""How batches come into a training loop: taken from their source, moved, ids distributed.

A loop asks its feed for one step after the other. `InlineFeed` does the work when it is
asked; the feeds of `autoshard.runtime.pipelined_loop` do it one step ahead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from operator import length_hint
from typing import Protocol

import torch

from autoshard.errors import InputError
from autoshard.runtime.dense import TrainingBatch
from autoshard.runtime.embeddings import ShardedEmbeddings, StepInput


@dataclass(frozen=True, eq=False)
class ReadyBatch:
    """A batch on the device whose ids have reached their tables."""

    batch: TrainingBatch
    step_input: StepInput


class InputFeed(Protocol):
    """What a loop needs of a feed; all ranks call it alike."""

    source: BatchSource

    def take(self, step: int) -> ReadyBatch | None:
        """The batch of step number `step`; None on every rank if one has no more.

        Raises:
            InputError: a batch is malformed or holds an id out of range.
            CollectiveError: another rank failed, or did not answer in time.
        """

    def step_queued(self, step: int) -> None:
        """All work of step number `step` runs or waits on its device."""

    def close(self) -> None:
        """Stop; called at the end and after every error."""


class BatchSource:
    """An iterable of batches that counts what is taken from it."""

    def __init__(self, batches: Iterable[TrainingBatch]) -> None:
        """Wrap `batches`, which is not touched before `open`."""
        self._batches = batches
        self._iterator: Iterator[TrainingBatch] = iter(())
        self._num_taken = 0
        self._ended = False

    def open(self) -> None:
        """Start to iterate; a `DataLoader` starts its workers.

        Raises:
            InputError: it is not iterable.
        """
        if not hasattr(self._batches, "__iter__") and not hasattr(self._batches, "__getitem__"):
            raise InputError(
                "batches are not iterable", got=type(self._batches).__name__, allowed="an iterable"
            )
        self._iterator = iter(self._batches)

    def take(self) -> TrainingBatch | None:
        """The next batch; None at the end.

        Raises:
            InputError: it is something else than a `TrainingBatch`.
        """
        try:
            batch = next(self._iterator)
        except StopIteration:
            self._ended = True
            return None
        self._num_taken += 1
        if not isinstance(batch, TrainingBatch):
            raise InputError(
                f"item {self._num_taken} of the batches is not a batch",
                got=type(batch).__name__,
                allowed="autoshard.runtime.dense.TrainingBatch",
            )
        return batch

    @property
    def is_exhausted(self) -> bool:
        """Whether it was asked for more than it has."""
        return self._ended

    def num_unused(self, num_used: int) -> tuple[int, bool]:
        """How many batches no step used, and whether that is exact or a minimum."""
        if self._ended:
            return self._num_taken - num_used, True
        taken_in_vain = self._num_taken - num_used
        if not hasattr(self._iterator, "__len__"):
            hint = length_hint(self._iterator, -1)
            if hint >= 0:
                return taken_in_vain + hint, True
        if self._iterator is not self._batches:
            try:
                return len(self._batches) - num_used, True  # type: ignore[arg-type]
            except TypeError:
                pass
        return taken_in_vain, False


class InputStage:
    """Brings a batch from its source to the tables' owners; one thread may call it."""

    def __init__(
        self,
        embeddings: ShardedEmbeddings,
        source: BatchSource,
        device: torch.device,
        *,
        training: bool,
    ) -> None:
        self.training = training
        self._embeddings = embeddings
        self._source = source
        self._device = device

    def open(self) -> None:
        """Open the source; where that fails, the other ranks stop, too."""
        self._embeddings.input_collectives.recorder.start_step(0)
        try:
            self._source.open()
        except Exception:
            self._embeddings.announce_failure(training=self.training)
            raise

    def fetch(self, step: int, *, non_blocking: bool = False) -> TrainingBatch | None:
        """The next batch on the device; a source that fails stops the other ranks, too."""
        self._embeddings.input_collectives.recorder.start_step(step)
        try:
            batch = self._source.take()
            return None if batch is None else batch.to(self._device, non_blocking=non_blocking)
        except Exception:
            self._embeddings.announce_failure(training=self.training)
            raise

    def distribute(self, batch: TrainingBatch | None) -> ReadyBatch | None:
        """Send the ids of `batch` to the tables; None on every rank if one has no more."""
        step_input = self._embeddings.input_dist(
            None if batch is None else batch.sparse, training=self.training
        )
        if step_input is None or batch is None:
            return None
        return ReadyBatch(batch, step_input)


class InlineFeed:
    """Does everything when it is asked, one step after the other."""

    def __init__(self, stage: InputStage, source: BatchSource) -> None:
        self.source = source
        self._stage = stage
        self._opened = False

    def take(self, step: int) -> ReadyBatch | None:
        """See `InputFeed`."""
        if not self._opened:
            self._opened = True
            self._stage.open()
        return self._stage.distribute(self._stage.fetch(step))

    def step_queued(self, step: int) -> None:
        """See `InputFeed`."""

    def close(self) -> None:
        """See `InputFeed`."""
