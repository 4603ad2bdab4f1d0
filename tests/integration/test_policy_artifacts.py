"""Export → load → the same actions, in this process and in a fresh one; the `ppo` sharder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from agents.config import AgentConfig
from agents.export import export_policy
from agents.networks import PolicyNetwork
from agents.training import TrainingResult
from agents.validation import NetworkScorer, ValidationResult
from autoshard.artifact_files import CONFIG_FILE, seal
from autoshard.errors import ArtifactError, InfeasibleError, InputError
from autoshard.observation import observe
from autoshard.placement import PlacementState
from autoshard.policies import Policy, load_policy
from autoshard.protocols import SearchBudget
from autoshard.sharders.cost_greedy import place_by_cost
from autoshard.sharders.learned import PolicySharder, roll_out, rollouts
from tests.placement_cases import (
    COST_MODEL,
    dead_end_task,
    make_problem,
    make_task,
    predicted,
    random_tables,
    replicated_task,
)

FIGURES = ValidationResult(
    objective_ratio=1.01,
    worst_ratio=1.1,
    share_better=0.2,
    num_compared=5,
    num_failed=0,
    num_rescued=0,
)


@pytest.fixture(scope="module")
def network() -> PolicyNetwork:
    torch.manual_seed(1)
    return PolicyNetwork(64).eval()


@pytest.fixture(scope="module")
def folder(network: PolicyNetwork, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policies") / "tested"
    result = TrainingResult(
        network=network,
        untrained=FIGURES,
        best=FIGURES,
        num_updates=3,
        num_placements=100,
        seconds=1.0,
    )
    export_policy(result, AgentConfig(), COST_MODEL, folder, facts={"pool": "made up"})
    return folder


@pytest.fixture(scope="module")
def policy(folder: Path) -> Policy:
    return load_policy(folder)


@pytest.mark.parametrize(("num", "ranks"), [(1, 1), (1, 4), (3, 2), (70, 33)])
def test_the_export_scores_like_the_network(
    network: PolicyNetwork, policy: Policy, num: int, ranks: int
) -> None:
    state = PlacementState([make_task(num_tables=3, world_size=ranks)] * num, COST_MODEL)
    seen = observe(state, state.candidates())
    np.testing.assert_allclose(
        policy.logits_NR(seen), NetworkScorer(network).logits_NR(seen), rtol=1e-5, atol=1e-5
    )


def test_a_fresh_process_elsewhere_plans_the_same_without_training_code(
    network: PolicyNetwork, folder: Path, tmp_path: Path
) -> None:
    script = f"""
