"""autoshard's runtime as a contender."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard.errors import InputError
from autoshard.runtime.allocator import keep_freed_memory
from autoshard.runtime.batch import JaggedBatch
from autoshard.runtime.collectives import Collectives
from autoshard.runtime.dense import DenseOutput, TrainingBatch
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.loop import PlainLoop, TrainingLoop
from autoshard.runtime.pipelined_loop import PipelinedLoop
from benchmarks.runtime_speed.cases import (
    SOURCE_WAIT_S,
    WAITING,
    CaseData,
    read_case,
    read_labels,
)
from benchmarks.runtime_speed.dense_layers import DenseLayers, make_optimizer, mean_loss
from benchmarks.runtime_speed.sides import COLLECTIVE_TIMEOUT_S


def make(variant: str, folder: Path, rank: int) -> Any:
    """The contender `plain`, or `loop` and `pipelined` with dense layers; see `WAITING`."""
    keep_freed_memory()  # as every rank of `autoshard run`
    case = read_case(folder, rank)
    collectives = Collectives(
        rank,
        dist.get_world_size(),
        device=torch.device("cpu"),
        timeout_s=COLLECTIVE_TIMEOUT_S,
    )
    if variant == "plain":
        return PlainStep(case, collectives)
    kind, waits = variant.removesuffix(WAITING), variant.endswith(WAITING)
    if kind in ("loop", "pipelined"):
        labels = read_labels(folder, rank)
        return LoopSteps(case, labels, collectives, pipelined=kind == "pipelined", waits=waits)
    raise InputError("contender is not known", got=f"autoshard/{variant}")


class PlainStep:
    """Forward and backward of `ShardedEmbeddings`, from given gradients of the outputs."""

    def __init__(self, case: CaseData, collectives: Collectives) -> None:
        self._case = case
        self.recorder = collectives.recorder
        self._embeddings = ShardedEmbeddings(case.plan, collectives, seed=case.seed)
        self._gradients = list(case.gradient_BC.split(case.dims, dim=1))
        self._pooled: dict[str, Tensor] = {}

    def step(self, index: int) -> None:
        """See `Contender`."""
        raw = self._case.batches[index % len(self._case.batches)]
        self.recorder.start_step(index)
        batch = JaggedBatch(self._case.feature_names, raw.lengths_FB, raw.values_L)
        self._pooled = self._embeddings(batch)
        torch.autograd.backward(list(self._pooled.values()), self._gradients)
        self.recorder.end_step()

    def outputs(self) -> Tensor:
        """See `Contender`."""
        return torch.cat(list(self._pooled.values()), dim=1)


class Dense(nn.Module):
    """The common dense layers, as a training loop calls them."""

    def __init__(self, columns: int) -> None:
        super().__init__()
        self.layers = DenseLayers(columns)

    def forward(self, pooled: Mapping[str, Tensor], batch: TrainingBatch) -> DenseOutput:
        """Loss and logits of the local batch."""
        logits_B = self.layers(torch.cat(list(pooled.values()), dim=1))
        return DenseOutput(mean_loss(logits_B, batch.labels_B), logits_B)


class LoopSteps:
    """A training loop with dense layers: `PlainLoop` or `PipelinedLoop`."""

    def __init__(
        self,
        case: CaseData,
        labels: list[Tensor],
        collectives: Collectives,
        *,
        pipelined: bool,
        waits: bool,
    ) -> None:
        self._wait_s = SOURCE_WAIT_S if waits else 0.0
        self._case = case
        self._labels = labels
        # Only the pipelined loop runs its input beside the rest, on a group of its own.
        embeddings = ShardedEmbeddings(
            case.plan,
            collectives,
            input_collectives=collectives.new_group() if pipelined else None,
            seed=case.seed,
        )
        dense = Dense(sum(case.dims))
        optimizer = make_optimizer(dense.parameters())
        kind = PipelinedLoop if pipelined else PlainLoop
        self._loop: TrainingLoop = kind(embeddings, dense, optimizer, collectives)
        self._losses: list[float] = []

    def run(self, num_steps: int) -> None:
        """See `BlockContender`."""
        result = self._loop.train_steps(self._batches(num_steps), num_steps=num_steps)
        self._losses = result.losses

    def losses(self) -> Tensor:
        """See `BlockContender`."""
        return torch.tensor(self._losses)

    def _batches(self, num_steps: int) -> Iterator[TrainingBatch]:
        """As a loader would deliver them: put together when they are asked for."""
        case = self._case
        for step in range(num_steps):
            index = step % len(case.batches)
            raw = case.batches[index]
            if self._wait_s:
                time.sleep(self._wait_s)
            yield TrainingBatch(
                JaggedBatch(case.feature_names, raw.lengths_FB, raw.values_L), self._labels[index]
            )
