"""Training loops: what they return, what a step is, and the plain one, nothing overlapped.

`PlainLoop` times the four terms of the objective and leaves everything else to
`other_ms`; `autoshard.runtime.pipelined_loop` computes the same numbers faster. In both,
all ranks stop together at the shortest one's data.

Shapes: N=samples of this rank over all steps.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import ClassVar

import torch
from torch import Tensor, nn

from autoshard.errors import InputError
from autoshard.runtime.collectives import Collectives
from autoshard.runtime.dense import TrainingBatch
from autoshard.runtime.dense_replicas import DenseReplicas, checked_output
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.input_feed import (
    BatchSource,
    InlineFeed,
    InputFeed,
    InputStage,
    ReadyBatch,
)
from autoshard.runtime.timing import Phase, StepRecord

Progress = Callable[[int], None]
"""Called after every step with the number of steps done."""


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """What one rank did."""

    records: list[StepRecord]
    """Of the steps after the warm-up."""
    losses: list[float]
    """The local loss of every step, warm-up included."""
    stopped_early: bool
    """Whether some rank ran out of batches before the last step; where no number of steps
    was given, before this rank did."""
    unused_batches: int
    """Batches of this rank that no step used, counted when ranks had to stop early."""
    unused_is_exact: bool
    """False where the source does not tell how many are left: the count is then a minimum."""


@dataclass(frozen=True, kw_only=True, eq=False)
class EvaluationResult:
    """What the model says about one rank's batches."""

    logits_N: Tensor
    """float32 on CPU, in the order of the batches."""
    labels_N: Tensor
    """float32 on CPU."""
    loss: float
    """Mean over steps of the mean over ranks of the local losses, as in training and equal
    on every rank; nan without any step."""
    num_steps: int
    """Batches of each rank."""
    stopped_early: bool
    """Whether some rank ran out of batches before this one."""
    unused_batches: int
    """As in `LoopResult`."""
    unused_is_exact: bool
    """As in `LoopResult`."""


