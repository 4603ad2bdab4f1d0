"""What one kernel looks up at once.

Shapes: F=features of the kernel, B=bags per feature, C=padded columns of all features
together, L=ids.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor


@dataclass(eq=False)
class Bags:
    """What one kernel looks up at once."""

    values_L: Tensor
    """Rows, int64, feature-major."""
    lengths_FB: Tensor
    """Ids per bag, int64."""
    weights_L: Tensor | None = None
    """float32, for a weighted kernel; as if 1 where missing."""
    connected_BC: Tensor | None = None
    """On CUDA, the output with its gradient's graph, between lookup and update."""

    @cached_property
    def offsets(self) -> Tensor:
        """Where each bag starts among the ids, and the end, int64 [F·B + 1]."""
        offsets = self.lengths_FB.new_zeros(self.lengths_FB.numel() + 1)
        torch.cumsum(self.lengths_FB.flatten(), 0, out=offsets[1:])
        return offsets
