"""What a training run tells of itself: one line of `metrics.jsonl` per update, across restarts."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from stable_baselines3.common.callbacks import BaseCallback

from autoshard.files import write_text

METRICS_FILE = "metrics.jsonl"


def append_metrics(path: Path, metrics: Mapping[str, Any]) -> None:
    """Append one line; what JSON does not have becomes null."""
    # Diagnostics of a degenerate update may be NaN.
    plain = {
        key: None if isinstance(value, float) and not math.isfinite(value) else value
        for key, value in metrics.items()
    }
    with path.open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(plain) + "\n")


def cut_metrics(path: Path, last_update: int) -> None:
    """Drop the lines after an update, which a resumed run makes again, and torn ones."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    kept = []
    for line in lines:
        try:
            if json.loads(line)["update"] <= last_update:
                kept.append(line)
        except (ValueError, KeyError):
            continue  # cut off in the middle of a line
    write_text(path, "".join(line + "\n" for line in kept))


class EpisodeCounter(BaseCallback):
    """Counts how the episodes of one update end."""

    def __init__(self) -> None:
        super().__init__()
        self.clear()

    def clear(self) -> None:
        """Count from 0."""
        self.costs: list[float] = []
        self.invalid_actions = 0
        self.infeasible = 0

    def _on_step(self) -> bool:
        infos, dones = self.locals["infos"], self.locals["dones"]
        for index in np.flatnonzero(dones):
            info = infos[index]
            self.invalid_actions += info["illegal_action"]
            self.infeasible += info["infeasible"]
            if "objective_ms" in info:
                self.costs.append(info["objective_ms"] / info["reference_ms"])
        return True

    def to_json(self) -> dict[str, Any]:
        """Counts, and the mean cost of complete episodes relative to the greedy's."""
        return {
            "num_complete": len(self.costs),
            "num_infeasible": self.infeasible,
            "invalid_actions": self.invalid_actions,
            "mean_cost": float(np.mean(self.costs)) if self.costs else None,
        }
