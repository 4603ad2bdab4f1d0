"""First stage, scaling: factors on the coefficients of a cost model, fitted robustly to few sets.

Another machine is, in the first place, faster or slower at each kind of work. What the network
learned about shapes stays; only how much each kind costs is multiplied: a factor for each phase
and group of work, one for each phase's overhead, and, where there is enough to tell them apart,
one for each coefficient, drawn towards its group's. That takes a network with coefficients of
work (`raw_work_K`, `raw_shard_P`, `raw_overhead_P`), as `cost_net.networks.AdditiveNet` has them.

A set's own costs are linear in the coefficients, so the encoder runs once for each coefficient,
and a fit then only evaluates the small program that turns sums into times.

Shapes: N=sets, K=coefficients, G=groups, P=2 phases, Q=P·G, D=encoding width.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autoshard.calibration.data import SetRows
from autoshard.calibration.errors import mean_loss
from autoshard.calibration.minimising import minimise
from autoshard.calibration.tunable import (
    NETWORK_PREFIX,
    SetTensors,
    State,
    TunableModel,
    inverse_softplus,
    softplus,
)
from autoshard.errors import ArtifactError

WORK, SHARD, OVERHEAD = (
    NETWORK_PREFIX + name for name in ("raw_work_K", "raw_shard_P", "raw_overhead_P")
)
COEFFICIENTS = (WORK, SHARD, OVERHEAD)
_GROUPS = "compute.group_KQ"
#: softplus turns it into nothing.
_OFF = -60.0
#: Penalty on a squared log factor, beside a mean Huber loss: a factor that the sets say nothing
#: about stays 1; others are hardly held.
_FAINT = 1e-6
#: A coefficient may differ from its group by at most e^±MAX_LOG_FACTOR.
_MAX_LOG_FACTOR = 4.0


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """Which factors are free."""

    name: str
    """For the report."""
    coefficient_penalty: float | None = None
    """Holds the factors of coefficients, squared and logarithmic, at their group's; None: there
    are only groups' factors."""

    def fit(self, model: TunableModel, start: State, rows: SetRows) -> dict[str, Tensor]:
        """Scale the coefficients of a state; see `options.Option`."""
        tensors = SetTensors(rows)
        group_CQ = _groups_of_coefficients(model)
        own_CNQ, rest_ND = _contributions(model, start, tensors, group_CQ)
        num_coefficients, num_groups = group_CQ.shape
        group_Q = torch.zeros(num_groups, requires_grad=True)
        own_C = torch.zeros(num_coefficients, requires_grad=True)
        overhead_P = torch.zeros_like(start[OVERHEAD], requires_grad=True)
        overhead_ms_P = softplus(start[OVERHEAD]).float()
        free = [group_Q, overhead_P] + ([] if self.coefficient_penalty is None else [own_C])

        def log_factors_C() -> Tensor:
            return limited(group_CQ @ group_Q + own_C)

        def loss() -> Tensor:
            scaled_NQ = torch.einsum("cnq,c->nq", own_CNQ, torch.exp(log_factors_C()))
            encoding_ND = torch.cat([scaled_NQ, rest_ND], dim=1)
            scaled_ms_P = overhead_ms_P * torch.exp(limited(overhead_P))
            now = {**start, OVERHEAD: inverse_softplus(scaled_ms_P)}
            predicted_NP = model.compute(now, encoding_ND, tensors.num_shards_N1)
            penalty = _FAINT * ((group_Q**2).sum() + (overhead_P**2).sum())
            if self.coefficient_penalty is not None:
                penalty = penalty + self.coefficient_penalty * (own_C**2).sum()
            return mean_loss(predicted_NP, tensors.time_ms_NP) + penalty

        minimise(free, loss)
        with torch.no_grad():
            factors_C = torch.exp(log_factors_C()).double()
            factors_P = torch.exp(limited(overhead_P)).double()
        work, shard = torch.split(factors_C, [len(start[WORK]), len(start[SHARD])])
        return {
            **start,
            WORK: inverse_softplus(softplus(start[WORK]) * work),
            SHARD: inverse_softplus(softplus(start[SHARD]) * shard),
            OVERHEAD: inverse_softplus(softplus(start[OVERHEAD]) * factors_P),
        }


SCALINGS = (
    Scaling(name="factors of groups"),
    Scaling(name="factors of coefficients, held firmly", coefficient_penalty=1e-3),
    Scaling(name="factors of coefficients, held loosely", coefficient_penalty=1e-4),
)


def check_scalable(model: TunableModel) -> None:
    """Refuse a model whose network has no coefficients of work.

    Raises:
        ArtifactError: it has none.
    """
    if not set(COEFFICIENTS) <= model.compute_state.keys():
        raise ArtifactError(
            "the network of this cost model cannot be calibrated",
            got=f"parameters {', '.join(sorted(model.compute_state)[:8])}",
            allowed="networks with coefficients of work: cost_net=additive",
            remedy="calibrate from the model 'default', or train one with cost_net=additive",
        )


def _groups_of_coefficients(model: TunableModel) -> Tensor:
    """Where each coefficient of work, then each phase's cost of a shard, counts: one 1 a row."""
    work_KQ = model.weights[_GROUPS].float()
    num_phases = len(model.compute_state[SHARD])
    # A shard's cost is part of the first group of its phase.
    shard_PQ = torch.zeros(num_phases, work_KQ.shape[1])
    shard_PQ[
        torch.arange(num_phases), torch.arange(num_phases) * (work_KQ.shape[1] // num_phases)
    ] = 1.0
    return torch.cat([work_KQ, shard_PQ])


@torch.no_grad()
def _contributions(
    model: TunableModel, state: State, tensors: SetTensors, group_CQ: Tensor
) -> tuple[Tensor, Tensor]:
    """What each coefficient adds to the sets' own costs, [C, N, Q], and the encodings' rest."""
    num_coefficients, num_groups = group_CQ.shape
    raw_C = torch.cat([state[WORK], state[SHARD]])
    parts = []
    for number in range(num_coefficients):
        only_C = torch.full_like(raw_C, _OFF)
        only_C[number] = raw_C[number]
        work, shard = torch.split(only_C, [len(state[WORK]), len(state[SHARD])])
        now = {**state, WORK: work, SHARD: shard}
        encoding_SD = model.encode(now, tensors.features_SF)
        parts.append(tensors.summed(encoding_SD[:, :num_groups]))
    rest_ND = tensors.summed(model.encode(state, tensors.features_SF)[:, num_groups:])
    return torch.stack(parts), rest_ND


def limited(log_factors: Tensor) -> Tensor:
    """Log factors within ±`_MAX_LOG_FACTOR`."""
    return log_factors.clamp(-_MAX_LOG_FACTOR, _MAX_LOG_FACTOR)
