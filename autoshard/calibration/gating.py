"""Second stage, gating: how far what the network learned about shapes holds on another machine.

What a correction does to a coefficient that hardly counted is an accident of the first machine's
rows. If the coefficient counts on the second one, as that of distinct rows' elements does where
another optimizer updates every element, so does the accident. So each output of the last layer of
the corrections, and of that of the set's factors φ, gets a gate: its weights and its bias are
multiplied by 1 + g, its value is moved by a shift, and the coefficients are scaled along with it.
A gate of 1 + g = 0 makes a group of work follow the physical model alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard.calibration.data import SetRows
from autoshard.calibration.errors import mean_loss
from autoshard.calibration.minimising import minimise
from autoshard.calibration.scaling import COEFFICIENTS, limited
from autoshard.calibration.tunable import (
    NETWORK_PREFIX,
    SetTensors,
    State,
    TunableModel,
    inverse_softplus,
    predict_sets,
    softplus,
)

#: The parts of a network whose last layers are gated; see `cost_net.networks.AdditiveNet`.
_PARTS = ("correction", "factor")


@dataclass(frozen=True, kw_only=True)
class Gating:
    """How firmly the gates are held."""

    penalty: float
    """On each squared number: g, shift, and the log factor of a coefficient."""

    @property
    def name(self) -> str:
        """For the report."""
        return f"gates of corrections, penalty {self.penalty:g}"

    def fit(self, model: TunableModel, start: State, rows: SetRows) -> dict[str, Tensor]:
        """Gate the corrections of a state; see `options.Option`."""
        tensors = SetTensors(rows)
        layers = [_last_layer(start, part) for part in _PARTS]
        gates = {name: torch.zeros(len(start[f"{name}.bias"])) for name in layers}
        shifts = {name: torch.zeros_like(gate) for name, gate in gates.items()}
        factors = {name: torch.zeros_like(start[name]) for name in COEFFICIENTS}
        free = [*gates.values(), *shifts.values(), *factors.values()]
        for values in free:
            values.requires_grad_()

        def gated() -> dict[str, Tensor]:
            state = dict(start)
            for name in layers:
                weight, bias = f"{name}.weight", f"{name}.bias"
                state[weight] = start[weight] * (1.0 + gates[name])[:, None]
                state[bias] = start[bias] * (1.0 + gates[name]) + shifts[name]
            for name, values in factors.items():
                scaled = softplus(start[name]) * torch.exp(limited(values))
                state[name] = inverse_softplus(scaled)
            return state

        def loss() -> Tensor:
            predicted_NP = predict_sets(model, gated(), tensors)
            held = torch.stack([(values**2).sum() for values in free]).sum()
            error = mean_loss(predicted_NP, tensors.time_ms_NP)
            return error + self.penalty * held

        minimise(free, loss)
        return {name: value.detach() for name, value in gated().items()}


#: What cross-validation chooses from.
GATINGS = (Gating(penalty=1e-2), Gating(penalty=1e-3))


def _last_layer(state: State, part: str) -> str:
    """The name of the last linear layer of an MLP."""
    prefix = f"{NETWORK_PREFIX}{part}."
    places = [name.split(".")[-2] for name in state if name.startswith(prefix)]
    return prefix + max(places, key=int)
