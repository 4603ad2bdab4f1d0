"""Every configuration composes into its dataclass; typing errors are refused; folders are apart."""

from __future__ import annotations

import copy
import importlib
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, get_type_hints

import hydra
import pytest
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf

from autoshard.errors import InputError
from autoshard.measure.config import MeasureConfig
from experiments.common import CONF_DIR, check_overrides, to_dataclass
from experiments.metrics import LoggerConfig, LoggerKind

ROOT = CONF_DIR.parent
EXPERIMENTS = sorted(path.stem for path in CONF_DIR.glob("*.yaml") if path.stem != "base")


@cache
def _composed(name: str, overrides: tuple[str, ...]) -> Any:
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3"):
        values = hydra.compose(config_name=name, overrides=list(overrides))
    return OmegaConf.to_container(values, resolve=True)


def compose(name: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    return copy.deepcopy(_composed(name, tuple(overrides)))


def schema_of(name: str) -> type:
    """The dataclass that `experiments.<name>.run` takes."""
    return get_type_hints(importlib.import_module(f"experiments.{name}").run)["config"]


def groups_of(name: str) -> list[str]:
    defaults = OmegaConf.load(CONF_DIR / f"{name}.yaml").defaults
    return [next(iter(entry)) for entry in defaults if not isinstance(entry, str)]


CASES = [
    (name, f"{group}={path.stem}")
    for name in EXPERIMENTS
    for group in groups_of(name)
    for path in sorted((CONF_DIR / group).glob("*.yaml"))
]


def as_config(name: str, values: dict[str, Any]) -> Any:
    assert values.pop("out") is None
    to_dataclass(LoggerConfig, values.pop("logger"))
    return to_dataclass(schema_of(name), values)


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_every_experiment_composes(name: str) -> None:
    config = as_config(name, compose(name))
    assert type(config) is schema_of(name)


@pytest.mark.parametrize(("name", "choice"), CASES)
def test_every_option_of_every_group_composes(name: str, choice: str) -> None:
    as_config(name, compose(name, [choice]))


def test_every_group_belongs_to_an_experiment() -> None:
    used = {choice.split("=")[0] for _, choice in CASES}
    assert used == {path.name for path in CONF_DIR.iterdir() if path.is_dir()} - {"hydra"}


def test_measuring_and_the_pool_name_the_same_tables() -> None:
    measure = as_config("measure", compose("measure"))
    assert isinstance(measure, MeasureConfig)
    pool = OmegaConf.to_container(OmegaConf.load(CONF_DIR / "pool" / "laptop.yaml"))
    assert isinstance(pool, dict)
    assert dict(measure.workload) == pool["workload"]
    assert measure.seed == pool["seed"]
    assert list(measure.sampling.split_shares) == pool["split_shares"]


def dotted(values: Any, prefix: str = "") -> list[str]:
    if not isinstance(values, dict) or not values:
        return [prefix]
    return [
        key
        for name, value in values.items()
        for key in dotted(value, f"{prefix}.{name}".strip("."))
    ]


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_mistyped_keys_are_refused_with_the_right_one(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = dotted(compose(name))
    check_overrides(name, [f"{key}=1" for key in keys])
    with hydra.initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3"):
        base = hydra.compose(config_name=name, return_hydra_config=True)
    monkeypatch.setattr(hydra, "compose", lambda **_: base)  # composing is what takes the time
    for key in keys:
        if len(key.rpartition(".")[2]) < 3:
            continue  # a key of one letter has no near misspelling
        wrong = key[:-2] + key[-1] + key[-2] if key[-1] != key[-2] else key[:-1]
        for form in (f"{wrong}=1", f"++{wrong}=1"):
            with pytest.raises(InputError) as caught:
                check_overrides(name, [form])
            assert wrong in str(caught.value)
            assert "did you mean" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "override", "near"),
    [
        ("plan", "sede=1", "seed"),
        ("plan", "loger=wandb", "logger"),
        ("plan", "hydra.run.dri=x", "hydra.run.dir"),
        ("train_agent", "agent.learning_rat=1", "agent.learning_rate"),
        ("measure", "sampling.max_shard=3", "sampling.max_shards"),
    ],
)
def test_the_nearest_key_is_suggested(name: str, override: str, near: str) -> None:
    with pytest.raises(InputError, match=f"did you mean '{near}'"):
        check_overrides(name, [override])


def test_open_dictionaries_take_new_keys_and_flags_are_left_alone() -> None:
    check_overrides("train_cost_net", ["+cost_net.options.hidden=32", "--multirun", "--cfg", "job"])
    check_overrides("evaluate", ["+policies.3=folder", "hydra/launcher=basic"])


