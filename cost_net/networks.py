"""The cost networks. All share one form: encode each shard, sum, turn the sum into times.

`AdditiveNet` is a physical model with bounded corrections. It extrapolates like the physics,
is never negative, and its limits give a lower bound for every placement.
`SumNet` is what AutoShard (KDD'22) and NeuroShard (MLSys'23) use: an MLP per shard, a sum,
an MLP on the sum; its output is bounded by nothing.

Shapes: S=shards, N=sets, F=features, D=encoding width, P=2 phases, G=3 groups of work,
Q=P·G, K=work features, M=collectives, C=traffic features.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from autoshard.errors import InputError, quoted
from autoshard.features import (
    NUM_SHARD_FEATURES,
    NUM_TRAFFIC_FEATURES,
    NUM_WORK_FEATURES,
    WORK_FEATURES,
    WORK_OF_PHASE,
)
from autoshard.suggestions import did_you_mean
from cost_net.dataset import NO_LIMIT

NUM_PHASES = 2
#: Limits of a set's factor φ. On 5,000 measured CPU sets, [0.85, 1.2] gave unseen tables 9.3%
#: median error and [0.4, 2.5] 7.7% (one training each, 100 epochs); these were level with the
#: latter in later trainings. The lower bound of a plan is proportional to the first.
PHI_LIMITS = (0.6, 1.6)
#: What a kernel spends time on, per phase: bags, lookups, and distinct rows.
NUM_GROUPS = 3
NUM_OWN = NUM_PHASES * NUM_GROUPS
_FIRST_GROUP = [1.0, 0.0, 0.0] * NUM_PHASES
#: Of counts and times where an MLP looks at them: e^40 ms are ages.
MAX_LOG = 40.0
NUM_OTHER = NUM_SHARD_FEATURES - NUM_WORK_FEATURES


def group_of_work() -> NDArray[np.float64]:
    """Which phase and group each work feature belongs to: one 1 per row, [K, P·G]."""
    group_KQ = np.zeros((NUM_WORK_FEATURES, NUM_OWN))
    for row, name in enumerate(WORK_FEATURES):
        phase = int(WORK_OF_PHASE[row, 1])
        group = 0 if "bag" in name else 1 if "lookup" in name else 2
        group_KQ[row, phase * NUM_GROUPS + group] = 1.0
    return group_KQ


def mlp(width_in: int, hidden: int, width_out: int, *, layers: int = 2) -> nn.Sequential:
    """Linear layers with SiLU between them; the last one starts small."""
    parts: list[nn.Module] = []
    width = width_in
    for _ in range(layers):
        parts += [nn.Linear(width, hidden), nn.SiLU()]
        width = hidden
    last = nn.Linear(width, width_out)
    nn.init.normal_(last.weight, std=0.01)
    nn.init.zeros_(last.bias)
    return nn.Sequential(*parts, last)


class Normaliser(nn.Module):
    """Shifts and scales features by the training data's statistics, which it carries."""

    mean: Tensor
    scale: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("scale", torch.ones(width))

    def fit(self, values: Tensor) -> None:
        """Take mean and standard deviation from training rows, [rows, width]."""
        self.mean.copy_(values.mean(dim=0))
        self.scale.copy_(values.std(dim=0).clamp_min(1e-3))

    def forward(self, values: Tensor) -> Tensor:
        """Normalised, within ±8 so that nothing far outside the data explodes."""
        return ((values - self.mean) / self.scale).clamp(-8.0, 8.0)


