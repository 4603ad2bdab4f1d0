"""The record of a run: `metrics.jsonl` always, Weights & Biases only when asked for.

The file is the truth: it is appended to, its steps only grow, and a resumed run skips
what is already in it. wandb is imported only for `logger=wandb`; `logger.mode=offline`
works without a network.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

from autoshard.errors import DependencyError, InputError
from autoshard.files import read_whole_lines

METRICS_FILE = "metrics.jsonl"


class LoggerKind(Enum):
    """Where metrics go besides the file."""

    NONE = "none"
    WANDB = "wandb"


class WandbMode(Enum):
    """wandb's own modes."""

    OFFLINE = "offline"
    ONLINE = "online"


@dataclass(frozen=True, kw_only=True)
class LoggerConfig:
    """`logger=none` or `logger=wandb logger.mode=offline|online`."""

    kind: LoggerKind = LoggerKind.NONE
    mode: WandbMode = WandbMode.OFFLINE
    project: str = "autoshard"
    """wandb's project."""


class MetricsLog:
    """Appends one JSON line per step; use as a context manager, one per job."""

    def __init__(
        self, folder: Path, config: LoggerConfig, *, name: str, values: Mapping[str, Any]
    ) -> None:
        """Open the record.

        Args:
            folder: where `metrics.jsonl` lies; an existing one is continued.
            config: where else metrics go.
            name: the experiment, for wandb.
            values: the run's configuration as plain values, for wandb.

        Raises:
            DependencyError: wandb is asked for but not installed.
        """
        self.path = folder / METRICS_FILE
        self._last_step: int | None = None  # not read yet
        self._run: Any = None
        if config.kind is LoggerKind.WANDB:
            try:
                import wandb
            except ImportError as error:
                raise DependencyError(
                    "logger=wandb needs the package wandb",
                    remedy="pip install 'autoshard[wandb]', or leave logger=none",
                ) from error
            self._run = wandb.init(
                project=config.project,
                mode=config.mode.value,
                name=f"{name}-{folder.name}",
                dir=str(folder),
                config=dict(values),
                reinit="create_new",
            )

    def log(self, step: int, **metrics: float | int | str | bool | None) -> None:
        """Record one step; a step that the file already has is skipped.

        Args:
            step: grows from call to call.
            metrics: values by name; NaN and infinities are written as null.

        Raises:
            InputError: `metrics.jsonl` exists and is damaged.
        """
        if self._last_step is None:
            self._last_step = _last_step(self.path)
        if step <= self._last_step:
            return
        self._last_step = step
        clean = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in metrics.items()
        }
        with self.path.open("a", encoding="utf-8") as stream:
            stream.write(json.dumps({"step": step, **clean}) + "\n")
        self.mirror(step, **clean)

    def mirror(self, step: int, **metrics: float | int | str | bool | None) -> None:
        """Send one step to wandb only, for training that writes its own `metrics.jsonl`."""
        if self._run is not None:
            self._run.log(metrics, step=step)

    def close(self, exit_code: int = 0) -> None:
        """Finish wandb's run, so that the next job gets one of its own."""
        if self._run is not None:
            self._run.finish(exit_code=exit_code)
            self._run = None

    def __enter__(self) -> MetricsLog:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(exit_code=int(error is not None))


def _last_step(path: Path) -> int:
    """The last recorded step, or −1; a line cut off by a kill is removed."""
    if not path.exists():
        return -1
    last = -1
    for number, line in enumerate(read_whole_lines(path), 1):
        try:
            last = max(last, int(json.loads(line)["step"]))
        except (ValueError, KeyError, TypeError) as error:
            raise InputError(
                f"{path}, line {number}, is not a metrics record",
                got=line[:80].decode(errors="replace").strip(),
                remedy="move the file away or choose another output folder",
            ) from error
    return last
