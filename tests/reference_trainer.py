"""A single-process trainer on torch's `embedding_bag`, to compare the sharded runtime with.

Imports nothing of autoshard. Tables are dense parameters under autograd; the optimizers are
written out from their published formulas (Duchi et al. 2011 for Adagrad; Kingma and Ba 2015
for Adam, applied to the rows that a step looks up). Row-wise Adagrad keeps the mean squared
gradient of a row; where a table's columns are cut, of the row's part between two cuts.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits, embedding_bag, linear

BETA1, BETA2 = 0.9, 0.999


@dataclass
class ReferenceTable:
    weights: Tensor  # [rows, dim], fp32 or fp16
    features: list[str]
    mean: bool = False
    weighted: bool = False
    column_cuts: tuple[int, ...] = ()
    """Where the table is cut, strictly between 0 and dim; only row-wise Adagrad sees it."""
    states: dict[str, Tensor] = field(default_factory=dict)
    """fp32 [rows, dim]; row-wise Adagrad's are equal within a row's part."""


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
        rounds_steps: bool = False,
    ) -> None:
        """`rounds_steps`: SGD and Adagrad round what they subtract to the weights' type first.

        So do FBGEMM's CPU kernels (1.8.0), but not row-wise Adagrad's.
        """
        self.tables = tables
        self.optimizer, self.learning_rate, self.eps = optimizer, learning_rate, eps
        self.dense = [
            (w.clone().requires_grad_(), b.clone().requires_grad_()) for w, b in dense or []
        ]
        self.rounds_steps = rounds_steps
        self.num_steps = 0
        names = {"adagrad": ["sum"], "rowwise_adagrad": ["sum"], "adam": ["exp_avg", "exp_avg_sq"]}
        for table in tables.values():
            for name in names.get(optimizer, []):
                table.states[name] = torch.zeros(table.weights.shape)

    def pooled(self, weights: dict[str, Tensor], batch: ReferenceBatch) -> dict[str, Tensor]:
        """{"table/feature": [samples, dim]} from fp32 `weights`."""
        out = {}
        for name, table in self.tables.items():
            for feature in table.features:
                bags = batch.bags[feature]
                lengths = torch.tensor([len(bag) for bag in bags], dtype=torch.int64)
                ids = torch.tensor([i for bag in bags for i in bag], dtype=torch.int64)
                start = lengths.cumsum(0) - lengths
                if not table.weighted:
                    mode = "mean" if table.mean else "sum"
                    out[f"{name}/{feature}"] = embedding_bag(ids, weights[name], start, mode=mode)
                    continue
                scales = torch.tensor([s for bag in batch.weights[feature] for s in bag])
                value = embedding_bag(
                    ids, weights[name], start, mode="sum", per_sample_weights=scales.float()
                )
                # torch has no weighted mean: the sum is divided by the number of ids.
                out[f"{name}/{feature}"] = (
                    value / lengths.clamp(min=1).unsqueeze(1) if table.mean else value
                )
        return out

    def outputs(self, batch: ReferenceBatch) -> dict[str, Tensor]:
        """What `pooled` gives with the weights as they are."""
        return self.pooled({n: t.weights.float() for n, t in self.tables.items()}, batch)

    def step(self, batches: list[ReferenceBatch], coefficients: dict[str, Tensor]) -> float:
        """One step on the batches of all ranks: the loss is the mean of the ranks' losses.

        With dense layers, a rank's loss is the mean logistic loss; otherwise it is the
        mean over samples of the outputs times `coefficients`, plus half their square if
        `coefficients` holds the key "quadratic".
        """
        self.num_steps += 1
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
                looked_up = {
                    i for b in batches for f in table.features for bag in b.bags[f] for i in bag
                }
                self._update(table, gradient, sorted(looked_up))
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
                hidden = linear(hidden, weight, bias)
                if index + 1 < len(self.dense):
                    hidden = hidden.relu()
            return binary_cross_entropy_with_logits(hidden[:, 0], torch.tensor(batch.labels))
        loss = torch.zeros(())
        for name, value in pooled.items():
            loss = loss + (value * coefficients[name]).sum() / batch.num_samples
            if "quadratic" in coefficients:
                loss = loss + (value * value).sum() / 2 / batch.num_samples
        return loss

    def _update(self, table: ReferenceTable, gradient: Tensor, rows: list[int]) -> None:
        """Apply the optimizer, in fp32, to `rows`; all others keep weights and state."""
        g = gradient[rows]
        state = {name: value[rows] for name, value in table.states.items()}
        if self.optimizer == "sgd":
            change = g
        elif self.optimizer in ("adagrad", "rowwise_adagrad"):
            squares = g * g
            if self.optimizer == "rowwise_adagrad":
                squares = _mean_between_cuts(squares, table.column_cuts)
            state["sum"] = state["sum"] + squares
            change = g / (state["sum"].sqrt() + self.eps)
        elif self.optimizer == "adam":
            state["exp_avg"] = BETA1 * state["exp_avg"] + (1 - BETA1) * g
            state["exp_avg_sq"] = BETA2 * state["exp_avg_sq"] + (1 - BETA2) * g * g
            mean = state["exp_avg"] / (1 - BETA1**self.num_steps)
            square = state["exp_avg_sq"] / (1 - BETA2**self.num_steps)
            change = mean / (square.sqrt() + self.eps)
        else:
            raise ValueError(self.optimizer)
        weights = table.weights.detach().to(torch.float32)
        step = self.learning_rate * change
        if self.rounds_steps and self.optimizer in ("sgd", "adagrad"):
            step = step.to(table.weights.dtype).to(torch.float32)
        weights[rows] -= step
        table.weights = weights.to(table.weights.dtype)
        for name, value in state.items():
            table.states[name][rows] = value


def _mean_between_cuts(squares: Tensor, cuts: tuple[int, ...]) -> Tensor:
    """Each row's mean over the columns between two cuts, spread over those columns."""
    parts = squares.tensor_split(list(cuts), dim=1)
    return torch.cat([part.mean(1, keepdim=True).expand_as(part) for part in parts], dim=1)