class AdditiveNet(nn.Module):
    """A physical model of the kernels with bounded corrections.

    The work of a shard falls into groups g (what each bag costs, each lookup, each distinct
    row), which caches and prefetching treat differently:

        own[s, p, g] = Σ_k work[s, k]·w[k] · exp(correction_pg(shard s)),    w >= 0
        time[S, p]   = overhead[p] + Σ_g φ_pg(S) · Σ_{s in S} own[s, p, g]

    Corrections and φ are within fixed limits; φ sees the sums of all groups (and so how much
    of the caches the set fills), the number of shards, and the mean of a learned encoding h.
    Encodings are [own (P·G), h].
    """

    max_log_correction: float = math.log(3.0)
    work_scale: Tensor
    phi_limits: Tensor
    group_KQ: Tensor

    def __init__(self, hidden: int = 64, interaction: int = 16) -> None:
        """Make an untrained network.

        Args:
            hidden: width of the MLPs.
            interaction: how many numbers of a shard the set's factors φ may look at.
        """
        super().__init__()
        self.interaction = interaction
        self.normalise = Normaliser(NUM_OTHER)
        self.correction = mlp(NUM_OTHER, hidden, NUM_OWN)
        self.embed = mlp(NUM_OTHER, hidden, interaction)
        self.factor = mlp(interaction + 1 + NUM_OWN, hidden, NUM_OWN)
        # ms per unit of (scaled) work, and per shard, through softplus: always >= 0.
        self.raw_work_K = nn.Parameter(torch.full((NUM_WORK_FEATURES,), -3.0))
        self.raw_shard_P = nn.Parameter(torch.full((NUM_PHASES,), -4.0))
        self.raw_overhead_P = nn.Parameter(torch.full((NUM_PHASES,), -4.0))
        self.register_buffer("work_scale", torch.ones(NUM_WORK_FEATURES))
        self.register_buffer("group_KQ", torch.tensor(group_of_work(), dtype=torch.float32))
        # φ per phase and group: row 0 the least, row 1 the most.
        self.register_buffer("phi_limits", torch.tensor([list(PHI_LIMITS)] * NUM_OWN).T.clone())

    def fit_statistics(self, features_SF: Tensor) -> None:
        """Take scales from the training shards."""
        self.normalise.fit(features_SF[:, NUM_WORK_FEATURES:])
        self.work_scale.copy_(features_SF[:, :NUM_WORK_FEATURES].mean(dim=0).clamp_min(1e-6))

    @property
    def encoding_width(self) -> int:
        """D."""
        return NUM_OWN + self.interaction

    def encode(self, features_SF: Tensor) -> Tensor:
        """Encode shards, [S, D]: their own costs in ms and their share in φ."""
        other = self.normalise(features_SF[:, NUM_WORK_FEATURES:])
        work = features_SF[:, :NUM_WORK_FEATURES] / self.work_scale
        own = (work * nn.functional.softplus(self.raw_work_K)) @ self.group_KQ
        shard_P = nn.functional.softplus(self.raw_shard_P)
        own = own + shard_P.repeat_interleave(NUM_GROUPS) * self.group_KQ.new_tensor(_FIRST_GROUP)
        own = own * torch.exp(self.max_log_correction * torch.tanh(self.correction(other)))
        return torch.cat([own, self.embed(other)], dim=1)

    def compute(self, encoding_ND: Tensor, num_shards_N1: Tensor) -> Tensor:
        """Times of sets in ms, [N, P], > 0."""
        own = encoding_ND[:, :NUM_OWN].clamp_min(0.0)
        mean_h = encoding_ND[:, NUM_OWN:] / num_shards_N1.clamp_min(1.0)
        # Clamped, so that absurd sums cannot turn into inf − inf inside the MLP.
        logs = torch.log1p(torch.cat([num_shards_N1, 10.0 * own], dim=1)).clamp_max(MAX_LOG) / 2.0
        inputs = torch.cat([mean_h, logs], dim=1)
        scaled = own * self.phi(inputs)
        return scaled.reshape(-1, NUM_PHASES, NUM_GROUPS).sum(dim=2) + self.overhead_P()

    def phi(self, inputs: Tensor) -> Tensor:
        """The set's factors, within `phi_limits`, [N, P·G]."""
        # exp of a small number, so that 1 is the natural value wherever the limits are.
        raw = torch.exp(self.factor(inputs))
        return torch.minimum(torch.maximum(raw, self.phi_limits[0]), self.phi_limits[1])

    def overhead_P(self) -> Tensor:
        """What a rank with at least one shard costs besides, ms, [P]."""
        return nn.functional.softplus(self.raw_overhead_P)

    def bound_facts(self) -> dict[str, Any] | None:
        """What the lower bound needs: φ's least values, [P][G], and the overhead, [P]."""
        return {
            "phi_min": self.phi_limits[0].reshape(NUM_PHASES, NUM_GROUPS).tolist(),
            "overhead_ms": self.overhead_P().detach().tolist(),
        }


