"""Memory that all measured kernels of a process share, one after the other.

Allocating and first touching the weights takes far longer than timing the kernels on
them. Each shard set therefore gets views into one arena, whose pages stay mapped, as
they do in training. Its content stays usable: weights in ±0.05 (no NaN, no denormals of
fp32), optimizer state around 1 (so updates are small and nothing drifts).
"""

from __future__ import annotations

import torch
from torch import Tensor

from autoshard.errors import InputError

#: Views start at multiples of this, as freshly allocated tensors do.
ALIGNMENT_BYTES = 64
#: Lost to alignment at most, whatever kernels there are.
_SLACK_BYTES = 2**16
INITIAL_WEIGHT_BOUND = 0.05
INITIAL_STATE = 1.0


class _Region:
    """One growing tensor; pages are touched, and filled, when first handed out."""

    def __init__(self, num_bytes: int, dtype: torch.dtype, *, is_state: bool) -> None:
        self._is_state = is_state
        self._elements = torch.empty((num_bytes + _SLACK_BYTES) // dtype.itemsize, dtype=dtype)
        self._align = ALIGNMENT_BYTES // dtype.itemsize
        self._filled = 0
        self.taken = 0

    def take(self, num_elements: int) -> Tensor:
        start = -(-self.taken // self._align) * self._align
        end = start + num_elements
        if end > self._elements.numel():
            size = self._elements.element_size()
            raise InputError(
                "a shard set does not fit into the arena",
                got=f"{end * size} bytes",
                allowed=f"at most {self._elements.numel() * size}",
                remedy="raise arena_bytes, or lower max_weight_bytes",
            )
        if end > self._filled:
            fresh = self._elements[self._filled : end]
            if self._is_state:
                fresh.fill_(INITIAL_STATE)
            else:
                fresh.uniform_(-INITIAL_WEIGHT_BOUND, INITIAL_WEIGHT_BOUND)
            self._filled = end
        self.taken = end
        return self._elements[start:end]


class Arena:
    """Weights and optimizer state for one shard set at a time."""

    def __init__(self, num_bytes: int) -> None:
        """Reserve address space; nothing is touched yet.

        Args:
            num_bytes: weights of the largest set. State may take as much per element.
        """
        self._num_bytes = num_bytes
        self._weights: dict[torch.dtype, _Region] = {}
        self._state: _Region | None = None

    def reset(self) -> None:
        """Hand out everything anew. Views handed out before must not be used any more."""
        for region in self._weights.values():
            region.taken = 0
        if self._state is not None:
            self._state.taken = 0

    def weights(self, num_elements: int, dtype: torch.dtype) -> Tensor:
        """A view for weights, [num_elements].

        Raises:
            InputError: the arena is too small.
        """
        if dtype not in self._weights:
            self._weights[dtype] = _Region(self._num_bytes, dtype, is_state=False)
        return self._weights[dtype].take(num_elements)

    def state(self, num_elements: int) -> Tensor:
        """A view for optimizer state, float32 [num_elements].

        Raises:
            InputError: the arena is too small.
        """
        if self._state is None:
            # fp16 weights have fp32 state: twice the bytes per element.
            self._state = _Region(2 * self._num_bytes, torch.float32, is_state=True)
        return self._state.take(num_elements)
