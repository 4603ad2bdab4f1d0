"""A contender that fails costs the speed comparison its own result and nothing else."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from autoshard.errors import WorkerError
from autoshard.shards import ShardingType
from benchmarks.runtime_speed import __main__ as benchmark
from benchmarks.runtime_speed import sides
from benchmarks.runtime_speed.bench import Bench, Budget, ContenderError
from benchmarks.runtime_speed.cases import uniform_model
from benchmarks.runtime_speed.comparisons import Case, Comparison, Failure
from benchmarks.runtime_speed.sides import Side, SideError

BUDGET = Budget(rounds=1, steps=1, slow_steps=1)
CASE = Case(
    section="step",
    model=uniform_model(scale=0.001),
    kind=ShardingType.ROW_WISE,
    contenders=("autoshard/plain", "floor/sliced"),
)
#: Stands for an interpreter: runs the worker with other contenders in the place of TorchRec's.
INTERPRETER = r"""#!{python}
import os, resource, runpy, signal, sys, time, types

import torch


class Raising:
    def __init__(self, rank):
        self.rank = rank

    def step(self, index):
        if self.rank == 1:
            print("noise of a library", file=sys.stderr)
            raise RuntimeError("all tables are on fire [see below]\nand so is the roof")

    def outputs(self):
        return torch.zeros(1)


class Dying:
    def __init__(self, rank):
        self.rank = rank

    def run(self, num_steps):
        if self.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.barrier()  # raises because the other rank is gone


def make(variant, folder, rank):
    if variant == "plain":
        return Raising(rank)
    if variant == "loop":
        return Dying(rank)
    if variant == "sleeping":
        time.sleep(60)
    if variant == "aborting":
        print("noise of a library\nterminate called: out of luck", file=sys.stderr, flush=True)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        os.abort()
    from benchmarks.runtime_speed import autoshard_side

    return autoshard_side.make(variant, folder, rank)