class SumNet(nn.Module):
    """MLP per shard, sum, MLP on the sum: the networks of AutoShard and NeuroShard.

    Both papers and their published code (Zha et al., "AutoShard", KDD 2022, and "Pre-train and
    Search", MLSys 2023) map a table's features through layers of 128 and 32 with ReLU, sum over
    the tables, and map the sum through one hidden layer of 64 to a cost. AutoShard shares the
    first part among its outputs; NeuroShard trains a network of its own for each cost. Given
    here what ours has, and theirs do not: all features, sizes on a logarithmic scale, training
    on relative errors, and an output that is never negative.
    """

    scale_P: Tensor

    def __init__(
        self, hidden: int = 128, width: int = 32, head: int = 64, *, trunks: int = 1
    ) -> None:
        """Make an untrained network.

        Args:
            hidden: width of the MLP per shard.
            width: numbers per shard that are summed, for each trunk.
            head: hidden width of each phase's MLP on the sum.
            trunks: MLPs per shard: 1 for both phases, or 2, one for each.
        """
        super().__init__()
        if trunks > NUM_PHASES:
            raise InputError("option trunks is not usable", got=trunks, allowed="1 or 2")
        self.normalise = Normaliser(NUM_SHARD_FEATURES)
        self.width, self.trunks = width, trunks
        self.shards = nn.ModuleList(
            nn.Sequential(
                nn.Linear(NUM_SHARD_FEATURES, hidden),
                nn.ReLU(),
                nn.Linear(hidden, width),
                nn.ReLU(),
            )
            for _ in range(trunks)
        )
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(width, head), nn.ReLU(), nn.Linear(head, 1))
            for _ in range(NUM_PHASES)
        )
        self.register_buffer("scale_P", torch.ones(NUM_PHASES))

    @property
    def encoding_width(self) -> int:
        """D."""
        return self.width * self.trunks

    def fit_statistics(self, features_SF: Tensor) -> None:
        """Take scales from the training shards."""
        self.normalise.fit(self._logs(features_SF))

    def start_at(self, time_ms_P: Tensor) -> None:
        """Count times in these units, so that training starts from their size."""
        self.scale_P.copy_(time_ms_P)

    @staticmethod
    def _logs(features_SF: Tensor) -> Tensor:
        return torch.cat(
            [
                torch.log1p(features_SF[:, :NUM_WORK_FEATURES]),
                features_SF[:, NUM_WORK_FEATURES:],
            ],
            dim=1,
        )

    def encode(self, features_SF: Tensor) -> Tensor:
        """Encode shards, [S, D]."""
        inputs = self.normalise(self._logs(features_SF))
        return torch.cat([trunk(inputs) for trunk in self.shards], dim=1)

    def compute(self, encoding_ND: Tensor, num_shards_N1: Tensor) -> Tensor:
        """Times of sets in ms, [N, P], > 0."""
        sums = [encoding_ND[:, i * self.width : (i + 1) * self.width] for i in range(self.trunks)]
        raw = [head(sums[min(p, self.trunks - 1)]) for p, head in enumerate(self.heads)]
        # Zero times the count keeps the one signature that exported programs have. Softplus is
        # linear in large sums, as costs are, and never negative.
        raw_NP = torch.cat(raw, dim=1) + 0.0 * num_shards_N1
        return (nn.functional.softplus(raw_NP) + 1e-6).clamp_max(1e12) * self.scale_P

    def bound_facts(self) -> dict[str, Any] | None:
        """None: nothing bounds this network."""
        return None


