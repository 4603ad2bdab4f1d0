"""Plain PyTorch as a contender: `nn.EmbeddingBag` in `DistributedDataParallel`.

What one has without any sharding library: every rank holds every table, and all-reduces
the gradients, `dense` ones of whole tables or `sparse` ones of the touched rows.

Shapes: B=samples of this rank, C=columns of all outputs together, L=ids.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.errors import InputError
from autoshard.problem import Optimizer
from autoshard.runtime.initialization import initialize_rows
from benchmarks.runtime_speed.cases import CaseData, RawBatch, read_case


def make(variant: str, folder: Path, rank: int) -> Any:
    """The contender `dense` or `sparse`, called after the gradients."""
    if variant not in ("dense", "sparse"):
        raise InputError("contender is not known", got=f"pytorch/{variant}")
    case = read_case(folder, rank)
    optimizer = case.plan.training.optimizer
    if optimizer is not Optimizer.SGD:
        raise InputError(
            "plain PyTorch has no optimizer that computes the same",
            got=optimizer.value,
            allowed=Optimizer.SGD.value,
        )
    return PlainStep(case, sparse=variant == "sparse")


class Bags(nn.Module):
    """One `nn.EmbeddingBag` per table, each with one feature."""

    def __init__(self, case: CaseData, *, sparse: bool) -> None:
        super().__init__()
        self.bags = nn.ModuleList()
        for entry in case.plan.tables:
            table = entry.table
            weights = torch.empty(table.num_embeddings, table.embedding_dim)
            initialize_rows(weights, table, seed=case.seed)
            self.bags.append(
                nn.EmbeddingBag(
                    table.num_embeddings,
                    table.embedding_dim,
                    mode="sum",
                    sparse=sparse,
                    include_last_offset=True,
                    _weight=weights,
                )
            )

    def forward(self, batch: RawBatch) -> list[Tensor]:
        """Pooled outputs in the features' order, float32 [B, columns] each."""
        lengths_FB = batch.lengths_FB
        num_features, batch_size = lengths_FB.shape
        offsets = torch.zeros(num_features, batch_size + 1, dtype=torch.int64)
        torch.cumsum(lengths_FB, 1, out=offsets[:, 1:])
        values = batch.values_L.split(offsets[:, -1].tolist())
        return [
            bag(ids_L, starts)
            for bag, ids_L, starts in zip(self.bags, values, offsets, strict=True)
        ]


class PlainStep:
    """Forward, backward from given gradients of the outputs, and the optimizer's step.

    `DistributedDataParallel` averages gradients over ranks, as autoshard does.
    """

    def __init__(self, case: CaseData, *, sparse: bool) -> None:
        self._case = case
        # Gradients in place of the buckets save a copy; sparse ones never lie in a bucket.
        self._model = nn.parallel.DistributedDataParallel(
            Bags(case, sparse=sparse), gradient_as_bucket_view=not sparse
        )
        self._optimizer = torch.optim.SGD(
            self._model.parameters(), lr=case.plan.training.learning_rate
        )
        self._gradients = list(case.gradient_BC.split(case.dims, dim=1))
        self._pooled: list[Tensor] = []

    def step(self, index: int) -> None:
        """See `Contender`."""
        raw = self._case.batches[index % len(self._case.batches)]
        self._pooled = self._model(raw)
        self._optimizer.zero_grad()
        torch.autograd.backward(self._pooled, self._gradients)
        self._optimizer.step()

    def outputs(self) -> Tensor:
        """See `Contender`."""
        return torch.cat(self._pooled, dim=1)
