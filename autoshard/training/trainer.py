"""The trainer: epochs of steps, with evaluations and checkpoints in between.

Every rank runs the same code on the same numbers: all ranks train in segments that end
where the next evaluation or checkpoint is due, and meet after each to average losses.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from autoshard.clicks.batches import ClickData, Share, num_steps
from autoshard.errors import InputError
from autoshard.plan import ShardingPlan
from autoshard.runtime.collectives import Collectives
from autoshard.runtime.dense import TrainingBatch
from autoshard.runtime.loop import TrainingLoop
from autoshard.runtime.timing import StepRecord
from autoshard.runtime.together import together
from autoshard.training.batches import evaluation_batches, training_batches
from autoshard.training.checkpoint import save_checkpoint
from autoshard.training.curve import write_curve
from autoshard.training.manifest import Manifest
from autoshard.training.metrics import auc, log_loss
from autoshard.training.model import TrainedModel
from autoshard.training.options import TrainingOptions
from autoshard.training.position import Position, check_identity, run_identity
from autoshard.training.progress import Progress
from autoshard.training.restore import check_files, load_dense, load_shards

#: Steps between two meetings of the ranks, at most.
MAX_SEGMENT_STEPS = 200


@dataclass(kw_only=True)
class TrainerParts:
    """What a trainer works with, on one rank."""

    plan: ShardingPlan
    options: TrainingOptions
    data: ClickData
    model: TrainedModel
    loop: TrainingLoop
    collectives: Collectives
    """Patient ones, whose time limit covers reading, writing and evaluating."""
    report: Callable[[str], None]
    """Takes lines of progress."""


class Trainer:
    """Trains one model under one plan on one rank; see the module's first lines."""

    def __init__(self, parts: TrainerParts) -> None:
        """Start at the beginning; `resume` goes elsewhere."""
        self._parts = parts
        self.position = Position()
        self.losses: list[float] = []
        """Of every step of this process, the mean over ranks."""
        self.records: list[StepRecord] = []
        """Clock readings of the last segment, on this rank."""
        self.notes: list[str] = []
        self.checkpoint: Path | None = None
        """The newest checkpoint that was written."""
        self._saved: tuple[int, int, int] | None = None
        options, collectives = parts.options, parts.collectives
        self._share = Share(
            batch_size=parts.plan.training.batch_size,
            rank=collectives.rank,
            world_size=collectives.world_size,
        )
        samples = parts.data.train.num_samples
        self._epoch_steps = (
            None if samples is None else num_steps(samples, self._share, whole_steps=True)
        )
        if self._epoch_steps == 0:
            raise InputError(
                f"data set {parts.data.name} does not fill a single step",
                got=f"{samples} samples",
                allowed=f"at least {self._share.global_batch_size}: the batch size of all ranks",
                remedy="plan for a smaller batch size",
            )
        self._total = options.max_steps
        if self._epoch_steps is not None:
            whole = self._epoch_steps * options.epochs
            self._total = whole if self._total is None else min(whole, self._total)

    def resume(self, manifest: Manifest) -> None:
        """Go on from a checkpoint, whatever plan wrote it; every rank must call it.

        Raises:
            ArtifactError: it is of other tables or another run, or damaged.
        """
        parts = self._parts
        check_identity(manifest, parts.options)
        manifest.check_plan(parts.plan)
        report = self._reporter("checking the checkpoint")
        check_files(manifest, parts.collectives, lambda done, total: report())

        def load() -> None:
            load_shards(manifest, parts.model.embeddings.local_shards())
            parts.model.load_dense_state(load_dense(manifest))

        together(parts.collectives, "loading a checkpoint", load)
        parts.model.set_learning_rates(manifest.state["learning_rate"], None)
        self.position = Position.from_json(manifest.state["position"])
        self.checkpoint = manifest.folder
        repeated = self.position.epoch_samples % self._share.global_batch_size
        if repeated:
            # Only where the plan changed the samples per step.
            self.notes.append(
                f"{repeated} samples come again: the checkpoint ends within a step of "
                f"{self._share.global_batch_size} samples"
            )
            self.position.epoch_samples -= repeated
            self.position.samples -= repeated

    def train(self) -> None:
        """Train to the end; every rank must call it.

        Raises:
            AutoshardError: of the data, of a rank, or of a place to write to.
        """
        position = self.position
        start = position.step
        while position.epoch < self._parts.options.epochs and not self._finished():
            self._train_epoch()
        if position.step > start and (not position.curve or position.pending_steps):
            self._evaluate()
        if position.step > start or self.checkpoint is None:
            self._save()

    def _train_epoch(self) -> None:
        position, options = self.position, self._parts.options
        first_step = position.epoch_samples // self._share.global_batch_size
        batches = training_batches(
            self._parts.data.train, self._share, epoch=position.epoch, first_step=first_step
        )
        ended = False
        while not (ended or self._finished()):
            wanted = self._segment_steps(first_step)
            done = self._train_segment(batches, wanted) if wanted else 0
            first_step += done
            ended = done < wanted or first_step == self._epoch_steps
            if ended:
                if not first_step:
                    raise InputError(
                        f"data set {self._parts.data.name} does not fill a single step",
                        allowed=f"at least {self._share.global_batch_size} samples",
                    )
                position.epoch += 1
                position.epoch_samples = 0
            every = options.eval_every
            due = ended if every is None else position.step % every == 0
            if due and position.pending_steps:
                self._evaluate()
            if options.checkpoint_every and position.step % options.checkpoint_every == 0:
                self._save()

    def _finished(self) -> bool:
        limit = self._parts.options.max_steps
        return limit is not None and self.position.step >= limit

    def _segment_steps(self, first_step: int) -> int:
        """Steps until something else than training is due."""
        options, step = self._parts.options, self.position.step
        periods = (options.eval_every, options.checkpoint_every)
        ahead = [MAX_SEGMENT_STEPS, *(period - step % period for period in periods if period)]
        if options.max_steps is not None:
            ahead.append(options.max_steps - step)
        if self._epoch_steps is not None:
            ahead.append(self._epoch_steps - first_step)
        return min(ahead)

    def _train_segment(self, batches: Iterator[TrainingBatch], wanted: int) -> int:
        """Train up to `wanted` steps; fewer only where the epoch ends."""
        parts, position = self._parts, self.position
        start, before = time.monotonic(), position.step
        epoch = f"training, epoch {position.epoch + 1} of {parts.options.epochs}"

        def progress(done: int) -> None:
            rate = done * self._share.global_batch_size / max(1e-9, time.monotonic() - start)
            self._tell(epoch, before + done, rate)

        # Cut off here, so that a loop that reads ahead leaves the rest for the next segment.
        result = parts.loop.train_steps(
            islice(batches, wanted), num_steps=wanted, progress=progress
        )
        elapsed_s = time.monotonic() - start
        gathered: list[tuple[list[float], float]] = parts.collectives.gather_objects(
            "losses", (result.losses, elapsed_s)
        )
        losses = [
            sum(step) / len(gathered) for step in zip(*(own for own, _ in gathered), strict=True)
        ]
        if not all(map(math.isfinite, losses)):
            first = next(i for i, loss in enumerate(losses) if not math.isfinite(loss))
            raise InputError(
                f"training diverged: the loss of step {position.step + first} is not finite",
                got=losses[first],
                remedy="lower the learning rates",
            )
        self.losses.extend(losses)
        self.records = result.records or self.records
        position.advance(
            losses, self._share.global_batch_size, max(seconds for _, seconds in gathered)
        )
        return len(losses)

    def _evaluate(self) -> None:
        parts = self._parts
        report = self._reporter("evaluating")
        batches = evaluation_batches(parts.data.evaluation, self._share)
        if parts.options.eval_samples is not None:
            steps = -(-parts.options.eval_samples // self._share.global_batch_size)
            batches = islice(batches, steps)
        result = parts.loop.evaluate(batches, progress=lambda step: report())
        own = (result.labels_N.numpy(), result.logits_N.numpy())
        gathered = parts.collectives.gather_objects("evaluation", own)
        labels = np.concatenate([labels for labels, _ in gathered])
        logits = np.concatenate([logits for _, logits in gathered])
        per_epoch = self._epoch_steps and self._epoch_steps * self._share.global_batch_size
        self.position.add_row(auc(labels, logits), log_loss(labels, logits), per_epoch)
        if parts.options.out_dir is not None and parts.collectives.rank == 0:
            write_curve(parts.options.out_dir, self.position.curve)

    def _save(self) -> None:
        parts, position = self._parts, self.position
        saved = (position.epoch, position.step, len(position.curve))
        if parts.options.checkpoint is None or saved == self._saved:
            return
        report = self._reporter("writing a checkpoint")
        self.checkpoint = save_checkpoint(
            parts.options.checkpoint,
            step=position.step,
            plan=parts.plan,
            shards=parts.model.embeddings.local_shards(),
            dense=parts.model.dense_state(),
            state={
                "identity": run_identity(parts.options),
                "position": position.to_json(),
                "learning_rate": parts.model.learning_rate,
            },
            collectives=parts.collectives,
            keep=parts.options.keep_checkpoints,
            progress=lambda done, total: report(),
        )
        self._saved = saved

    def _reporter(self, what: str) -> Callable[[], None]:
        self._tell(what, self.position.step)
        return lambda: self._tell(what, self.position.step)

    def _tell(self, what: str, step: int, samples_per_s: float | None = None) -> None:
        progress = Progress(what=what, step=step, total=self._total, samples_per_s=samples_per_s)
        self._parts.report(progress.line())
