"""Ranks under torchrun: two nodes on loopback, a rank that dies, and what is refused."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from autoshard.errors import InputError, PlanError
from autoshard.plan import ShardingPlan
from autoshard.runtime.capabilities import Device
from autoshard.runtime.results import RunOptions
from autoshard.runtime.torchrun import TorchrunPlace
from autoshard.shards import ShardingType
from autoshard.tables import Table
from autoshard.training.options import TrainingOptions
from autoshard.training.worker import train_plan
from tests.distributed.model_cases import Kind, make_plan
from tests.distributed.runtime_cases import alone

ROOT = Path(__file__).resolve().parents[2]
DATA = "clicks?samples=200&evaluation_samples=50"


def plan_of(kinds: list[Kind], world_size: int, local_world_size: int) -> ShardingPlan:
    tables = [
        Table(name=f"t{i}", num_embeddings=30, embedding_dim=8, pooling_factor=2)
        for i in range(len(kinds))
    ]
    return make_plan(
        tables, kinds, world_size, batch_size=20 // world_size, local_world_size=local_world_size
    )


class Nodes:
    """torchrun's agents, one per node, all on this machine."""

    def __init__(self, folder: Path, num_nodes: int, arguments: list[str]) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
        self.agents = []
        for node in range(num_nodes):
            self.agents.append(
                subprocess.Popen(
                    [sys.executable, "-m", "torch.distributed.run", f"--nnodes={num_nodes}",
                     "--nproc-per-node=1", f"--node-rank={node}", "--master-addr=127.0.0.1",
                     f"--master-port={port}", "-m", "autoshard.runtime",
                     str(folder / "plan.json"), *arguments],
                    cwd=ROOT, env=environment, text=True, start_new_session=True,
                    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                )
            )  # fmt: skip

    def wait(self, timeout_s: float) -> list[tuple[int, str, str]]:
        """(exit code, stdout, stderr) of each agent."""
        deadline = time.monotonic() + timeout_s
        ended = []
        for agent in self.agents:
            out, err = agent.communicate(timeout=deadline - time.monotonic())
            ended.append((agent.returncode, out, err))
        return ended

    def worker_of(self, node: int) -> int | None:
        """The process id of a node's rank, once it is there."""
        children = Path(f"/proc/{self.agents[node].pid}/task/{self.agents[node].pid}/children")
        for child in children.read_text().split():
            command = Path(f"/proc/{child}/cmdline").read_bytes()
            if b"autoshard.runtime" in command:
                return int(child)
        return None

    def close(self) -> None:
        for agent in self.agents:
            if agent.poll() is None:
                os.killpg(agent.pid, signal.SIGKILL)
                agent.communicate()


@pytest.fixture
def started() -> Iterator[list[Nodes]]:
    nodes: list[Nodes] = []
    yield nodes
    for one in nodes:
        one.close()


def test_two_nodes_train_as_one_process_does(tmp_path: Path, started: list[Nodes]) -> None:
    kinds: list[Kind] = ["0", "1", "dp", ShardingType.ROW_WISE]
    plan_of(kinds, 2, 1).save(tmp_path / "plan.json")
    arguments = ["--data", DATA, "--steps", "8", "--json", "--dense-optimizer", "sgd",
                 "--checkpoint", str(tmp_path / "ckpt"), "--out-dir", str(tmp_path / "out"),
                 "--timeout", "60"]  # fmt: skip
    started.append(Nodes(tmp_path, 2, arguments))
    (first, second) = started[0].wait(110)
    assert first[0] == 0, first[2]
    assert second[0] == 0, second[2]
    assert second[1] == ""  # rank 0 prints
    result = json.loads(first[1])["training"]
    options = TrainingOptions(data=DATA, max_steps=8, dense_optimizer="sgd")  # type: ignore[arg-type]
    expected = train_plan(alone(), plan_of(["0"] * 4, 1, 1), options)
    assert result["losses"] == pytest.approx(expected.losses, rel=1e-4)
    assert result["curve"][0]["log_loss"] == pytest.approx(expected.curve[0].log_loss, rel=1e-4)
    assert (tmp_path / "ckpt" / "step-00000008" / "rank-00001.safetensors").exists()
    assert (tmp_path / "out" / "learning_curve.png").exists()


@pytest.mark.slow
def test_a_rank_that_dies_on_one_node_ends_the_other_within_half_a_minute(
    tmp_path: Path, started: list[Nodes]
) -> None:
    plan_of(["0", "1"], 2, 1).save(tmp_path / "plan.json")
    arguments = ["--data", DATA, "--epochs", "1000000", "--eval-every", "10",
                 "--out-dir", str(tmp_path / "out")]  # fmt: skip
    nodes = Nodes(tmp_path, 2, arguments)
    started.append(nodes)
    deadline = time.monotonic() + 90
    while not (tmp_path / "out" / "learning_curve.jsonl").exists():
        assert time.monotonic() < deadline
        time.sleep(0.1)
    victim = nodes.worker_of(1)
    assert victim is not None
    killed = time.monotonic()
    os.kill(victim, signal.SIGKILL)
    (survivor, of_victim) = nodes.wait(60)
    assert time.monotonic() - killed < 30
    assert survivor[0] != 0
    assert of_victim[0] != 0
    # Its own agent names the rank and the signal; the other node's rank names the rank.
    assert "Signal 9 (SIGKILL)" in of_victim[2]
    assert re.search(rf"nothing is heard from rank 1 \([^)]*process {victim}\)", survivor[2])


def test_a_place_is_read_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
    for name, value in values.items():
        monkeypatch.setenv(name, value)
    place = TorchrunPlace.from_environment()
    assert place == TorchrunPlace(rank=3, world_size=4, local_rank=1, local_world_size=2)
    place.check(plan_of(["0"], 4, 2))
    with pytest.raises(PlanError, match=r"ranks per node; got: 2 processes .* allowed: 4"):
        place.check(plan_of(["0"], 4, 4))
    with pytest.raises(PlanError, match="another number of ranks"):
        place.check(plan_of(["0"], 2, 2))
    monkeypatch.setenv("RANK", "three")
    with pytest.raises(InputError, match="RANK is not set"):
        TorchrunPlace.from_environment()


def test_the_default_time_limit_lets_survivors_end_within_half_a_minute() -> None:
    from autoshard.runtime import torchrun

    assert torchrun.DEFAULT_TIMEOUT_S + torchrun._ROLL_CALL_S < 30
    assert RunOptions(timeout_s=torchrun.DEFAULT_TIMEOUT_S).device is Device.CPU
