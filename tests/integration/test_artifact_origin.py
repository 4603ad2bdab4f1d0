"""Artifacts do not depend on where, when or how fast they were made, only on what was learned."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.artifact_files import CONFIG_FILE, SHIPPED_FOLDER
from autoshard.cost_models.exported import load_cost_model
from autoshard.policies import load_policy

ROOT = Path(__file__).parents[2]
#: Trains a tiny cost model and exports an untrained policy; arguments: folder, seconds.
SCRIPT = """
import sys
from pathlib import Path
import torch
from agents.config import AgentConfig
from agents.export import export_policy
from agents.networks import PolicyNetwork
from agents.training import TrainingResult
from agents.validation import ValidationResult
from autoshard.cost_models.exported import load_cost_model
from cost_net.pipeline import MODEL_FOLDER, train_cost_model
from cost_net.training import CostNetConfig
from tests.synthetic_measurements import measured

out = Path(sys.argv[1])
config = CostNetConfig(num_epochs=2, collective_epochs=5)
train_cost_model(measured(60), config, out / "cost_net")
figures = ValidationResult(
    objective_ratio=1.0, worst_ratio=1.0, share_better=0.0,
    num_compared=1, num_failed=0, num_rescued=0,
)
torch.manual_seed(0)
result = TrainingResult(
    network=PolicyNetwork(8), untrained=figures, best=figures,
    num_updates=1, num_placements=1, seconds=float(sys.argv[2]),
)
model = load_cost_model(out / "cost_net" / MODEL_FOLDER)
export_policy(result, AgentConfig(), model, out / "policy")
"""


def make_artifacts(checkout: Path, out: Path, seconds: float) -> dict[str, dict]:
    """Run the script on the code of `checkout`; the config of each artifact."""
    environment = {**os.environ, "PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    subprocess.run(
        [sys.executable, "-c", SCRIPT, str(out), str(seconds)],
        cwd=checkout,
        env=environment,
        check=True,
        timeout=120,
    )
    return {
        name: json.loads((out / name / CONFIG_FILE).read_text())
        for name in ("cost_net/model", "policy")
    }


@pytest.fixture(scope="module")
def two_checkouts(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, dict, list[Path]]:
    folder = tmp_path_factory.mktemp("origin")
    elsewhere = folder / "another checkout"
    for package in ("autoshard", "agents", "cost_net", "envs", "tests"):
        shutil.copytree(
            ROOT / package,
            elsewhere / package,
            ignore=shutil.ignore_patterns("__pycache__", "artifacts"),
        )
    here = make_artifacts(ROOT, folder / "here", seconds=1.0)
    there = make_artifacts(elsewhere, folder / "there", seconds=99.0)
    return here, there, [ROOT, elsewhere, folder]


@pytest.mark.parametrize("name", ["cost_net/model", "policy"])
def test_two_checkouts_give_one_fingerprint(two_checkouts, name: str) -> None:
    here, there, _ = two_checkouts
    assert here[name]["fingerprint"] == there[name]["fingerprint"]
    programs = [file for file in here[name]["files"] if file.endswith(".pt2")]
    assert programs
    for file in (*programs, "weights.safetensors"):
        assert here[name]["files"][file] == there[name]["files"][file], file
    # What is only told is not what is.
    if name == "policy":
        assert here[name]["checksum"] != there[name]["checksum"]


def test_no_file_names_a_folder_of_this_machine(two_checkouts) -> None:
    *_, folders = two_checkouts
    for path in (folders[-1] / "here").rglob("*.pt2"):
        content = path.read_bytes()
        assert not any(str(folder).encode() in content for folder in folders), path
        assert b"stack_trace" not in content


def test_the_shipped_policy_names_the_shipped_cost_model() -> None:
    policy, model = load_policy(), load_cost_model("default")
    assert policy.config["cost_model"]["fingerprint"] == model.fingerprint
    card = SHIPPED_FOLDER / "policies" / "default" / "card.md"
    assert model.fingerprint in card.read_text(encoding="utf-8")
