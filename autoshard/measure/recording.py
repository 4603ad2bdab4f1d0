"""How measurements become rows: what all rows of a run share, and storing each as it comes.

Between `runner`, which knows what is measured, and `store`, which knows files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

from autoshard.measure.config import MeasureConfig, MeasuredDevice, protocol_fingerprint
from autoshard.measure.environment import Environment, describe_environment
from autoshard.measure.repetition import Repetitions
from autoshard.measure.schema import RowKind
from autoshard.measure.store import PartStore, PlannedRows

#: Called with rows done (earlier runs included), rows in all, and what was just measured.
Progress = Callable[[int, int, str], None]
#: Of every process that measures.
THREADS = 1

_Item = TypeVar("_Item")
_Timing = TypeVar("_Timing")


@dataclass(frozen=True)
class Recorder:
    """A folder that is being measured into."""

    protocol: str
    store: PartStore
    common: dict[str, Any]
    """Columns that all its rows share."""

    def record(
        self,
        answers: Generator[tuple[_Item, _Timing], None, None],
        row: Callable[[_Item, _Timing], dict[str, Any]],
        num_rows: int,
        num_missing: int,
        progress: Progress,
    ) -> int:
        """Store rows as they come, and tell of each; returns how many were missing."""
        # Closed here, and not when garbage is collected: that ends the processes.
        with closing(answers):
            for done, (item, timing) in enumerate(answers, num_rows - num_missing + 1):
                self.store.add({**self.common, **row(item, timing)})
                progress(done, num_rows, str(item))
        return num_missing


@contextmanager
def recording(
    config: MeasureConfig,
    folder: Path,
    kind: RowKind,
    described: dict[str, Any],
    device: MeasuredDevice,
    planned: PlannedRows,
    environment: Environment | None = None,
) -> Iterator[Recorder]:
    """Open a folder for the rows of one protocol, which `described` identifies.

    Args:
        config: its `seed` and flush limits are read.
        folder: of the rows.
        kind: of the rows.
        described: what the rows' meaning depends on.
        device: where they come from.
        planned: told to those who merge parts.
        environment: what they hold for; this machine by default.
    """
    protocol = protocol_fingerprint(described)
    environment = environment or describe_environment(THREADS)
    common = {
        "protocol": protocol,
        "seed": config.seed,
        "device": device.value,
        "threads": THREADS,
        "hardware_fingerprint": environment.hardware_fingerprint,
        "software_fingerprint": environment.software_fingerprint,
    }
    with PartStore(
        folder,
        kind,
        environment=environment,
        protocol=protocol,
        config=described,
        planned=planned,
        flush_rows=config.flush_rows,
        flush_s=config.flush_s,
    ) as store:
        yield Recorder(protocol, store, common)


def timing_columns(name: str, repetitions: Repetitions) -> dict[str, float]:
    """The columns of one timing: `median_ms` of `fwd` is `fwd_ms`, and so on."""
    return {
        f"{name}_{statistic}".replace("_median", ""): value
        for statistic, value in dataclasses.asdict(repetitions).items()
    }


def now() -> str:
    """The time, as rows tell it."""
    return datetime.now(UTC).isoformat(timespec="milliseconds")
