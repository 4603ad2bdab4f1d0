"""Parts of one measurement as jobs of Hydra's launchers, and merged from the command line."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from autoshard.errors import InputError
from autoshard.measure.loading import load_collective_rows, load_kernel_rows
from experiments.common import check_overrides

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "measure_preset=simulated",
    "num_sets=12",
    "sampling.max_shards=4",
    "collectives.num_collectives=2",
    "collectives.world_sizes=[2,4]",
)
LAUNCHERS = ["basic", "joblib", "submitit_local"]


def is_installed(launcher: str) -> bool:
    if launcher == "basic":
        return True
    try:
        return bool(importlib.util.find_spec(f"hydra_plugins.hydra_{launcher[:6]}_launcher"))
    except ModuleNotFoundError:
        return False


def call(module: str, *arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{module}", *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
    )


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_sweep_over_parts_merges_to_the_whole(launcher: str, tmp_path: Path) -> None:
    if not is_installed(launcher):
        pytest.skip(f"the launcher {launcher} is not installed: pip install -e '.[launchers]'")
    options = (
        f"hydra/launcher={launcher}",
        f"hydra.sweep.dir={tmp_path}/sweep",
        "part=range(0,2)",
        "num_parts=2",
    )
    done = call("measure", "--multirun", *options, *SMALL)
    assert done.returncode == 0, done.stderr
    merged = call(
        "merge_measurements",
        f"sources=[{tmp_path}/sweep/*]",
        f"out={tmp_path}/merged",
        "require_complete=true",
    )
    assert merged.returncode == 0, merged.stderr
    assert "all of 2" in merged.stdout
    (folder,) = (path for path in (tmp_path / "merged").iterdir() if path.is_dir())
    whole = call("measure", *SMALL, f"out={tmp_path}/whole")
    assert whole.returncode == 0, whole.stderr
    for load, name in ((load_kernel_rows, "kernels"), (load_collective_rows, "collectives")):
        found, expected = (
            load(place / f"{name}.parquet")
            .drop(columns="measured_at")
            .sort_values("key", ignore_index=True)
            for place in (folder, tmp_path / "whole")
        )
        pd.testing.assert_frame_equal(found, expected)


def test_a_job_that_fails_is_told_after_the_others_have_ended(tmp_path: Path) -> None:
    done = call(
        "measure",
        "--multirun",
        f"hydra.sweep.dir={tmp_path}",
        "part=range(0,3)",
        "num_parts=1,2",
        "collectives.num_collectives=0",
        *SMALL[:3],
    )
    assert done.returncode == 2
    assert "part is not below num_parts" in done.stderr
    assert "Traceback" not in done.stderr
    # Of six jobs, 0/1, 0/2 and 1/2 are parts that exist.
    assert len(list(tmp_path.glob("*/kernels.parquet"))) == 3


def test_launchers_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"launcher is not installed.*allowed: .*basic"):
        check_overrides("measure", ["hydra/launcher=submitit_somewhere"])
    check_overrides("measure", ["hydra/launcher=basic", "part=range(0,4)", "num_parts=4"])
