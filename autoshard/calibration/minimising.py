"""How a few free numbers, or all weights, are fitted to measured sets."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

#: Of fits of few numbers.
_STEPS = 300
_LEARNING_RATE = 0.05


def minimise(
    free: Sequence[Tensor],
    loss: Callable[[], Tensor],
    *,
    num_steps: int = _STEPS,
    learning_rate: float = _LEARNING_RATE,
    max_norm: float | None = None,
) -> None:
    """Adam with a learning rate that falls to 0, all rows at once: no chance is involved.

    Args:
        free: leaves with gradients, altered in place.
        loss: of their present values.
        num_steps: how many.
        learning_rate: of the first step.
        max_norm: of the gradient of all of them; None for no limit.
    """
    optimizer = torch.optim.Adam(free, lr=learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, num_steps)
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss().backward()
        if max_norm is not None:
            torch.nn.utils.clip_grad_norm_(free, max_norm)
        optimizer.step()
        schedule.step()
