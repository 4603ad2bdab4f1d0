"""The batched environment does what as many single ones do."""

from __future__ import annotations

import numpy as np
import pytest
from sb3_contrib.common.maskable.utils import get_action_masks, is_masking_supported

from autoshard.errors import InputError
from autoshard.tasks import TaskDistribution
from envs.batched_env import BatchedPlacementEnv
from envs.episodes import EnvConfig, RewardKind
from envs.placement_env import PlacementEnv
from envs.task_source import FixedTaskSource, RandomTaskSource
from tests.placement_cases import COST_MODEL, dead_end_task, make_task, random_tables

SOURCE = RandomTaskSource(
    random_tables(30),
    COST_MODEL,
    TaskDistribution(
        num_tables=(1, 9), world_sizes=(1, 2, 4), batch_sizes=(64,), memory_slack=(1.0, 1.3)
    ),
    num_tasks=30,
)


@pytest.mark.parametrize("reward", list(RewardKind))
def test_it_equals_single_environments_step_by_step(reward: RewardKind) -> None:
    num, config = 7, EnvConfig(max_ranks=5, reward=reward)
    batched = BatchedPlacementEnv(SOURCE, COST_MODEL, num, config)
    batched.seed(11)
    singles = [PlacementEnv(SOURCE, COST_MODEL, config) for _ in range(num)]
    seen = batched.reset()
    alone = [env.reset(seed=11 + index)[0] for index, env in enumerate(singles)]
    generator = np.random.default_rng(0)
    endings = {"illegal_action": 0, "infeasible": 0, "objective_ms": 0}
    for _ in range(60):
        for key, values in seen.items():
            assert np.array_equal(values, np.stack([one[key] for one in alone]))
        masks = get_action_masks(batched)
        assert np.array_equal(masks, np.stack([env.action_masks() for env in singles]))
        # Mostly legal actions, now and then any.
        scores = generator.random(masks.shape) + masks * (generator.random((num, 1)) < 0.95)
        actions = scores.argmax(axis=1)
        seen, rewards, endeds, infos = batched.step(actions)
        for index, env in enumerate(singles):
            alone[index], reward_one, ended, _, info = env.step(actions[index])
            assert rewards[index] == np.float32(reward_one)
            assert endeds[index] == ended
            if ended:
                for key in info:
                    assert infos[index][key] == info[key]
                    endings[key] = endings.get(key, 0) + (info[key] is not False)
                terminal = infos[index]["terminal_observation"]
                for key, values in alone[index].items():
                    assert np.array_equal(terminal[key], values)
                alone[index] = env.reset()[0]
            else:
                assert infos[index] == {}
    assert all(count > 0 for count in endings.values()), endings


def test_an_episode_is_paid_exactly_once() -> None:
    task = make_task(num_tables=3)
    env = BatchedPlacementEnv(FixedTaskSource([task]), COST_MODEL, 4)
    env.reset()
    paid = np.zeros(4)
    for step in range(1, 10):
        _, rewards, endeds, infos = env.step(np.zeros(4, dtype=np.int64))
        paid += rewards
        assert endeds.all() == (step % 3 == 0)
        if step % 3 == 0:
            expected = -infos[0]["objective_ms"] / infos[0]["reference_ms"] * (step // 3)
            assert paid == pytest.approx([expected] * 4, rel=1e-6)


def test_a_dead_end_is_followed_by_a_new_episode() -> None:
    env = BatchedPlacementEnv(FixedTaskSource([dead_end_task()]), COST_MODEL, 1)
    first = env.reset()
    env.step(np.array([0]))
    again, _, endeds, infos = env.step(np.array([1]))
    assert endeds[0]
    assert infos[0]["infeasible"]
    assert np.array_equal(first["ranks"], again["ranks"])


def test_seeding_repeats_and_goes_on() -> None:
    env = BatchedPlacementEnv(SOURCE, COST_MODEL, 3)
    env.seed(5)
    first, second = env.reset()["ranks"], env.reset()["ranks"]
    env.seed(5)
    assert np.array_equal(env.reset()["ranks"], first)
    assert np.array_equal(env.reset()["ranks"], second)
    assert not np.array_equal(first, second)


def test_what_sb3_asks_for() -> None:
    env = BatchedPlacementEnv(SOURCE, COST_MODEL, 3)
    with pytest.raises(InputError, match="reset"):
        env.step(np.zeros(3, dtype=np.int64))
    env.reset()
    assert is_masking_supported(env)
    assert env.get_attr("num_envs", [0, 2]) == [3, 3]
    assert len(env.env_method("action_masks", indices=1)) == 1
    assert env.env_is_wrapped(object) == [False] * 3
    with pytest.raises(InputError, match="no method 'render'"):
        env.env_method("render")
    with pytest.raises(InputError, match="cannot set"):
        env.set_attr("config", None)
    with pytest.raises(InputError, match=r"got: 2.*allowed: 3"):
        env.step(np.zeros(2, dtype=np.int64))
    with pytest.raises(InputError, match="num_envs"):
        BatchedPlacementEnv(SOURCE, COST_MODEL, 0)
