"""The benchmark of costing runs, leaves out what does not load, and refuses bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.costing_speed import MODELS, main

QUICK = ["--tables", "6", "--ranks", "3", "--plans", "20", "--moves", "5", "--repeats", "2"]


def test_every_model_that_loads_is_timed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "costing.json"
    missing = str(tmp_path / "missing")
    assert main([*QUICK, "--threads", "1", "--model", missing, "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    assert set(results["models"]) == set(MODELS)
    for figures in results["models"].values():
        for median, least, most in figures.values():
            assert 0 < least <= median <= most
    printed = capsys.readouterr().out
    assert "missing is left out: " in printed
    assert "3 ranks" in printed


def test_bad_input_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--ranks", "1"]) == 2
    assert "--ranks is not usable; got: 1; allowed: 2 or more" in capsys.readouterr().err
