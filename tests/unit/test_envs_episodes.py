"""The placement environment: rewards, endings, masks, padding and limits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from autoshard.errors import InputError
from autoshard.observation import NUM_RANK_FEATURES, RANK_FEATURES
from autoshard.placement import PlacementTask, prepare_task
from autoshard.sharders.cost_greedy import place_by_cost
from autoshard.shards import ShardSlice
from envs.episodes import EnvConfig, RewardKind
from envs.placement_env import PlacementEnv
from envs.task_source import FixedTaskSource
from tests.placement_cases import (
    COST_MODEL,
    dead_end_task,
    make_problem,
    make_task,
    predicted,
    random_tables,
    replicated_task,
)


def make_env(task: PlacementTask, **config: object) -> PlacementEnv:
    return PlacementEnv(FixedTaskSource([task]), COST_MODEL, EnvConfig(**config))  # type: ignore[arg-type]


def play(env: PlacementEnv, ranks: list[int]) -> tuple[list[float], dict]:
    env.reset(seed=0)
    rewards, info = [], {}
    for rank in ranks:
        _, reward, ended, _, info = env.step(rank)
        rewards.append(reward)
    assert ended
    return rewards, info


RANKS = [0, 1, 1, 0, 1, 0]


def test_the_terminal_reward_is_the_objective_of_the_finished_plan() -> None:
    task = make_task()
    rewards, info = play(make_env(task), RANKS)
    cost = predicted(task, RANKS)
    greedy = predicted(task, place_by_cost(task, COST_MODEL)).step_ms
    assert rewards[:-1] == [0.0] * 5
    assert info["objective_ms"] == pytest.approx(cost.step_ms, rel=1e-12)
    assert info["reference_ms"] == pytest.approx(greedy, rel=1e-9)
    assert rewards[-1] == pytest.approx(-cost.step_ms / greedy, rel=1e-9)


def test_the_assignment_is_what_was_played() -> None:
    task = make_task()
    _, info = play(make_env(task), RANKS)
    assert info["assignment"].slices == task.slices
    assert info["assignment"].ranks == tuple(RANKS)


@pytest.mark.parametrize("task", [make_task(), replicated_task(2, 6)], ids=["plain", "replicas"])
def test_incremental_rewards_add_up_to_the_terminal_one(task: PlacementTask) -> None:
    terminal, _ = play(make_env(task), RANKS)
    incremental, _ = play(make_env(task, reward=RewardKind.INCREMENTAL), RANKS)
    assert sum(incremental) == pytest.approx(terminal[-1], rel=1e-12)
    assert all(reward != 0 for reward in incremental[:2])


def test_no_plan_is_worth_less_than_none() -> None:
    task = make_task(num_tables=8, world_size=8)
    for reward in RewardKind:
        config = {"reward": reward, "failure_penalty": 1.5}
        everything_on_one, info = play(make_env(task, **config), [0] * 8)
        assert info["objective_ms"] / info["reference_ms"] > 1.5
        assert sum(everything_on_one) == pytest.approx(-1.5)


def test_the_scale_multiplies_rewards() -> None:
    plain, _ = play(make_env(make_task()), RANKS)
    scaled, _ = play(make_env(make_task(), reward_scale=20.0), RANKS)
    assert scaled[-1] == pytest.approx(20 * plain[-1])


@pytest.mark.parametrize("reward", list(RewardKind))
@pytest.mark.parametrize("action", [2, 7, -1, 99])
def test_an_illegal_action_ends_the_episode(reward: RewardKind, action: int) -> None:
    env = make_env(make_task(), reward=reward, failure_penalty=7.0)
    env.reset(seed=0)
    _, first, ended, _, _ = env.step(0)
    assert not ended
    observation, second, ended, truncated, info = env.step(action)
    assert ended
    assert not truncated
    assert info["illegal_action"]
    assert not info["infeasible"]
    assert "objective_ms" not in info
    assert first + second == pytest.approx(-7.0)
    assert not any(values.any() for values in observation.values())


@pytest.mark.parametrize("reward", list(RewardKind))
def test_a_dead_end_ends_the_episode_at_once(reward: RewardKind) -> None:
    env = make_env(dead_end_task(), reward=reward, failure_penalty=7.0)
    env.reset(seed=0)
    _, first, ended, _, _ = env.step(0)
    assert not ended
    assert env.action_masks()[:2].tolist() == [False, True]
    _, second, ended, _, info = env.step(1)
    assert ended
    assert info["infeasible"]
    assert not info["illegal_action"]
    assert "assignment" not in info
    assert first + second == pytest.approx(-7.0)


def test_a_first_slice_that_fits_nowhere_is_told_at_reset() -> None:
    tables = random_tables(2)
    problem = make_problem(tables, 2, 2_000_000)
    task = prepare_task(problem, COST_MODEL, [ShardSlice.whole(table) for table in tables])
    task = replace(task, capacity_bytes_R=np.zeros(2, dtype=np.int64))
    env = make_env(task)
    _, info = env.reset(seed=0)
    assert info["infeasible"]
    assert not env.action_masks().any()
    _, reward, ended, _, info = env.step(0)
    assert ended
    assert info["infeasible"]
    assert reward == -10.0


def test_parts_of_one_table_go_to_different_ranks() -> None:
    (table,) = random_tables(1)
    free = prepare_task(make_problem([table], 2), COST_MODEL)
    fixed = int(2**30 - free.capacity_bytes_R[0])
    hbm = fixed + int(free.memory_bytes_S[0] * 0.9)
    task = prepare_task(make_problem([table], 2, hbm), COST_MODEL)
    assert task.num_slices == 2
    env = make_env(task, max_ranks=4)
    env.reset(seed=0)
    assert env.action_masks().tolist() == [True, True, False, False]
    env.step(1)
    assert env.action_masks().tolist() == [True, False, False, False]


def test_padding_ranks_are_illegal_and_zero() -> None:
    task = make_task(world_size=3)
    narrow, _ = make_env(task, max_ranks=3).reset(seed=0)
    wide, _ = make_env(task, max_ranks=32).reset(seed=0)
    wide_RK = wide["ranks"].reshape(32, NUM_RANK_FEATURES)
    assert np.array_equal(wide_RK[:3].reshape(-1), narrow["ranks"])
    assert not wide_RK[3:].any()
    assert wide_RK[:, RANK_FEATURES.index("exists")].tolist() == [1.0] * 3 + [0.0] * 29
    assert wide["action_mask"].tolist() == [1] * 3 + [0] * 29
    assert np.array_equal(wide["globals"], narrow["globals"])


def test_one_table_on_one_rank() -> None:
    rewards, info = play(make_env(make_task(num_tables=1, world_size=1)), [0])
    assert info["assignment"].ranks == (0,)
    assert rewards == [pytest.approx(-1.0)]


def test_nothing_to_place_is_refused() -> None:
    env = make_env(replicated_task(num_replicas=3, num_placed=0))
    with pytest.raises(InputError, match=r"nothing to place.*3 replica"):
        env.reset(seed=0)


def test_a_task_beyond_the_sizes_is_refused() -> None:
    with pytest.raises(InputError, match=r"more ranks.*got: 9.*max_ranks 8"):
        make_env(make_task(world_size=9)).reset()
    with pytest.raises(InputError, match=r"more tables.*got: 6.*max_tables 5"):
        make_env(make_task(num_tables=6), max_tables=5).reset()


def test_reset_takes_a_task_and_refuses_other_options() -> None:
    env = make_env(make_task(world_size=2))
    _, info = env.reset(options={"task": make_task(num_tables=4, world_size=5)})
    assert (info["num_slices"], info["world_size"]) == (4, 5)
    with pytest.raises(InputError, match="tasks"):
        env.reset(options={"tasks": make_task()})
    with pytest.raises(InputError, match="prepare_task"):
        env.reset(options={"task": "something"})


def test_a_step_needs_a_running_episode() -> None:
    env = make_env(make_task())
    with pytest.raises(InputError, match="reset"):
        env.step(0)
    with pytest.raises(InputError, match="reset"):
        env.action_masks()
    play(env, RANKS)
    with pytest.raises(InputError, match="reset"):
        env.step(0)


def test_equal_seeds_draw_equal_tasks() -> None:
    source = FixedTaskSource([make_task(seed=seed) for seed in range(8)])

    def draws(seed: int) -> list[bytes]:
        env = PlacementEnv(source, COST_MODEL)
        first = env.reset(seed=seed)[0]
        return [first["ranks"].tobytes()] + [env.reset()[0]["ranks"].tobytes() for _ in range(5)]

    assert draws(3) == draws(3)
    assert draws(3) != draws(4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_ranks", 0),
        ("max_ranks", True),
        ("max_tables", 1.5),
        ("reward", "terminal"),
        ("failure_penalty", 0.0),
        ("failure_penalty", float("nan")),
        ("reward_scale", -1.0),
    ],
)
def test_an_unusable_config_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InputError, match=name):
        EnvConfig(**{name: value})  # type: ignore[arg-type]
