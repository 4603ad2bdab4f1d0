"""Training: reaches a known optimum, repeats exactly, goes on after a kill."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from agents.checkpoints import CHECKPOINT_FILE
from agents.config import AgentConfig
from agents.metrics import METRICS_FILE
from agents.training import TrainingResult, train_agent
from agents.validation import NetworkScorer, Validation
from autoshard.errors import ArtifactError, InputError
from autoshard.placement import PlacementTask, prepare_task
from autoshard.sharders.cost_greedy import place_by_cost
from autoshard.sharders.learned import roll_out
from autoshard.tables import Table
from autoshard.tasks import TaskDistribution
from envs.task_source import FixedTaskSource, RandomTaskSource
from tests.placement_cases import (
    COST_MODEL,
    best_possible_ms,
    dead_end_task,
    make_problem,
    predicted,
    random_tables,
)

TINY = AgentConfig(
    num_updates=4, updates_per_segment=2, num_envs=4, steps_per_update=8, batch_size=16
)


def hard_task() -> PlacementTask:
    """Costs 3, 3, 2, 2, 2 and a crumb on two ranks: greedy balances 7 against 5, not 6 and 6."""
    tables = [
        Table(name=f"t{i}", num_embeddings=100_000, embedding_dim=32, pooling_factor=float(size))
        for i, size in enumerate((30, 30, 20, 20, 20, 0.1))
    ]
    return prepare_task(make_problem(tables, 2), COST_MODEL)


def small_source() -> RandomTaskSource:
    distribution = TaskDistribution(num_tables=(3, 6), world_sizes=(1, 2, 3), batch_sizes=(64,))
    return RandomTaskSource(random_tables(20), COST_MODEL, distribution, num_tasks=6)


def train(out: Path, config: AgentConfig = TINY, **options) -> TrainingResult:
    source = small_source()
    return train_agent(
        config,
        source,
        COST_MODEL,
        out,
        validation_tasks=[source.task(i) for i in range(4)],
        **options,
    )


def weights(result: TrainingResult) -> list[torch.Tensor]:
    return list(result.network.state_dict().values())


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / METRICS_FILE).read_text().splitlines()]


def test_ppo_reaches_the_optimum_that_greedy_misses(tmp_path: Path) -> None:
    task = hard_task()
    optimum = best_possible_ms(task)
    assert predicted(task, place_by_cost(task, COST_MODEL)).step_ms > 1.05 * optimum
    config = AgentConfig(
        num_updates=40,
        updates_per_segment=5,
        num_envs=32,
        steps_per_update=12,
        batch_size=128,
        learning_rate=1e-3,
        entropy_bonus=0.05,
        gae_lambda=1.0,
        max_ranks=2,
    )
    result = train_agent(
        config, FixedTaskSource([task]), COST_MODEL, tmp_path, validation_tasks=[task]
    )
    (rollout,) = roll_out([task], COST_MODEL, NetworkScorer(result.network))
    assert rollout.objective_ms == pytest.approx(optimum, rel=1e-9)
    records = lines(tmp_path)
    assert sum(record.get("invalid_actions", 0) for record in records) == 0
    assert records[-1]["mean_cost"] < records[1]["mean_cost"]


def test_equal_seeds_train_equal_policies(tmp_path: Path) -> None:
    state = np.random.get_state()[1].tolist()
    torch_state = torch.get_rng_state()
    one, same = train(tmp_path / "one"), train(tmp_path / "same")
    other = train(tmp_path / "other", replace(TINY, seed=1))
    assert all(torch.equal(a, b) for a, b in zip(weights(one), weights(same), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))
    # The caller's random numbers are left alone.
    assert np.random.get_state()[1].tolist() == state
    assert torch.equal(torch.get_rng_state(), torch_state)


class KilledError(Exception):
    """Stands for a kill."""


def test_a_killed_run_goes_on_and_ends_as_if_nothing_had_happened(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole")

    def kill(metrics: dict) -> None:
        if metrics["update"] == 3:
            raise KilledError

    with pytest.raises(KilledError):
        train(tmp_path / "killed", on_progress=kill)
    with (tmp_path / "killed" / METRICS_FILE).open("a") as stream:
        stream.write('{"update": 4, "num_pla')  # the kill cut a line off
    seen: list[int] = []
    resumed = train(tmp_path / "killed", on_progress=lambda m: seen.append(m["update"]))
    assert seen == [3, 4]
    assert all(torch.equal(a, b) for a, b in zip(weights(whole), weights(resumed), strict=True))
    assert resumed.best == whole.best
    without_time = [
        [{k: v for k, v in record.items() if k != "seconds"} for record in lines(tmp_path / name)]
        for name in ("whole", "killed")
    ]
    assert without_time[0] == without_time[1]
    # A finished run is not trained again.
    seen.clear()
    train(tmp_path / "killed", on_progress=lambda m: seen.append(m["update"]))
    assert seen == []


def test_a_folder_of_another_run_is_refused(tmp_path: Path) -> None:
    train(tmp_path)
    with pytest.raises(InputError, match=r"another configuration.*learning_rate.*new folder"):
        train(tmp_path, replace(TINY, learning_rate=0.1))


def test_a_damaged_checkpoint_is_refused(tmp_path: Path) -> None:
    train(tmp_path)
    path = tmp_path / CHECKPOINT_FILE
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(ArtifactError, match=r"checkpoint .* is damaged"):
        train(tmp_path)


def test_validation_counts_failures_and_ratios(tmp_path: Path) -> None:
    task = hard_task()
    result = train(tmp_path)
    figures = Validation([task, dead_end_task()], COST_MODEL).evaluate(result.network)
    (rollout,) = roll_out([task], COST_MODEL, NetworkScorer(result.network))
    greedy_ms = predicted(task, place_by_cost(task, COST_MODEL)).step_ms
    assert rollout.objective_ms is not None
    assert figures.objective_ratio == pytest.approx(rollout.objective_ms / greedy_ms, rel=1e-9)
    assert figures.worst_ratio == pytest.approx(figures.objective_ratio)
    # Neither solves the dead end: it counts for nobody.
    assert (figures.num_compared, figures.num_failed, figures.num_rescued) == (1, 0, 0)


@pytest.mark.parametrize(
    ("name", "value"),
    [("num_updates", -1), ("seed", -1), ("learning_rate", float("inf")), ("gae_lambda", 1.5)],
)
def test_an_unusable_config_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(InputError, match=name):
        AgentConfig(**{name: value})  # type: ignore[arg-type]
