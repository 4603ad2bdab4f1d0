"""Third stage, tuning: all weights of the network, held near where they start.

The Huber loss of log ratios over all sets, plus a penalty on the squared distance from the start.
Far more weights than sets are free: it is the penalty, which cross-validation chooses, that keeps
what the base model knows. The limits of the factors φ are buffers, and are not touched.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard.calibration.data import SetRows
from autoshard.calibration.errors import mean_loss
from autoshard.calibration.minimising import minimise
from autoshard.calibration.tunable import SetTensors, State, TunableModel, predict_sets

_MAX_NORM = 1.0
_LEARNING_RATE = 4e-3
#: What cross-validation chooses from.
_PENALTIES = (3e-2, 1e-2, 3e-3)


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """How the weights are tuned."""

    penalty: float
    """Times the sum of squared differences from the start."""
    num_steps: int

    @property
    def name(self) -> str:
        """For the report."""
        return f"all weights, penalty {self.penalty:g}"

    def fit(self, model: TunableModel, start: State, rows: SetRows) -> dict[str, Tensor]:
        """Tune the weights of a state; see `options.Option`."""
        tensors = SetTensors(rows)
        state = {name: value.clone().requires_grad_() for name, value in start.items()}

        def loss() -> Tensor:
            predicted_NP = predict_sets(model, state, tensors)
            moved = [((state[name] - start[name]) ** 2).sum() for name in start]
            error = mean_loss(predicted_NP, tensors.time_ms_NP)
            return error + self.penalty * torch.stack(moved).sum()

        minimise(
            list(state.values()),
            loss,
            num_steps=self.num_steps,
            learning_rate=_LEARNING_RATE,
            max_norm=_MAX_NORM,
        )
        return {name: value.detach() for name, value in state.items()}


def tunings(num_steps: int) -> tuple[Tuning, ...]:
    """What cross-validation chooses from; nothing if there are no steps."""
    if num_steps == 0:
        return ()
    return tuple(Tuning(penalty=penalty, num_steps=num_steps) for penalty in _PENALTIES)
