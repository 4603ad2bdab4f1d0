"""The dense layers of the whole-loop comparison: plain torch, the same on every side.

Small on purpose: what is compared is the tables' part of a step and what overlaps with it.
Knows nothing of any side's runtime.

Shapes: B=samples of this rank, C=columns of all pooled outputs together.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

#: Width of the hidden layer.
HIDDEN = 32
#: Of the dense optimizer.
LEARNING_RATE = 0.1
_SEED = 7


class DenseLayers(nn.Module):
    """A perceptron from all pooled outputs, in the features' order, to one logit."""

    def __init__(self, columns: int) -> None:
        """Build the layers; equal on all sides and ranks.

        Args:
            columns: C.
        """
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(_SEED)
            self.layers = nn.Sequential(nn.Linear(columns, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, 1))

    def forward(self, pooled_BC: Tensor) -> Tensor:
        """The logits, float32 [B]."""
        logits_BX: Tensor = self.layers(pooled_BC)
        return logits_BX[:, 0]


def mean_loss(logits_B: Tensor, labels_B: Tensor) -> Tensor:
    """The mean logistic loss over the local batch, a scalar."""
    return nn.functional.binary_cross_entropy_with_logits(logits_B, labels_B)


def make_optimizer(parameters: Iterable[nn.Parameter]) -> torch.optim.SGD:
    """The optimizer of the dense layers."""
    return torch.optim.SGD(parameters, lr=LEARNING_RATE)