class CollectiveNet(nn.Module):
    """Time of a collective: latency, busiest rank and total bytes, times a bounded factor.

        T = g · (α + ω·(R / c − 1) + β·R·(R − 1) / c + γ·max(sent, received) + δ·total / c)

    with all weights >= 0, g within limits and c = min(R, processors): the ranks' messages and
    bytes are handled by so many processors at once, and beyond them ranks take turns. R enters
    as a smooth number, so world sizes that were not measured are served too.
    """

    limits: Tensor
    num_processors: Tensor
    max_log_factor: float = math.log(2.0)
    #: Bytes are counted in MiB inside, so that the weights are of one size.
    byte_scale: float = float(2**20)

    def __init__(self, hidden: int = 24, *, num_processors: float = NO_LIMIT) -> None:
        """Make an untrained network.

        Args:
            hidden: width of the MLP.
            num_processors: what the ranks share: the cores of a host; `NO_LIMIT` where every
                rank has a device of its own.
        """
        super().__init__()
        self.normalise = Normaliser(NUM_TRAFFIC_FEATURES)
        self.factor = mlp(NUM_TRAFFIC_FEATURES, hidden, 1)
        self.raw = nn.Parameter(torch.full((5,), -3.0))
        self.register_buffer("num_processors", torch.tensor(float(num_processors)))
        # g: the least and the most; training narrows them to what occurred.
        self.register_buffer("limits", torch.tensor([0.5, 2.0]))

    def terms(self, traffic_MC: Tensor) -> Tensor:
        """What the weights multiply, with bytes in MiB, [M, 5]; see the class."""
        ranks = traffic_MC[:, 0]
        at_once = torch.minimum(ranks, self.num_processors.to(ranks.dtype)).clamp_min(1.0)
        return torch.stack(
            [
                torch.ones_like(ranks),
                ranks / at_once - 1.0,
                ranks * (ranks - 1.0) / at_once,
                torch.maximum(traffic_MC[:, 1], traffic_MC[:, 2]) / self.byte_scale,
                traffic_MC[:, 3] / self.byte_scale / at_once,
            ],
            dim=1,
        )

    def _logs(self, traffic_MC: Tensor) -> Tensor:
        size = torch.log2(traffic_MC[:, 0:1].clamp_min(1.0))
        return torch.cat([size, torch.log1p(traffic_MC[:, 1:] / 1024.0)], dim=1)

    def fit_statistics(self, traffic_MC: Tensor) -> None:
        """Take scales from the training rows."""
        self.normalise.fit(self._logs(traffic_MC))

    def weights(self) -> Tensor:
        """α, ω, β, γ, δ: ms, ms per turn, ms per message, ms per MiB, ms per MiB."""
        return nn.functional.softplus(self.raw)

    def factor_of(self, traffic_MC: Tensor) -> Tensor:
        """The factor g of each exchange, [M]."""
        raw = self.factor(self.normalise(self._logs(traffic_MC)))[:, 0]
        factor = torch.exp(self.max_log_factor * torch.tanh(raw))
        return torch.minimum(torch.maximum(factor, self.limits[0]), self.limits[1])

    def forward(self, traffic_MC: Tensor) -> Tensor:
        """Times in ms, [M], > 0."""
        return (self.terms(traffic_MC) @ self.weights()) * self.factor_of(traffic_MC)

    def bound_facts(self) -> dict[str, float]:
        """What the lower bound needs."""
        alpha, omega, beta, gamma, delta = (float(w) for w in self.weights().detach())
        return {
            "factor_min": float(self.limits[0]),
            "num_processors": float(self.num_processors),
            "latency_ms": alpha,
            "turn_ms": omega,
            "message_ms": beta,
            "busiest_ms_per_byte": gamma / self.byte_scale,
            "total_ms_per_byte": delta / self.byte_scale,
        }


#: The compute networks that a configuration can name.
NETWORKS: dict[str, type[AdditiveNet] | type[SumNet]] = {
    "additive": AdditiveNet,
    "autoshard": SumNet,
    "neuroshard": SumNet,
}


def make_network(kind: str, options: Mapping[str, Any]) -> AdditiveNet | SumNet:
    """Make the network called `kind`; `neuroshard` has a network for each phase.

    Raises:
        InputError: an option is unknown or not usable.
    """
    values = dict(options)
    if kind == "neuroshard":
        values.setdefault("trunks", NUM_PHASES)
    network = NETWORKS[kind]
    allowed = list(inspect.signature(network).parameters)
    for name, value in values.items():
        if name not in allowed:
            raise InputError(
                f"unknown option {name!r} of the {kind} network",
                allowed=", ".join(allowed),
                remedy=did_you_mean(name, allowed),
            )
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise InputError(
                f"option {name} of the {kind} network is not usable",
                got=quoted(value),
                allowed="integers >= 1",
            )
    return network(**values)
