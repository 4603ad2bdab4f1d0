"""A single-process trainer in plain torch, to compare the sharded runtime with.

Imports nothing of autoshard. Tables are dense parameters with autograd; optimizers are
written out from their published formulas (Duchi et al. 2011 for Adagrad; one state per
row, the mean of the squared gradient over the row, for its row-wise form).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass
class ReferenceTable:
    weights: Tensor  # [rows, dim], fp32 or fp16
    features: list[str]
    mean: bool = False
    weighted: bool = False
    state: Tensor | None = None


@dataclass
class ReferenceBatch:
    """One rank's batch: {feature: one list of ids per sample}, and weights alike."""

    bags: dict[str, list[list[int]]]
    weights: dict[str, list[list[float]]]
    labels: list[float] = field(default_factory=list)

    @property
    def num_samples(self) -> int:
        return len(next(iter(self.bags.values())))


class ReferenceTrainer:
    def __init__(
        self,
        tables: dict[str, ReferenceTable],
        *,
        optimizer: str,
        learning_rate: float,
        eps: float,
        dense: list[tuple[Tensor, Tensor]] | None = None,
    ) -> None:
        self.tables = tables
        self.optimizer, self.learning_rate, self.eps = optimizer, learning_rate, eps
        self.dense = [
            (w.clone().requires_grad_(), b.clone().requires_grad_()) for w, b in dense or []
        ]
        for table in tables.values():
            rows, dim = table.weights.shape
            if optimizer == "rowwise_adagrad":
                table.state = torch.zeros(rows)
            elif optimizer == "adagrad":
                table.state = torch.zeros(rows, dim)

    def pooled(self, weights: dict[str, Tensor], batch: ReferenceBatch) -> dict[str, Tensor]:
        """{"table/feature": [samples, dim]}."""
        out = {}
        for name, table in self.tables.items():
            for feature in table.features:
                rows = []
                for sample, bag in enumerate(batch.bags[feature]):
                    row = weights[name].new_zeros(weights[name].shape[1])
                    for position, index in enumerate(bag):
                        scale = batch.weights[feature][sample][position] if table.weighted else 1.0
                        row = row + scale * weights[name][index]
                    rows.append(row / len(bag) if table.mean and bag else row)
                dim = weights[name].shape[1]
                out[f"{name}/{feature}"] = torch.stack(rows) if rows else torch.zeros(0, dim)
        return out

    def step(self, batches: list[ReferenceBatch], coefficients: dict[str, Tensor]) -> float:
        """One step on the batches of all ranks: the loss is the mean of the ranks' losses.

        With dense layers, a rank's loss is the mean logistic loss; otherwise it is the
        mean over samples of the outputs times `coefficients`, plus half their square if
        `coefficients` holds the key "quadratic".
        """
        leaves = {
            n: t.weights.detach().to(torch.float32).requires_grad_() for n, t in self.tables.items()
        }
        total = torch.zeros(())
        for batch in batches:
            if batch.num_samples:
                total = total + self._loss(self.pooled(leaves, batch), batch, coefficients)
        total = total / len(batches)
        if total.requires_grad:
            total.backward()
        for name, table in self.tables.items():
            gradient = leaves[name].grad
            if gradient is not None:
                self._update(table, gradient)
        for layer in self.dense:
            for parameter in layer:
                if parameter.grad is not None:
                    with torch.no_grad():
                        parameter -= self.learning_rate * parameter.grad
                    parameter.grad = None
        return float(total.detach())

    def _loss(
        self, pooled: dict[str, Tensor], batch: ReferenceBatch, coefficients: dict[str, Tensor]
    ) -> Tensor:
        if self.dense:
            hidden = torch.cat(list(pooled.values()), dim=1)
            for index, (weight, bias) in enumerate(self.dense):
                hidden = hidden @ weight.T + bias
                if index + 1 < len(self.dense):
                    hidden = hidden.clamp(min=0)
            logits, labels = hidden[:, 0], torch.tensor(batch.labels)
            return (torch.log1p(torch.exp(logits)) - labels * logits).mean()
        loss = torch.zeros(())
        for name, value in pooled.items():
            loss = loss + (value * coefficients[name]).sum() / batch.num_samples
            if "quadratic" in coefficients:
                loss = loss + (value * value).sum() / 2 / batch.num_samples
        return loss

    def _update(self, table: ReferenceTable, gradient: Tensor) -> None:
        touched = gradient.abs().sum(1) > 0
        g = gradient[touched]
        w = table.weights.detach().to(torch.float32)
        if self.optimizer == "sgd":
            w[touched] -= self.learning_rate * g
        elif self.optimizer == "adagrad":
            table.state[touched] += g * g
            w[touched] -= self.learning_rate * g / (table.state[touched].sqrt() + self.eps)
        elif self.optimizer == "rowwise_adagrad":
            table.state[touched] += (g * g).mean(1)
            scale = self.learning_rate / (table.state[touched].sqrt() + self.eps)
            w[touched] -= scale[:, None] * g
        else:
            raise ValueError(self.optimizer)
        table.weights = w.to(table.weights.dtype)
