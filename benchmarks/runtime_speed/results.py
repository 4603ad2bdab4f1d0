"""What a run has measured so far, and its file, which a killed run leaves behind."""

from __future__ import annotations

import json
import os
import platform
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autoshard.files import check_folder_of, check_replaceable, write_text
from benchmarks.runtime_speed.bench import Budget
from benchmarks.runtime_speed.cases import Model
from benchmarks.runtime_speed.comparisons import Comparison, Failure
from benchmarks.runtime_speed.memory import RankMemory


@dataclass(kw_only=True)
class Results:
    """Filled in case by case; `save` after each."""

    budget: Budget
    models: list[Model]
    path: Path | None
    """Where to write them."""
    versions: dict[str, Any] = field(default_factory=dict)
    comparisons: list[Comparison] = field(default_factory=list)
    profiles: dict[str, dict[str, Any]] = field(default_factory=dict)
    memory: list[RankMemory] = field(default_factory=list)
    failures: list[Failure] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Refuse a path that cannot be written before anything is measured.

        Raises:
            InputError: something else than a file is there, or its folder is missing.
        """
        if self.path is not None:
            check_replaceable(self.path)
            check_folder_of(self.path)

    def save(self, *, finished: bool = False) -> None:
        """Write what there is, if there is a path.

        Args:
            finished: everything that was asked for was run, well or not.

        Raises:
            InputError: the path is not writable.
        """
        if self.path is not None:
            text = json.dumps({**self.to_json(), "finished": finished}, indent=2)
            write_text(self.path, text + "\n")

    def to_json(self) -> dict[str, Any]:
        """As a plain dictionary."""
        profiles = {"profiles": self.profiles} if self.profiles else {}
        return {
            "machine": {"platform": platform.platform(), "num_cores": os.cpu_count()},
            "budget": vars(self.budget),
            "models": {model.name: model.description for model in self.models},
            "versions": self.versions,
            "comparisons": [comparison.to_json() for comparison in self.comparisons],
            **profiles,
            "memory": [rank.to_json() for rank in self.memory],
            "failures": [failure.to_json() for failure in self.failures],
        }
