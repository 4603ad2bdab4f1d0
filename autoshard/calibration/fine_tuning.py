"""Second stage: all weights of the network, held near where they start.

Adam on the Huber loss of log ratios over all sets at once, plus a penalty on the squared distance
from the start. Far more weights than sets are free: it is the penalty and the small number of
steps, both chosen by cross-validation, that keep what the base model knows. The limits of the
factors φ are buffers, and are not touched.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard.calibration.data import SetRows
from autoshard.calibration.errors import huber, log_ratios
from autoshard.calibration.tunable import SetTensors, State, TunableModel, predict_sets

#: Where cross-validation looks at a run: these numbers of steps can be chosen.
CHECKPOINT_EVERY = 10
_MAX_NORM = 1.0


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the weights are tuned."""

    learning_rate: float
    penalty: float
    """Times the sum of squared differences from the start."""


#: What cross-validation chooses from.
TUNINGS = tuple(
    Tuning(learning_rate=rate, penalty=penalty) for rate in (1e-3, 4e-3) for penalty in (1e-4, 3e-3)
)


def tune(
    model: TunableModel, start: State, rows: SetRows, tuning: Tuning, num_steps: int
) -> Iterator[dict[str, Tensor]]:
    """Tune the weights; a state comes out every `CHECKPOINT_EVERY` steps.

    Args:
        model: whose programs are evaluated.
        start: where to start, and what to stay near.
        rows: what to fit to.
        tuning: how.
        num_steps: how far, at most.

    Yields:
        The state after 10, 20, … steps.
    """
    tensors = SetTensors(rows)
    state = {name: value.clone().requires_grad_() for name, value in start.items()}
    optimizer = torch.optim.Adam(state.values(), lr=tuning.learning_rate)
    for step in range(1, num_steps + 1):
        predicted_NP = predict_sets(model, state, tensors)
        loss = huber(log_ratios(predicted_NP, tensors.time_ms_NP)).mean()
        distance = torch.stack([((state[name] - start[name]) ** 2).sum() for name in start]).sum()
        optimizer.zero_grad()
        (loss + tuning.penalty * distance).backward()
        torch.nn.utils.clip_grad_norm_(state.values(), _MAX_NORM)
        optimizer.step()
        if step % CHECKPOINT_EVERY == 0:
            yield {name: value.detach().clone() for name, value in state.items()}


def tuned(
    model: TunableModel, start: State, rows: SetRows, tuning: Tuning, num_steps: int
) -> dict[str, Tensor]:
    """The state after `num_steps` steps, a multiple of `CHECKPOINT_EVERY` and > 0."""
    *_, last = tune(model, start, rows, tuning, num_steps)
    return last
