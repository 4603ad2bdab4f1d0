"""Parts of one measurement as jobs of Hydra's launchers, and merged from the command line."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import hydra
import pandas as pd
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from autoshard.errors import InputError
from autoshard.measure.config import MeasureConfig
from autoshard.measure.loading import load_collective_rows, load_kernel_rows
from autoshard.measure.machine_groups import merge_by_machine
from experiments.common import CONF_DIR, check_overrides, to_dataclass
from experiments.measure import run
from experiments.metrics import LoggerConfig, MetricsLog

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "measure_preset=simulated",
    "num_sets=12",
    "sampling.max_shards=4",
    "collectives.num_collectives=2",
    "collectives.world_sizes=[2,4]",
)
LAUNCHERS = ["basic", "submitit_local"]


def is_installed(launcher: str) -> bool:
    if launcher == "basic":
        return True
    try:
        return bool(
            importlib.util.find_spec(f"hydra_plugins.hydra_{launcher.partition('_')[0]}_launcher")
        )
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


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same measurement, undivided, in this process."""
    out = tmp_path_factory.mktemp("whole")
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3"):
        values: Any = OmegaConf.to_container(hydra.compose("measure", list(SMALL)), resolve=True)
    del values["out"], values["logger"]
    config = to_dataclass(MeasureConfig, values)
    with MetricsLog(out, LoggerConfig(), name="measure", values={}) as metrics:
        run(config, out, metrics)
    return out


@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_sweep_over_parts_merges_to_the_whole(launcher: str, whole: Path, tmp_path: Path) -> None:
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
    merged = merge_by_machine([f"{tmp_path}/sweep/*"], tmp_path / "merged", require_complete=True)
    (group,) = merged.groups
    for load, name in ((load_kernel_rows, "kernels"), (load_collective_rows, "collectives")):
        found, expected = (
            load(place / f"{name}.parquet")
            .drop(columns="measured_at")
            .sort_values("key", ignore_index=True)
            for place in (group.folder, whole)
        )
        pd.testing.assert_frame_equal(found, expected)


def test_merging_from_the_command_line(whole: Path, tmp_path: Path) -> None:
    done = call("merge_measurements", f"sources=[{whole}/kerne*,{whole}/coll*/]", f"out={tmp_path}")
    assert done.returncode == 0, done.stderr
    assert "all of 1" in done.stdout
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    assert folder.name in done.stdout
    assert len(load_kernel_rows(folder / "kernels.parquet")) == 12  # one pass
    refused = call("merge_measurements", f"sources=[{tmp_path}/nothing]", f"out={tmp_path}")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")


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


@pytest.mark.parametrize(
    ("name", "plugin"), [("measure_slurm", "submitit"), ("measure_ray", "ray")]
)
def test_launchers_for_clusters_compose(name: str, plugin: str) -> None:
    if not is_installed(plugin):
        pytest.skip(f"hydra-{plugin}-launcher is not installed")
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3"):
        values = hydra.compose("measure", [f"hydra/launcher={name}"], return_hydra_config=True)
    assert plugin in values.hydra.launcher._target_
