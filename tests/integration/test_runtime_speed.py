"""The speed comparison runs, agrees on numbers before it times, and refuses bad input.

Its failures are the subject of `test_runtime_speed_failures.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from unittest.mock import Mock

import pytest

from autoshard.runtime import gloo_threads
from autoshard.shards import ShardingType
from benchmarks.runtime_speed.__main__ import main
from benchmarks.runtime_speed.cases import make_plan, mlperf_model, uniform_model
from benchmarks.runtime_speed.sections import SECTIONS
from benchmarks.runtime_speed.statistics import median_ms, percentile_ms, ratio_of_medians
from benchmarks.runtime_speed.worker import Worker

QUICK = ["--quick", "--models", "uniform", "--types", "row_wise", "--torchrec-python", "missing"]


def test_every_section_without_torchrec(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "speed.json"
    assert main([*QUICK, "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert "make torchrec-env" in capsys.readouterr().out
    by_section = {c["section"]: c for c in results["comparisons"] if c["model"] == "uniform"}
    assert set(by_section) == {"step", "loop", "pipelined", "waiting", "ddp"}
    others = {
        name: contender
        for comparison in by_section.values()
        for name, contender in comparison["contenders"].items()
        if name != comparison["ours"]
    }
    assert set(others) == {
        "floor/sliced",
        "floor/sliced+calm",
        "autoshard/loop",
        "autoshard/loop-waiting",
        "pytorch/dense",
        "pytorch/sparse",
    }
    for contender in others.values():
        assert contender["largest_relative_difference"] <= 1e-4
        assert contender["ratio"]["low"] <= contender["ratio"]["high"]
    # Two rounds of three steps each.
    assert {c["num_steps"] for c in by_section["step"]["contenders"].values()} == {6}
    assert [rank["holds_only_its_own"] for rank in results["memory"]] == [True, True]
    assert results["failures"] == []
    assert results["finished"] is True


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "speed"], "--only is not usable; got: speed; allowed: torchrec,floor"),
        (["--models", ""], "--models is not usable"),
        (["--types", "row_wise,columns"], "got: columns"),
        (["--rounds", "0"], "--rounds and --steps are not usable"),
        (["--only", "torchrec", "--torchrec-python", "missing"], "make torchrec-env"),
        (["--only", "memory", "--out", "no/such/folder/speed.json"], "does not exist"),
        (["--only", "memory", "--out", "/dev/null"], "a device, pipe or socket"),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_gloo_threads_are_set_for_the_contender_that_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    monkeypatch.setattr(
        gloo_threads, "keep_from_preempting", lambda threads, *, enabled: told.append(enabled)
    )
    refreshed = Mock()
    monkeypatch.setattr(gloo_threads.GLOO_THREADS, "refresh", refreshed)
    worker = Worker(0)
    worker._contenders = {"autoshard/plain": 1, "floor/sliced": 2, "floor/sliced+calm": 3}
    assert [worker._ready(name) for name in worker._contenders] == [1, 2, 3]
    assert told == [False, True]
    refreshed.assert_called_once_with()


def test_statistics_of_rounds() -> None:
    ours, theirs = [[2.0, 4.0], [6.0]], [[8.0], [8.0, 8.0]]
    assert median_ms(ours) == 4.0
    assert percentile_ms(theirs, 10) == 8.0
    ratio = ratio_of_medians(ours, theirs)
    assert ratio.value == 0.5
    # Drawn rounds give medians of 3 (the first twice), 4 (both) or 6 (the second twice).
    assert (ratio.low, ratio.high) == (3 / 8, 6 / 8)


@pytest.mark.parametrize("kind", [ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL])
def test_plans_spread_over_all_ranks(kind: ShardingType) -> None:
    plan = make_plan(uniform_model(scale=0.001), kind, 2)
    per_rank = [len(slices) for slices in plan.slices_by_rank()]
    assert per_rank == ([4, 4] if kind is ShardingType.TABLE_WISE else [8, 8])


@pytest.mark.parametrize("kind", [ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE])
def test_no_rank_lacks_rows_of_a_scaled_table(kind: ShardingType) -> None:
    plan = make_plan(mlperf_model(), kind, 2)
    assert len(plan.tables) == 26
    assert min(shard.num_rows for entry in plan.tables for shard in entry.shards) == 1


def test_the_help_names_every_section(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["--help"])
    text = capsys.readouterr().out
    assert all(section in text for section in SECTIONS)
