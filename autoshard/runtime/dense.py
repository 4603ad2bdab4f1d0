"""What a training loop is given and gets: batches, dense layers, their loss and logits.

Any module may stand in for `DenseHead`, if it is called as `dense(pooled, batch)` and
returns a `DenseOutput`. `autoshard.runtime.dense_replicas` keeps the ranks' copies equal.

Shapes: B=samples of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor, nn

from autoshard.errors import InputError
from autoshard.runtime.batch import JaggedBatch


@dataclass(frozen=True, eq=False)
class TrainingBatch:
    """One rank's part of a training step."""

    sparse: JaggedBatch
    labels_B: Tensor
    """float32 [B], 0 or 1."""
    dense_BN: Tensor | None = None
    """Numeric features, float32 [B, N]; None for a model without any."""

    def __post_init__(self) -> None:
        if not isinstance(self.sparse, JaggedBatch):
            raise InputError(
                "the sparse part is not a batch of ids",
                got=type(self.sparse).__name__,
                allowed="autoshard.runtime.batch.JaggedBatch",
            )
        for what, tensor in (("labels", self.labels_B), ("numeric features", self.dense_BN)):
            if tensor is not None and not isinstance(tensor, Tensor):
                raise InputError(f"{what} are not a tensor", got=type(tensor).__name__)
        if self.labels_B.shape != (self.sparse.batch_size,):
            raise InputError(
                "labels do not match the batch",
                got=f"shape {tuple(self.labels_B.shape)}",
                allowed=f"one label per sample, [{self.sparse.batch_size}]",
            )
        dense = self.dense_BN
        if dense is not None and (dense.dim() != 2 or len(dense) != self.sparse.batch_size):
            raise InputError(
                "numeric features do not match the batch",
                got=f"shape {tuple(dense.shape)}",
                allowed=f"one row per sample, [{self.sparse.batch_size}, N]",
            )

    def to(self, device: torch.device, *, non_blocking: bool = False) -> TrainingBatch:
        """The same batch on `device`; itself if it is there.

        Args:
            device: where to.
            non_blocking: let copies from pinned memory run on the current CUDA stream.
        """
        tensors = (self.sparse.values_L, self.labels_B, self.dense_BN)
        if all(tensor is None or tensor.device == device for tensor in tensors):
            return self
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> TrainingBatch:
        """The same batch in pinned memory, as `DataLoader(pin_memory=True)` asks for it."""
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> TrainingBatch:
        dense_BN = self.dense_BN
        return TrainingBatch(
            self.sparse.with_tensors(function),
            function(self.labels_B),
            None if dense_BN is None else function(dense_BN),
        )


class DenseOutput(NamedTuple):
    """What the dense layers of a model return."""

    loss: Tensor
    """The mean loss over the local batch, a scalar. For an empty batch it is 0, and still
    connected to the pooled outputs and to every parameter, so that all ranks' backwards run
    the same collectives."""
    logits_B: Tensor
    """float32 [B]."""


class DenseHead(nn.Module):
    """A small multi-layer perceptron over all pooled outputs, with the logistic loss."""

    def __init__(
        self, output_dims: Mapping[str, int], *, hidden: Sequence[int] = (64,), seed: int = 0
    ) -> None:
        """Build the layers; equal arguments give equal weights.

        Args:
            output_dims: columns of each pooled output, by name, in order.
            hidden: widths of the hidden layers.
            seed: of the initial weights.
        """
        super().__init__()
        self.output_names = tuple(output_dims)
        widths = [sum(output_dims.values()), *hidden, 1]
        layers: list[nn.Module] = []
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        self.layers = nn.Sequential(*layers[:-1])
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for layer in self.layers:
                if isinstance(layer, nn.Linear):
                    bound = layer.in_features**-0.5
                    layer.weight.uniform_(-bound, bound, generator=generator)
                    layer.bias.uniform_(-bound, bound, generator=generator)

    def forward(self, pooled: Mapping[str, Tensor], batch: TrainingBatch) -> DenseOutput:
        """The logits and their mean logistic loss over the local batch.

        Args:
            pooled: by output name, float32 [B, embedding_dim].
            batch: for the labels.
        """
        logits_B = self.layers(torch.cat([pooled[n] for n in self.output_names], dim=1))[:, 0]
        return DenseOutput(logistic_loss(logits_B, batch.labels_B), logits_B)


def logistic_loss(logits_B: Tensor, labels_B: Tensor) -> Tensor:
    """The mean logistic loss, a scalar; for an empty batch 0, connected to the logits.

    Connected, so that the backward still runs, as on every other rank.
    """
    if not logits_B.numel():
        return logits_B.sum()
    return nn.functional.binary_cross_entropy_with_logits(logits_B, labels_B.to(logits_B.device))