class TrainingLoop(ABC):
    """What both loops share; they differ in how batches come in, and in what is recorded."""

    _times_terms: ClassVar[bool]
    """Whether the four terms of the objective are recorded."""

    def __init__(
        self,
        embeddings: ShardedEmbeddings,
        dense: nn.Module,
        dense_optimizer: torch.optim.Optimizer | None,
        collectives: Collectives,
    ) -> None:
        """Put the parts of a model together; every rank must, in the same order.

        Args:
            embeddings: the sharded tables.
            dense: called as `dense(pooled, batch)`; returns a `DenseOutput`. Takes rank
                0's weights on every rank.
            dense_optimizer: of the parameters of `dense`; None if it has none.
            collectives: the ones that `embeddings` was built with.

        Raises:
            InputError: the dense layers are not where the tables are.
            CollectiveError: other ranks have other dense layers, or did not answer in time.
        """
        self.embeddings = embeddings
        self.dense = dense
        self.dense_optimizer = dense_optimizer
        self._collectives = collectives
        self._replicas = DenseReplicas(dense, collectives)

    def train_steps(
        self,
        batches: Iterable[TrainingBatch],
        *,
        num_steps: int | None,
        warmup_steps: int = 0,
        progress: Progress | None = None,
    ) -> LoopResult:
        """Run up to `warmup_steps` + `num_steps` steps.

        Takes no more batches than it trains on, save that a rank finds out that another
        one has no more only when it has drawn one itself.

        Args:
            batches: this rank's; may be shorter than those of other ranks.
            num_steps: steps that are timed; None to go on until the data of some rank end.
            warmup_steps: steps before them that are not.
            progress: called after every step with the number of steps done.

        Raises:
            InputError: a batch is malformed or holds an id out of range, or the dense
                layers return what they may not.
            CollectiveError: another rank failed, or did not answer in time.
        """
        if not all(_is_count(number) for number in (num_steps or 0, warmup_steps)):
            raise InputError(
                "the number of steps is not usable",
                got=f"{num_steps} steps after {warmup_steps}",
                allowed="integers >= 0",
            )
        limit = None if num_steps is None else warmup_steps + num_steps
        records: list[StepRecord] = []
        losses: list[float | Tensor] = []
        with torch.enable_grad(), self._feed(batches, limit) as feed:
            for step, ready in self._steps(feed, limit):
                loss = self._train(ready)
                # Reading it would wait for a CUDA device; on CPU, tensors would pile up.
                losses.append(loss if loss.is_cuda else float(loss))
                feed.step_queued(step)
                records.append(self._record())
                if progress is not None:
                    progress(step + 1)
        self._replicas.share_buffers()
        stopped_early, unused, exact = _end_of(feed.source, len(losses), limit)
        return LoopResult(
            records=records[warmup_steps:],
            losses=[float(loss) for loss in losses],
            stopped_early=stopped_early,
            unused_batches=unused,
            unused_is_exact=exact,
        )

    def evaluate(
        self, batches: Iterable[TrainingBatch], *, progress: Progress | None = None
    ) -> EvaluationResult:
        """Run the model on `batches` without changing it.

        The dense layers are in evaluation mode meanwhile.

        Args:
            batches: this rank's; may be shorter than those of other ranks.
            progress: called after every step with the number of steps done.

        Raises:
            InputError: as for `train_steps`.
            CollectiveError: as for `train_steps`.
        """
        logits: list[Tensor] = [torch.zeros(0)]
        labels: list[Tensor] = [torch.zeros(0)]
        losses: list[float] = []
        with torch.no_grad(), _evaluation_mode(self.dense), self._feed(batches, None) as feed:
            for step, ready in self._steps(feed, None):
                pooled = self.embeddings.lookup(ready.step_input)
                output = checked_output(self.dense(pooled, ready.batch), ready.batch)
                feed.step_queued(step)
                # Copies: a loader's own tensors may each hold a file open.
                logits.append(output.logits_B.to("cpu", torch.float32, copy=True))
                labels.append(ready.batch.labels_B.to("cpu", torch.float32, copy=True))
                losses.append(float(output.loss))
                if progress is not None:
                    progress(step + 1)
        stopped_early, unused, exact = _end_of(feed.source, len(losses), None)
        total = torch.tensor([math.fsum(losses)], dtype=torch.float64)
        total = total.to(self._collectives.device)
        self._collectives.all_reduce_sum(Phase.CONTROL, total)
        parts = len(losses) * self._collectives.world_size
        return EvaluationResult(
            logits_N=torch.cat(logits),
            labels_N=torch.cat(labels),
            loss=float(total) / parts if parts else math.nan,
            num_steps=len(losses),
            stopped_early=stopped_early,
            unused_batches=unused,
            unused_is_exact=exact,
        )

    @abstractmethod
    def _open(self, source: BatchSource, stage: InputStage, limit: int | None) -> InputFeed:
        """How batches come in; up to `limit` of them will be asked for."""

    @abstractmethod
    def _record(self) -> StepRecord:
        """End the step's record, and return what is to be kept of it."""

    @contextmanager
    def _feed(self, batches: Iterable[TrainingBatch], limit: int | None) -> Iterator[InputFeed]:
        source = BatchSource(batches)
        stage = InputStage(
            self.embeddings, source, self._collectives.device, training=torch.is_grad_enabled()
        )
        for collectives in (self._collectives, self.embeddings.input_collectives):
            collectives.recorder.waits_for_device = self._times_terms
        feed = self._open(source, stage, limit)
        try:
            yield feed
        finally:
            feed.close()

    def _steps(self, feed: InputFeed, limit: int | None) -> Iterator[tuple[int, ReadyBatch]]:
        recorder = self._collectives.recorder
        recorder.records.clear()
        for step in count():
            if step == limit:
                return
            recorder.start_step(step)
            ready = feed.take(step)
            if ready is None:
                return
            yield step, ready

    def _train(self, ready: ReadyBatch) -> Tensor:
        """One step; the local loss, a scalar without gradient."""
        pooled = self.embeddings.lookup(ready.step_input)
        loss = self._replicas.forward(pooled, ready.batch).loss
        self._replicas.backward(loss)
        if self.dense_optimizer is not None:
            self.dense_optimizer.step()
        return loss.detach()


class PlainLoop(TrainingLoop):
    """Trains `dense` on top of `embeddings`, one thing after the other."""

    _times_terms = True

    def _open(self, source: BatchSource, stage: InputStage, limit: int | None) -> InputFeed:
        return InlineFeed(stage, source)

    def _record(self) -> StepRecord:
        recorder = self._collectives.recorder
        recorder.end_step()
        record = recorder.records[-1]
        input_recorder = self.embeddings.input_collectives.recorder
        if input_recorder is not recorder:
            input_recorder.end_step()
            before = input_recorder.records.pop()
            record.collectives_ns.update(before.collectives_ns)
            for kind, spent_ns in before.compute_ns.items():
                record.compute_ns[kind] = record.compute_ns.get(kind, 0) + spent_ns
        return record


@contextmanager
def _evaluation_mode(module: nn.Module) -> Iterator[None]:
    """Put `module` into evaluation mode, and every part of it back into its own."""
    before = [(part, part.training) for part in module.modules()]
    module.eval()
    try:
        yield
    finally:
        for part, training in before:
            part.training = training


def _is_count(number: object) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= 0


def _end_of(source: BatchSource, num_used: int, limit: int | None) -> tuple[bool, int, bool]:
    """Whether ranks stopped early, how many batches that left unused, and if that is exact."""
    if num_used == limit:
        return False, 0, True
    unused, exact = source.num_unused(num_used)
    return limit is not None or not source.is_exhausted, unused, exact
