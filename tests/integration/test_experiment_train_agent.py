"""`python -m experiments.train_agent` from any folder: trains, exports, goes on, refuses."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from autoshard.policies import load_policy

ROOT = Path(__file__).parents[2]
TINY = (
    "agent=demo",
    "agent.num_updates=2",
    "agent.updates_per_segment=1",
    "agent.num_envs=4",
    "agent.steps_per_update=8",
    "num_tasks=3",
    "num_validation_tasks=2",
    "pool.workload.num_tables=120",
    "tasks.num_tables=[4,8]",
    "cost_model=analytic",
    "out=run",
)


def start(cwd: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.train_agent", *TINY, *overrides],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )


def test_it_trains_exports_and_refuses_another_configuration(tmp_path: Path) -> None:
    result = start(tmp_path)
    assert result.returncode == 0, result.stderr
    policy = load_policy(tmp_path / "run" / "policy")
    assert policy.config["training"]["agent"]["num_updates"] == 2
    assert policy.config["training"]["pool"]["name"] == "laptop"
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["update"] for line in lines] == [0, 1, 2]
    png = (tmp_path / "run" / "learning_curve.png").read_bytes()
    assert png.startswith(b"\x89PNG")

    refused = start(tmp_path, "agent.seed=5")
    assert refused.returncode == 2
    assert "different: seed" in refused.stderr
    assert "Traceback" not in refused.stderr


def test_tasks_beyond_the_environment_are_refused(tmp_path: Path) -> None:
    refused = start(tmp_path, "tasks.world_sizes=[2,16]")
    assert refused.returncode == 2
    assert "agent.max_ranks=16" in refused.stderr