fake = types.ModuleType("benchmarks.runtime_speed.torchrec_side")
fake.make = make
sys.modules[fake.__name__] = fake
sys.argv = sys.argv[2:]  # without "-m"
runpy.run_module("benchmarks.runtime_speed.worker", run_name="__main__")
"""


def silent(text: str, lasting: bool = False) -> None:
    """A `Note` that nobody reads."""


@pytest.fixture
def interpreter(tmp_path: Path) -> Path:
    path = tmp_path / "python"
    path.write_text(INTERPRETER.replace("{python}", sys.executable))
    path.chmod(0o755)
    return path


def test_a_failed_contender_leaves_the_other_results(
    interpreter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    loop = replace(CASE, section="loop", overlapped=True)
    cases = [
        replace(CASE, contenders=(*CASE.contenders, "torchrec/plain")),
        replace(loop, contenders=("autoshard/loop", "torchrec/loop")),
        replace(loop, section="pipelined", contenders=("autoshard/loop", "torchrec/pipelined")),
    ]
    monkeypatch.setattr(benchmark, "cases_of", lambda *_, **__: iter(cases))
    out = tmp_path / "speed.json"
    arguments = ["--quick", "--models", "uniform", "--only", "torchrec", "--out", str(out)]
    assert benchmark.main([*arguments, "--torchrec-python", str(interpreter)]) == 1
    results = json.loads(out.read_text())
    assert results["finished"] is True
    assert {c["section"]: list(c["contenders"]) for c in results["comparisons"]} == {
        "step": ["autoshard/plain", "floor/sliced"],
        "loop": ["autoshard/loop"],
        "pipelined": ["autoshard/loop", "torchrec/pipelined"],
    }
    place = {"model": "uniform", "sharding_type": "row_wise"}
    assert results["failures"] == [
        {
            "section": "step",
            **place,
            "contender": "torchrec/plain",
            # Whole, on one line, and without what the library said besides.
            "reason": "torchrec: check: rank 1: RuntimeError: all tables are on fire [see below] "
            "and so is the roof",
        },
        {
            "section": "loop",
            **place,
            "contender": "torchrec/loop",
            "reason": "torchrec: check: rank 1 was ended by SIGKILL",
        },
    ]
    printed = " ".join(capsys.readouterr().out.split())
    assert "failed: uniform row_wise torchrec/loop: torchrec: check: rank 1 was ended" in printed
    assert "[see below]" in printed


def test_ours_failing_ends_the_case_and_not_the_run() -> None:
    with Bench(BUDGET, None, silent) as bench:
        comparison, failures = bench.run(
            replace(CASE, contenders=("autoshard/plain", "floor/unknown"))
        )
        assert comparison is None
        assert [failure.contender for failure in failures] == ["floor/unknown"]
        assert failures[0].reason.endswith("contender is not known; got: floor/unknown")
        comparison, failures = bench.run(CASE)
    assert comparison is not None
    assert comparison.rounds_ms.keys() == {"autoshard/plain", "floor/sliced"}
    assert failures == []


@pytest.mark.parametrize(
    ("variant", "message"),
    [
        ("sleeping", "torchrec: load: no answer of rank 0 within 1 s"),
        ("aborting", "torchrec: load: rank 0 was ended by SIGABRT: terminate called: out of luck"),
    ],
)
def test_a_lost_worker_is_explained(
    interpreter: Path, monkeypatch: pytest.MonkeyPatch, variant: str, message: str
) -> None:
    with Side("torchrec", world_size=1, python=str(interpreter)) as side:
        monkeypatch.setattr(sides, "COMMAND_TIMEOUT_S", 1.0)
        with pytest.raises(SideError) as caught:
            side.ask("load", name=f"torchrec/{variant}", key=variant, folder="")
        assert str(caught.value) == message
        assert not side.is_open


@pytest.mark.parametrize(
    ("python", "message"),
    [
        ("/dev/null", "autoshard: /dev/null does not start; got: Permission denied"),
        ("/bin/false", "autoshard: start: rank 0 ended with 1"),
    ],
)
def test_a_side_that_does_not_start(python: str, message: str) -> None:
    with pytest.raises(SideError) as caught:
        Side("autoshard", world_size=1, python=python)
    assert str(caught.value) == message


class Told:
    """A side whose contenders compute what they are told to."""

    def __init__(self, off: dict[str, float]) -> None:
        self._off = off

    def ask(
        self, command: str, per_rank: list[dict[str, Any]], *, key: str, num_steps: int
    ) -> None:
        assert command == "check"
        for rank in per_rank:
            outputs = [torch.full((2, 2), 10.0) for _ in range(num_steps)]
            outputs[-1][1, 1] += self._off[key]
            torch.save(outputs, rank["path"])


@pytest.mark.parametrize("off", [0.1, -0.1, float("nan")])
def test_contenders_with_other_numbers_are_not_timed(tmp_path: Path, off: float) -> None:
    bench = Bench(BUDGET, None, silent)
    told = Told({"autoshard/plain": 0.0, "floor/sliced": off})
    bench._sides["autoshard"] = told  # type: ignore[assignment]
    with pytest.raises(ContenderError, match="it computes other numbers") as caught:
        bench._check(["autoshard/plain", "floor/sliced"], tmp_path)
    assert caught.value.contender == "floor/sliced"


class Interrupted(Bench):
    """Whose user loses patience in the second case."""

    def describe(self) -> dict[str, Any]:
        return {}

    def run(self, case: Case) -> tuple[Comparison | None, list[Failure]]:
        if case.kind is not ShardingType.ROW_WISE:
            raise KeyboardInterrupt
        comparison = Comparison(
            section=case.section,
            model=case.model.name,
            kind=case.kind,
            ours="autoshard/plain",
            rounds_ms={"autoshard/plain": [[4.0]], "floor/sliced": [[2.0]]},
            largest_difference={"floor/sliced": 0.0},
        )
        return comparison, []


def test_a_killed_run_keeps_what_it_had(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(benchmark, "Bench", Interrupted)
    out = tmp_path / "speed.json"
    arguments = ["--models", "uniform", "--types", "row_wise,table_wise", "--out", str(out)]
    with pytest.raises(KeyboardInterrupt):
        benchmark.main([*arguments, "--only", "floor"])
    results = json.loads(out.read_text())
    assert results["finished"] is False
    (comparison,) = results["comparisons"]
    assert comparison["contenders"]["floor/sliced"]["ratio"]["value"] == 2.0
    assert "2.00 [2.00, 2.00]" in capsys.readouterr().out


def test_a_plan_whose_memory_is_not_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = []

    def measure(kind: ShardingType, *, scale: float) -> list[Any]:
        tried.append(kind)
        raise WorkerError(f"rank 1 was killed by\nSIGKILL at {scale:g}")

    monkeypatch.setattr(benchmark, "measure_memory", measure)
    out = tmp_path / "speed.json"
    arguments = ["--only", "memory", "--types", "row_wise,table_wise", "--out", str(out)]
    assert benchmark.main(arguments) == 1
    assert tried == [ShardingType.ROW_WISE, ShardingType.TABLE_WISE]
    results = json.loads(out.read_text())
    assert [f["reason"] for f in results["failures"]] == ["rank 1 was killed by SIGKILL at 1"] * 2
    printed = " ".join(capsys.readouterr().out.split())
    assert "failed: memory table_wise autoshard: rank 1 was killed by SIGKILL" in printed