import json, sys
sys.path.insert(0, {str(Path(__file__).parents[2])!r})
from autoshard.policies import load_policy
from autoshard.sharders.learned import rollouts
from tests.placement_cases import COST_MODEL, make_task
policy = load_policy({str(folder)!r})
found = [rollouts(make_task(12, 4, seed), COST_MODEL, policy, 3, 0)[0] for seed in range(4)]
training = {{"agents", "envs", "stable_baselines3", "gymnasium"}}
loaded = sorted(training & set(sys.modules))
print(json.dumps([[list(r.ranks) for r in found], loaded]))
"""
    output = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    ).stdout
    ranks, loaded = json.loads(output)
    scorer = NetworkScorer(network)
    assert ranks == [
        list(rollouts(make_task(12, 4, seed), COST_MODEL, scorer, 3, 0)[0].ranks)
        for seed in range(4)
    ]
    assert loaded == []


def test_the_card_and_config_tell_where_the_policy_comes_from(folder: Path, policy: Policy) -> None:
    assert COST_MODEL.fingerprint in (folder / "card.md").read_text()
    assert policy.config["training"]["pool"] == "made up"
    assert policy.name == "tested"
    assert policy.fingerprint == json.loads((folder / CONFIG_FILE).read_text())["fingerprint"]


def test_a_policy_for_other_features_is_refused(folder: Path, tmp_path: Path) -> None:
    config = json.loads((folder / CONFIG_FILE).read_text())
    config["rank_features"][0] = "colour"
    config = seal(config)
    other = tmp_path / "other"
    other.mkdir()
    for path in folder.iterdir():
        (other / path.name).write_bytes(path.read_bytes())
    (other / CONFIG_FILE).write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=r"rank_features.*exists.*colour"):
        load_policy(other)


def test_a_missing_policy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="does not exist"):
        load_policy(tmp_path / "nowhere")


def test_rollouts_are_seeded_sorted_and_include_the_best_ranks(policy: Policy) -> None:
    task = make_task(num_tables=10, world_size=4)
    found = rollouts(task, COST_MODEL, policy, 6, seed=0)
    assert found == rollouts(task, COST_MODEL, policy, 6, seed=0)
    assert found != rollouts(task, COST_MODEL, policy, 6, seed=1)
    objectives = [rollout.objective_ms for rollout in found]
    assert len(set(objectives)) > 1
    assert objectives == sorted(objectives)
    (plain,) = rollouts(task, COST_MODEL, policy, 1, seed=0)
    assert plain.ranks in [rollout.ranks for rollout in found]
    for rollout in found:
        expected = predicted(task, rollout.ranks).step_ms
        assert rollout.objective_ms == pytest.approx(expected, rel=1e-12)


def test_the_sharder_keeps_the_best_rollout(policy: Policy) -> None:
    problem = make_problem(random_tables(10), 4)
    task = make_task(num_tables=10, world_size=4)

    def objective(num_rollouts: int, seed: int = 0, **budget: float) -> float:
        sharder = PolicySharder(policy, num_rollouts=num_rollouts)
        assignment = sharder.assign(problem, COST_MODEL, seed=seed, budget=SearchBudget(**budget))
        return predicted(task, assignment.ranks).step_ms

    first = objective(1)
    assert all(objective(1, seed) == first for seed in range(3))
    assert min(objective(64, seed) for seed in range(3)) < first
    assert max(objective(64, seed) for seed in range(3)) <= first
    # A budget for one rollout makes one, and no time at all still makes one.
    assert objective(64, num_evaluations=40) == first
    assert objective(64, time_limit_s=0.0) == first


def test_time_that_ran_out_is_told(policy: Policy) -> None:
    problem = make_problem(random_tables(10), 4)
    budget = SearchBudget(time_limit_s=0.0)
    many = PolicySharder(policy, num_rollouts=4).assign(problem, COST_MODEL, seed=0, budget=budget)
    one = PolicySharder(policy).assign(problem, COST_MODEL, seed=0, budget=budget)
    assert many.cut_short
    assert not one.cut_short


def test_replicas_go_everywhere_and_need_no_rollout(policy: Policy) -> None:
    task = replicated_task(num_replicas=2, num_placed=0)
    (rollout,) = rollouts(task, COST_MODEL, policy, 1, seed=0)
    assert rollout.ranks == ()
    assert rollout.objective_ms == pytest.approx(predicted(task, []).step_ms)


def test_a_dead_end_names_slice_bytes_and_ranks(policy: Policy) -> None:
    task = dead_end_task()
    assert not any(r.is_complete for r in roll_out([task] * 2, COST_MODEL, policy))
    with pytest.raises(InfeasibleError, match=r"ppo found no rank for table 't2'.*GiB needed"):
        rollouts(task, COST_MODEL, policy, 5, seed=0)
    with pytest.raises(InfeasibleError, match="'t2'"):
        PolicySharder(policy, num_rollouts=5).assign(
            task.problem, COST_MODEL, seed=0, budget=SearchBudget()
        )


def test_no_rollouts_are_refused(policy: Policy) -> None:
    with pytest.raises(InputError, match="rollouts"):
        rollouts(make_task(), COST_MODEL, policy, 0, seed=0)


def test_the_shipped_policy_places_unseen_tables_about_as_well_as_the_cost_greedy() -> None:
    policy = load_policy("default")
    tasks = [
        make_task(num_tables=40, world_size=ranks, seed=100 + ranks) for ranks in (2, 3, 4, 8, 12)
    ]
    found = roll_out(tasks, COST_MODEL, policy)
    ratios = []
    for task, rollout in zip(tasks, found, strict=True):
        assert rollout.objective_ms is not None
        greedy_ms = predicted(task, place_by_cost(task, COST_MODEL)).step_ms
        ratios.append(rollout.objective_ms / greedy_ms)
    assert np.exp(np.mean(np.log(ratios))) < 1.02, ratios
