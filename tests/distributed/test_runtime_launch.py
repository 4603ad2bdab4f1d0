"""Plans are run from start to end: by one call, many in one group, and under torchrun."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from autoshard.errors import InputError, PlanError
from autoshard.objective import CostSource, StepCost
from autoshard.plan import ShardingPlan
from autoshard.problem import Optimizer
from autoshard.runtime.collectives import Collectives
from autoshard.runtime.launch import run_plans
from autoshard.runtime.results import RunOptions, RunResult
from autoshard.runtime.worker import RankProcess, execute_plan
from autoshard.tables import PoolingType, Table
from tests.distributed.model_cases import make_plan

ROOT = Path(__file__).resolve().parents[2]
OPTIONS = RunOptions(num_steps=4, warmup_steps=1, timeout_s=20)


def small_plan(kinds: list[str], world_size: int = 2) -> ShardingPlan:
    tables = [
        Table(
            name=f"t{i}",
            num_embeddings=40 + i,
            embedding_dim=6,
            pooling_factor=2.5,
            weighted=i == 1,
            pooling=PoolingType.MEAN,
            feature_names=(f"f{i}", "shared"),
        )
        for i in range(len(kinds))
    ]
    return make_plan(tables, kinds, world_size, Optimizer.ROWWISE_ADAGRAD, batch_size=8)


def run_here(plan: ShardingPlan) -> RunResult:
    """A world of one, in this process."""
    alone = Collectives(0, 1, device=torch.device("cpu"))
    process = RankProcess(alone, oversubscribed=False, report=lambda line: None)
    return execute_plan(process, plan, OPTIONS)


def test_plans_of_one_problem_train_alike_whatever_their_placement() -> None:
    seen: list[str] = []
    plans = [
        small_plan(["0", "1", "dp"]),
        small_plan(["dp", "dp", "dp"]),
        small_plan(["1", "1", "0"]),
    ]
    runs = run_plans(
        plans, options=OPTIONS, passes=2, progress=lambda rank, line: seen.append(line)
    )
    assert [run.position for run in runs] == list(range(6))
    for pass_index in range(2):
        assert {r.plan_index for r in runs if r.pass_index == pass_index} == {0, 1, 2}
    for run in runs:
        assert run.result.losses == pytest.approx(runs[0].result.losses, rel=1e-5)
        assert len(run.result.losses) == 5
        assert run.result.timings.num_steps == 4
        cost = run.result.cost
        assert cost.source is CostSource.MEASURED
        assert len(cost.fwd_compute_ms) == 2
        assert StepCost.from_json(json.loads(json.dumps(run.result.to_json()))["cost"]) == cost
        assert min(*cost.fwd_compute_ms, *cost.bwd_compute_ms, cost.bwd_comms_ms) > 0
        assert (cost.fwd_comms_ms == 0) == (run.plan_index == 1)  # replicas exchange no outputs
        assert np.all(run.result.timings.wall_ms_S > 0)
        again = next(
            r for r in runs if r.plan_index == run.plan_index and r.pass_index != run.pass_index
        )
        assert again.result.losses == run.result.losses  # the same run, to the last bit
    assert "building" in seen


def test_torchrun_runs_the_same_entry_point(tmp_path: Path) -> None:
    plan = small_plan(["0", "dp"], world_size=1)
    plan.save(tmp_path / "plan.json")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=1",
               "-m", "autoshard.runtime", str(tmp_path / "plan.json"), "--steps", "4",
               "--warmup-steps", "1", "--json"]  # fmt: skip
    done = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)["measured"]
    assert result["losses"] == pytest.approx(run_here(plan).losses, rel=1e-6)


def test_a_process_outside_a_launcher_is_told_what_to_do(tmp_path: Path) -> None:
    small_plan(["0", "1"]).save(tmp_path / "plan.json")
    from autoshard.runtime.__main__ import main

    assert main([str(tmp_path / "plan.json")]) == 2


def test_a_wrong_number_of_processes_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_plan(["0", "1"]).save(tmp_path / "plan.json")
    environment = {"RANK": "0", "WORLD_SIZE": "3", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "3"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    from autoshard.runtime.__main__ import main

    assert main([str(tmp_path / "plan.json")]) == 2
    assert "got: 3 processes; allowed: 2" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("plans", "options", "error"),
    [
        ([small_plan(["0"], 1), small_plan(["0"], 2)], {}, PlanError),
        ([small_plan(["0"], 1)], {"passes": 0}, InputError),
        ([small_plan(["0"], 1)], {"schedule": [0, 0]}, InputError),
    ],
)
def test_requests_that_make_no_sense_are_refused(
    plans: list[ShardingPlan], options: dict[str, object], error: type[Exception]
) -> None:
    with pytest.raises(error):
        run_plans(plans, **options)  # type: ignore[arg-type]
