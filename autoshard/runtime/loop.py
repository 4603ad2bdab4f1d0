"""The plain training loop: one step after the other, nothing overlapped.

It times the four terms of the objective and leaves everything else to `other_ms`. All
ranks stop together at the shortest one's data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from operator import length_hint

import torch
from torch import nn

from autoshard.errors import InputError
from autoshard.runtime.collectives import Collectives
from autoshard.runtime.dense import TrainingBatch, average_gradients
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.timing import StepRecord


@dataclass(frozen=True, kw_only=True)
class LoopResult:
    """What one rank did."""

    records: list[StepRecord]
    """Of the steps after the warm-up."""
    losses: list[float]
    """The local loss of every step, warm-up included."""
    stopped_early: bool
    """Whether some rank ran out of batches before the last step."""
    unused_batches: int
    """Batches of this rank that no step used, counted when ranks had to stop early."""
    unused_is_exact: bool
    """False where the source does not tell how many are left: the count is then a minimum."""


class PlainLoop:
    """Trains `dense` on top of `embeddings`."""

    def __init__(
        self,
        embeddings: ShardedEmbeddings,
        dense: nn.Module,
        dense_optimizer: torch.optim.Optimizer,
        collectives: Collectives,
    ) -> None:
        """Put the parts of a model together.

        Args:
            embeddings: the sharded tables.
            dense: called as `dense(pooled, batch)`; returns a `DenseOutput` whose loss is
                connected to `pooled` even where the batch is empty. Starts equal on every
                rank.
            dense_optimizer: of the parameters of `dense`.
            collectives: this rank's.
        """
        self.embeddings = embeddings
        self.dense = dense
        self.dense_optimizer = dense_optimizer
        self._collectives = collectives

    def train_steps(
        self,
        batches: Iterable[TrainingBatch],
        *,
        num_steps: int,
        warmup_steps: int = 0,
        progress: Callable[[int], None] | None = None,
    ) -> LoopResult:
        """Run up to `warmup_steps` + `num_steps` steps.

        Args:
            batches: this rank's; may be shorter than those of other ranks.
            num_steps: steps that are timed.
            warmup_steps: steps before them that are not.
            progress: called after every step with the number of steps done.

        Raises:
            InputError: a batch is malformed or holds an id out of range.
            CollectiveError: another rank failed, or did not answer in time.
        """
        if num_steps < 0 or warmup_steps < 0:
            raise InputError(
                "the number of steps is not usable",
                got=f"{num_steps} steps after {warmup_steps}",
                allowed="integers >= 0",
            )
        recorder = self._collectives.recorder
        recorder.records.clear()
        source = iter(batches)
        losses: list[float] = []
        total = warmup_steps + num_steps
        drawn: TrainingBatch | None = None
        stopped = False
        for step in range(total):
            recorder.start_step(step)
            drawn = self._next(source)
            step_input = self.embeddings.input_dist(None if drawn is None else drawn.sparse)
            if step_input is None or drawn is None:
                stopped = True
                break
            pooled = self.embeddings.lookup(step_input)
            loss = self.dense(pooled, drawn).loss
            self.dense_optimizer.zero_grad(set_to_none=True)
            loss.backward()
            average_gradients(self.dense, self._collectives)
            self.dense_optimizer.step()
            recorder.end_step()
            losses.append(float(loss.detach()))
            if progress is not None:
                progress(step + 1)
        unused, exact = _count_unused(batches, source, len(losses), drawn) if stopped else (0, True)
        return LoopResult(
            records=recorder.records[warmup_steps:],
            losses=losses,
            stopped_early=stopped,
            unused_batches=unused,
            unused_is_exact=exact,
        )

    def _next(self, source: object) -> TrainingBatch | None:
        """The next batch; a source that fails stops the other ranks, too."""
        try:
            return next(source, None)  # type: ignore[call-overload, no-any-return]
        except Exception:
            self.embeddings.announce_failure()
            raise


def _count_unused(
    batches: Iterable[TrainingBatch], source: object, used: int, drawn: TrainingBatch | None
) -> tuple[int, bool]:
    """How many batches no step used, and whether that is exact."""
    if drawn is None:
        return 0, True
    hint = length_hint(source, -1)
    if hint >= 0 and not hasattr(source, "__len__"):
        return 1 + hint, True
    try:
        return len(batches) - used, True  # type: ignore[arg-type]
    except TypeError:
        return 1, False
