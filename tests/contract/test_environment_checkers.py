"""Gymnasium's and Stable-Baselines3's own checkers pass without a warning."""

from __future__ import annotations

import warnings

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env as gymnasium_check
from stable_baselines3.common.env_checker import check_env as sb3_check

import envs  # noqa: F401  (registers the environment)
from autoshard.tasks import TaskDistribution
from envs.episodes import EnvConfig, RewardKind
from envs.task_source import FixedTaskSource, RandomTaskSource, TaskSource
from tests.placement_cases import (
    COST_MODEL,
    dead_end_task,
    make_task,
    random_tables,
    replicated_task,
)

SOURCES: dict[str, TaskSource] = {
    "random tasks": RandomTaskSource(
        random_tables(30),
        COST_MODEL,
        TaskDistribution(num_tables=(1, 12), world_sizes=(1, 2, 5), batch_sizes=(64,)),
        num_tasks=20,
    ),
    "one table, one rank": FixedTaskSource([make_task(num_tables=1, world_size=1)]),
    "a dead end": FixedTaskSource([dead_end_task()]),
    "replicas": FixedTaskSource([replicated_task(num_replicas=3, num_placed=2)]),
}


@pytest.mark.parametrize("reward", list(RewardKind))
@pytest.mark.parametrize("source", SOURCES)
def test_both_checkers_pass_without_a_warning(source: str, reward: RewardKind) -> None:
    env = gymnasium.make(
        "autoshard/Placement-v0",
        tasks=SOURCES[source],
        cost_model=COST_MODEL,
        config=EnvConfig(max_ranks=6, reward=reward),
        disable_env_checker=True,
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        gymnasium_check(env.unwrapped)
        sb3_check(env.unwrapped)


def test_every_observation_lies_in_the_space() -> None:
    env = gymnasium.make(
        "autoshard/Placement-v0", tasks=SOURCES["random tasks"], cost_model=COST_MODEL
    )
    generator = np.random.default_rng(0)
    for episode in range(20):
        observation, _ = env.reset(seed=episode)
        ended = False
        while not ended:
            assert env.observation_space.contains(observation)
            mask = env.unwrapped.action_masks()
            assert np.array_equal(mask, observation["action_mask"].astype(bool))
            observation, _, ended, truncated, info = env.step(
                int(generator.choice(np.flatnonzero(mask)))
            )
            assert not truncated
        assert not info["illegal_action"]
        assert env.observation_space.contains(observation)