@pytest.mark.parametrize(
    ("name", "override", "message"),
    [
        ("train_cost_net", "+cost_net.learning_rat=1", r"cost_net\.learning_rat.*did you mean"),
        ("train_agent", "+tasks.batch_size=1", r"tasks\.batch_size.*did you mean"),
        (
            "evaluate",
            "settings=[{num_tables: 4, world_size: 2, num_tasks: 1, batch_sise: 3}]",
            "batch_sise",
        ),
        ("plan", "world_size=many", "world_size"),
        ("plan", "optimizer=sgdd", "optimizer"),
        ("evaluate", "settings=[{num_tables: 4, world_size: 2, num_tasks: 0}]", "num_tasks"),
        ("measure", "sampling.split_shares=[1, 2]", "split_shares"),
        ("train_cost_net", "cost_net.seed=-1", "seed"),
    ],
)
def test_values_that_fit_no_field_are_refused_at_any_depth(
    name: str, override: str, message: str
) -> None:
    with pytest.raises(InputError, match=message):
        as_config(name, compose(name, [override]))


TABLES = """name,num_embeddings,embedding_dim,pooling_factor
a,1000,16,2
b,2000,16,5
c,500,32,1
"""
CHEAP = ["cost_model=analytic", "sharders=[random,cost_greedy]", "world_size=2", "tables=t.csv"]


def start(folder: Path, *arguments: str, **environment: str) -> subprocess.Popen[str]:
    (folder / "t.csv").write_text(TABLES)
    return subprocess.Popen(
        [sys.executable, "-m", "experiments.plan", *arguments, *CHEAP],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=100)
    finally:
        process.kill()
    return process.returncode, out, err


def steps(path: Path) -> list[int]:
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_runs_started_at_once_do_not_share_folders_and_paths_are_the_callers(
    tmp_path: Path,
) -> None:
    # One of three is a typing error: all run at once, since starting is what takes time.
    runs = [start(tmp_path), start(tmp_path), start(tmp_path, "sede=1")]
    (first, second, wrong) = [finish(run) for run in runs]
    assert (first[0], second[0]) == (0, 0), first[2] + second[2]
    folders = list((tmp_path / "outputs" / "plan").iterdir())
    assert len(folders) == 2
    for folder in folders:
        assert steps(folder / "metrics.jsonl") == [0, 1]
        assert {p.name for p in folder.glob("*.json")} == {"random.json", "cost_greedy.json"}
    assert wrong[0] == 2
    assert wrong[2].splitlines() == [
        "error: unknown configuration key 'sede'; remedy: did you mean 'seed'?"
    ]


def test_several_jobs_and_offline_wandb(tmp_path: Path) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    jobs, online = tmp_path / "jobs", tmp_path / "wandb"
    jobs.mkdir()
    online.mkdir()
    # No proxy leads anywhere: a network access would fail.
    offline = {"https_proxy": "http://127.0.0.1:9", "WANDB_SILENT": "true", "WANDB_API_KEY": ""}
    runs = [
        start(jobs, "--multirun", "seed=0,1"),
        start(online, "logger=wandb", "logger.mode=offline", **offline),
    ]
    many, logged = [finish(run) for run in runs]
    assert many[0] == 0, many[2]
    (sweep,) = (jobs / "multirun" / "plan").iterdir()
    folders = sorted(path for path in sweep.iterdir() if path.is_dir())
    assert [folder.name for folder in folders] == ["0", "1"]
    seeds = []
    for folder in folders:
        assert steps(folder / "metrics.jsonl") == [0, 1]
        seeds.append(json.loads((folder / "random.json").read_text())["provenance"]["seed"])
    assert seeds == [0, 1]
    assert logged[0] == 0, logged[2]
    (folder,) = (online / "outputs" / "plan").iterdir()
    assert steps(folder / "metrics.jsonl") == [0, 1]
    assert list(folder.glob("wandb/offline-run-*"))


def test_wandb_is_not_imported_unless_asked_for(tmp_path: Path) -> None:
    script = """
import sys
from pathlib import Path
from experiments.metrics import LoggerConfig, MetricsLog
import experiments.plan, experiments.train_agent, experiments.train_cost_net
with MetricsLog(Path("."), LoggerConfig(), name="x", values={}) as log:
    log.log(0, loss=1.0)
print("wandb" in sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.stdout.strip() == "False", done.stderr


def test_wandb_is_off_by_default() -> None:
    for name, choice in itertools.product(EXPERIMENTS, (None, "logger=wandb")):
        values = compose(name, [choice] if choice else [])
        logger = to_dataclass(LoggerConfig, values["logger"])
        assert logger.kind is (LoggerKind.WANDB if choice else LoggerKind.NONE)
        assert logger.mode.value == "offline"
