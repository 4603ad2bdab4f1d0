"""The examples in docs/environment.md run as they stand."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EXAMPLES = re.findall(
    r"^```python\n(.*?)^```", (ROOT / "docs" / "environment.md").read_text(), re.M | re.S
)


def test_there_are_two_examples() -> None:
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize(
    ("index", "printed"),
    [(0, r"10 plans, (\d+\.\d+) times the greedy's cost"), (1, r"a random plan: (\d+\.\d+) ms")],
)
def test_an_example_runs(index: int, printed: str) -> None:
    result = subprocess.run(
        [sys.executable, "-c", EXAMPLES[index]],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert result.returncode == 0, result.stderr
    found = re.match(printed, result.stdout)
    assert found, result.stdout
    assert float(found[1]) > 0
