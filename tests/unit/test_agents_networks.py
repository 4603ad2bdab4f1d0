"""The policy and value networks: equivariant over ranks, blind to padding, masked."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gymnasium import spaces

from agents.networks import ILLEGAL_LOGIT, PlacementPolicy, PolicyNetwork, ValueNetwork
from autoshard.observation import NUM_GLOBAL_FEATURES, NUM_RANK_FEATURES, RANK_FEATURES
from envs.episodes import EnvConfig, action_space, observation_space

EXISTS = RANK_FEATURES.index("exists")


def inputs(num: int = 4, ranks: int = 8) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    ranks_NRK = torch.randn(num, ranks, NUM_RANK_FEATURES, generator=generator)
    ranks_NRK[:, :, EXISTS] = 1.0
    legal_NR = torch.rand(num, ranks, generator=generator) < 0.7
    legal_NR[:, 0] = True
    return ranks_NRK, torch.randn(num, NUM_GLOBAL_FEATURES, generator=generator), legal_NR


@pytest.fixture
def networks() -> tuple[PolicyNetwork, ValueNetwork]:
    torch.manual_seed(0)
    return PolicyNetwork(64), ValueNetwork(64)


def test_permuting_ranks_permutes_logits_and_keeps_the_value(networks) -> None:
    policy, value = networks
    ranks_NRK, globals_NG, legal_NR = inputs()
    order = torch.tensor([3, 1, 7, 0, 2, 6, 5, 4])
    torch.testing.assert_close(
        policy(ranks_NRK[:, order], globals_NG, legal_NR[:, order]),
        policy(ranks_NRK, globals_NG, legal_NR)[:, order],
    )
    torch.testing.assert_close(value(ranks_NRK[:, order], globals_NG), value(ranks_NRK, globals_NG))


def test_padding_from_8_to_32_ranks_changes_nothing(networks) -> None:
    policy, value = networks
    ranks_NRK, globals_NG, legal_NR = inputs()
    wide_NRK = torch.zeros(4, 32, NUM_RANK_FEATURES)
    wide_NRK[:, :8] = ranks_NRK
    wide_legal_NR = torch.zeros(4, 32, dtype=torch.bool)
    wide_legal_NR[:, :8] = legal_NR
    logits = policy(wide_NRK, globals_NG, wide_legal_NR)
    torch.testing.assert_close(logits[:, :8], policy(ranks_NRK, globals_NG, legal_NR))
    assert (logits[:, 8:] == ILLEGAL_LOGIT).all()
    torch.testing.assert_close(value(wide_NRK, globals_NG), value(ranks_NRK, globals_NG))


def test_other_ranks_and_global_features_matter(networks) -> None:
    policy, _ = networks
    ranks_NRK, globals_NG, legal_NR = inputs()
    before = policy(ranks_NRK, globals_NG, legal_NR)[:, 0]
    changed = ranks_NRK.clone()
    changed[:, 5] += 3.0
    assert not torch.allclose(policy(changed, globals_NG, legal_NR)[:, 0], before)
    assert not torch.allclose(policy(ranks_NRK, globals_NG + 1, legal_NR)[:, 0], before)


def test_the_policy_never_chooses_an_illegal_rank_even_without_masks() -> None:
    config = EnvConfig(max_ranks=8)
    policy = PlacementPolicy(observation_space(config), action_space(config), lambda _: 1e-3)
    assert isinstance(policy.action_space, spaces.Discrete)
    ranks_NRK, globals_NG, legal_NR = inputs(num=500)
    obs = {
        "ranks": ranks_NRK.reshape(500, -1),
        "globals": globals_NG,
        "action_mask": legal_NR.float(),
    }
    torch.manual_seed(0)
    for masks in (None, legal_NR.numpy()):
        actions, values, log_prob = policy(obs, action_masks=masks)
        assert legal_NR[torch.arange(500), actions].all()
        assert values.shape == (500, 1)
        again_values, again_log_prob, entropy = policy.evaluate_actions(obs, actions, masks)
        torch.testing.assert_close(log_prob, again_log_prob)
        torch.testing.assert_close(values, again_values)
        assert entropy is not None
        assert torch.isfinite(entropy).all()
        assert (entropy <= np.log(8) + 1e-5).all()
