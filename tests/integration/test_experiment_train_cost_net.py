"""`python -m experiments.train_cost_net`: from measurement files to a model that plans."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd

from autoshard.cost_models.exported import load_cost_model
from autoshard.measure.schema import RowKind
from autoshard.measure.store import PartStore
from tests.cost_cases import MACHINE, collective_rows, features_of, kernel_rows, pool

ROOT = Path(__file__).parents[2]


def start(cwd: Path, *overrides: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "experiments.train_cost_net", *overrides],
        cwd=cwd,
        env={
            "PYTHONPATH": str(ROOT),
            "PATH": "/usr/bin:/bin",
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "160",
        },
        capture_output=True,
        text=True,
        timeout=150,
    )


def write_measurements(folder: Path) -> None:
    kinds = {
        RowKind.KERNELS: kernel_rows({"train": 60, "validation": 20, "test": 20}),
        RowKind.COLLECTIVES: collective_rows(30),
    }
    for kind, rows in kinds.items():
        with PartStore(
            folder / kind.value,
            kind,
            environment=MACHINE,
            protocol="p",
            config={},
            flush_rows=50,
            flush_s=1e9,
        ) as store:
            for row in rows:
                store.add(row)


def test_it_reads_trains_reports_and_exports(tmp_path: Path) -> None:
    write_measurements(tmp_path / "measured")
    result = start(tmp_path, "measurements=[measured]", "cost_net.num_epochs=4", "out=run")
    assert result.returncode == 0, result.stderr
    assert "linear regression" in result.stdout
    run = tmp_path / "run"
    model = load_cost_model(run / "model")
    cost = model.compute_ms(
        model.encode(features_of(pool("test")[:5])).sum(axis=0)[None], np.array([5])
    )
    assert np.all(cost > 0)
    errors = json.loads((run / "errors.json").read_text())
    assert errors["splits"]["train"]["num_sets"] == 66  # every tenth set was measured twice
    assert errors["collectives"]["test"]["num"] == 6
    lines = (run / "metrics.jsonl").read_text().splitlines()
    assert len(lines) == 4
    assert {"train_loss", "validation_loss"} <= set(json.loads(lines[0]))
    assert len(pd.read_parquet(run / "predictions.parquet")) == 2 * 110 + 30


def test_what_is_wrong_is_said_in_one_line(tmp_path: Path) -> None:
    for overrides, text in (
        (("measurements=[nowhere]",), "nowhere"),
        (("measurements=[nowhere]", "cost_net=addditive"), "additive"),
    ):
        result = start(tmp_path, *overrides)
        assert result.returncode == 2, result.stderr
        assert text in result.stderr
        assert "Traceback" not in result.stderr
