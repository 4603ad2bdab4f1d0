"""The policy and value network: one small network for every rank, pooled over ranks.

Weights are shared over ranks and steps, ranks are numbered nowhere, and pooling covers the
ranks that exist: any number of tables, ranks and padding ranks will do, and permuting ranks
permutes the logits. `PlacementPolicy` is what sb3-contrib's `MaskablePPO` trains,
`PolicyNetwork` what is exported.

Shapes: N=states, R=ranks, K=rank features, G=global features, H=hidden width.
"""

from __future__ import annotations

from typing import Any

import torch
from sb3_contrib.common.maskable.distributions import MaskableDistribution
from sb3_contrib.common.maskable.policies import MaskableActorCriticPolicy
from stable_baselines3.common.torch_layers import CombinedExtractor
from stable_baselines3.common.type_aliases import PyTorchObs, Schedule
from torch import Tensor, nn

from autoshard.observation import NUM_GLOBAL_FEATURES, NUM_RANK_FEATURES, RANK_FEATURES

_EXISTS = RANK_FEATURES.index("exists")
#: Logit of an illegal rank: far below any real one, and finite.
ILLEGAL_LOGIT = -1e8


class RankEncoder(nn.Module):
    """Describes each rank by itself, and all that exist by their mean and maximum."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.rank_input = nn.Linear(NUM_RANK_FEATURES, hidden_size)
        self.global_input = nn.Linear(NUM_GLOBAL_FEATURES, hidden_size, bias=False)
        self.hidden = nn.Linear(hidden_size, hidden_size)

    def forward(self, ranks_NRK: Tensor, globals_NG: Tensor) -> tuple[Tensor, Tensor]:
        """Encode.

        Args:
            ranks_NRK: float32, as built by `autoshard.observation.observe`.
            globals_NG: float32.

        Returns:
            Per rank, float32 [N, R, H], and pooled, float32 [N, 2H].
        """
        exists_NR1 = ranks_NRK[:, :, _EXISTS : _EXISTS + 1]
        mixed_NRH = self.rank_input(ranks_NRK) + self.global_input(globals_NG)[:, None, :]
        # ReLU keeps everything >= 0, so zeroed padding never is the maximum.
        encoded_NRH = torch.relu(self.hidden(torch.relu(mixed_NRH))) * exists_NR1
        mean_NH = encoded_NRH.sum(dim=1) / exists_NR1.sum(dim=1).clamp(min=1.0)
        return encoded_NRH, torch.cat([mean_NH, encoded_NRH.amax(dim=1)], dim=-1)


class PolicyNetwork(nn.Module):
    """Scores ranks."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.encoder = RankEncoder(hidden_size)
        self.rank_hidden = nn.Linear(hidden_size, hidden_size)
        self.pooled_hidden = nn.Linear(2 * hidden_size, hidden_size, bias=False)
        self.score = nn.Linear(hidden_size, 1)
        # Features such as orders by cost are good scores themselves; the rest corrects them.
        self.direct_score = nn.Linear(NUM_RANK_FEATURES, 1, bias=False)

    def forward(self, ranks_NRK: Tensor, globals_NG: Tensor, legal_NR: Tensor) -> Tensor:
        """Logits, float32 [N, R]; `ILLEGAL_LOGIT` where `legal_NR` (bool) is False."""
        encoded_NRH, pooled_N2H = self.encoder(ranks_NRK, globals_NG)
        hidden_NRH = torch.relu(
            self.rank_hidden(encoded_NRH) + self.pooled_hidden(pooled_N2H)[:, None, :]
        )
        logits_NR = (self.score(hidden_NRH) + self.direct_score(ranks_NRK))[:, :, 0]
        return logits_NR.masked_fill(~legal_NR, ILLEGAL_LOGIT)


class ValueNetwork(nn.Module):
    """Predicts the return from the pooled ranks; shares nothing with the policy."""

    def __init__(self, hidden_size: int) -> None:
        super().__init__()
        self.encoder = RankEncoder(hidden_size)
        self.hidden = nn.Linear(2 * hidden_size + NUM_GLOBAL_FEATURES, hidden_size)
        self.value = nn.Linear(hidden_size, 1)

    def forward(self, ranks_NRK: Tensor, globals_NG: Tensor) -> Tensor:
        """Values, float32 [N, 1]."""
        _, pooled_N2H = self.encoder(ranks_NRK, globals_NG)
        return self.value(torch.relu(self.hidden(torch.cat([pooled_N2H, globals_NG], dim=-1))))


class PlacementPolicy(MaskableActorCriticPolicy):
    """The networks as a policy for `MaskablePPO` on a placement environment."""

    def __init__(self, *args: Any, hidden_size: int = 64, first_value: float = 0.0, **kwargs: Any):
        """See `MaskableActorCriticPolicy`.

        Args:
            *args: spaces and learning-rate schedule.
            hidden_size: width of every layer.
            first_value: what the untrained value network predicts at about, so that learning
                does not begin with a wrong offset.
            **kwargs: passed on.
        """
        self._hidden_size, self._first_value = hidden_size, first_value
        # Flattens and casts only; it has no weights.
        kwargs.setdefault("features_extractor_class", CombinedExtractor)
        super().__init__(*args, **kwargs)

    def _build(self, lr_schedule: Schedule) -> None:
        self.policy_network = PolicyNetwork(self._hidden_size)
        self.value_network = ValueNetwork(self._hidden_size)
        nn.init.orthogonal_(self.policy_network.score.weight, gain=0.01)
        nn.init.zeros_(self.policy_network.score.bias)
        nn.init.zeros_(self.policy_network.direct_score.weight)
        nn.init.constant_(self.value_network.value.bias, self._first_value)
        self.optimizer = self.optimizer_class(
            self.parameters(),
            lr=lr_schedule(1),  # type: ignore[call-arg]
            **self.optimizer_kwargs,
        )

    def forward(
        self, obs: PyTorchObs, deterministic: bool = False, action_masks: Any = None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Choose actions; also their values and log-probabilities."""
        distribution = self.get_distribution(obs, action_masks)
        actions = distribution.get_actions(deterministic=deterministic)
        return actions, self.predict_values(obs), distribution.log_prob(actions)

    def evaluate_actions(
        self, obs: PyTorchObs, actions: Tensor, action_masks: Tensor | None = None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Values, log-probabilities and entropies of given actions."""
        distribution = self.get_distribution(obs, action_masks)
        return self.predict_values(obs), distribution.log_prob(actions), distribution.entropy()

    def get_distribution(self, obs: PyTorchObs, action_masks: Any = None) -> MaskableDistribution:
        """The masked distribution over ranks; the observation's own mask always holds."""
        ranks_NRK, globals_NG = _unpack(obs)
        legal_NR = obs["action_mask"] > 0.5  # type: ignore[index]
        logits_NR = self.policy_network(ranks_NRK, globals_NG, legal_NR)
        distribution = self.action_dist.proba_distribution(action_logits=logits_NR)
        if action_masks is not None:
            distribution.apply_masking(action_masks)
        return distribution

    def predict_values(self, obs: PyTorchObs) -> Tensor:
        """Values, float32 [N, 1]."""
        return self.value_network(*_unpack(obs))


def _unpack(obs: Any) -> tuple[Tensor, Tensor]:
    ranks = obs["ranks"].float()
    return ranks.reshape(len(ranks), -1, NUM_RANK_FEATURES), obs["globals"].float()
