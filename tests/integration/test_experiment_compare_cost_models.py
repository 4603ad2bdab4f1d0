"""`python -m experiments.compare_cost_models`: from measurement files to a report, and again."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.errors import InputError
from autoshard.measure.schema import RowKind
from autoshard.measure.store import PartStore
from cost_net.comparison import ComparisonConfig
from cost_net.training import CostNetConfig
from experiments.compare_cost_models import CompareCostModelsConfig
from tests.cost_cases import MACHINE, kernel_rows

ROOT = Path(__file__).parents[2]
QUICK = [
    *(f"networks.{name}.num_epochs=1" for name in ("additive", "autoshard", "neuroshard")),
    "comparison.num_seeds=1",
    "comparison.sizes=[]",
    "comparison.min_steps=1",
    "comparison.num_resamples=100",
    "comparison.num_grown_sets=3",
    "comparison.num_random_sets=2",
]


def start(cwd: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.compare_cost_models", *overrides],
        cwd=cwd,
        env={"PYTHONPATH": str(ROOT), "PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )


def test_it_compares_and_goes_on_where_it_was(tmp_path: Path) -> None:
    with PartStore(
        tmp_path / "measured" / "kernels",
        RowKind.KERNELS,
        environment=MACHINE,
        protocol="p",
        config={},
        flush_rows=100,
        flush_s=1e9,
    ) as store:
        for row in kernel_rows({"train": 40, "validation": 10, "test": 20}):
            store.add(row)
    first = start(tmp_path, "measurements=[measured]", "out=run", *QUICK)
    assert first.returncode == 0, first.stderr
    assert "a second measurement" in first.stdout
    report = json.loads((tmp_path / "run" / "comparison.json").read_text())
    assert set(report["test"]) >= {"additive", "autoshard", "neuroshard", "gradient boosting"}
    kept = {path: path.stat().st_mtime_ns for path in (tmp_path / "run/trainings").iterdir()}
    lost = next(path for path in kept if path.name.startswith("linear"))
    lost.unlink()
    again = start(tmp_path, "measurements=[measured]", "out=run", *QUICK)
    assert again.returncode == 0, again.stderr
    times = {path: path.stat().st_mtime_ns for path in (tmp_path / "run/trainings").iterdir()}
    assert set(times) == set(kept)
    assert [path for path in kept if times[path] != kept[path]] == [lost]
    assert json.loads((tmp_path / "run" / "comparison.json").read_text())["test"] == report["test"]


def test_our_network_must_take_part() -> None:
    with pytest.raises(InputError, match="names no network"):
        CompareCostModelsConfig(
            measurements=("measured",),
            networks={"autoshard": CostNetConfig()},
            comparison=ComparisonConfig(),
            workers=1,
            training_time_limit_s=60.0,
        )
