"""Peak memory of every rank beside what its plan's ledger says.

A rank first runs a tiny plan, so that libraries are loaded and set up, and gives freed
memory back: what it holds then is what an idle rank holds. Then it builds the plan and
trains some steps; the kernel's high-water mark of its resident memory, less the former,
stands against the ledger without its reserve.
"""

from __future__ import annotations

import ctypes
import gc
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autoshard.errors import UnsupportedError
from autoshard.memory import memory_ledger
from autoshard.plan import ShardingPlan
from autoshard.runtime.group import WorkerGroup
from autoshard.runtime.results import RunOptions
from autoshard.runtime.worker import RankProcess, execute_plan
from autoshard.shards import ShardingType
from benchmarks.runtime_speed.cases import Model, make_plan, uniform_tables

_STATUS = Path("/proc/self/status")
_CLEAR_REFS = Path("/proc/self/clear_refs")
#: Resets the high-water mark (proc_pid_clear_refs(5)).
_RESET_PEAK = "5"
_NUM_STEPS = 4
_TIMEOUT_S = 120.0


@dataclass(frozen=True)
class RankMemory:
    """One rank of one plan, in bytes."""

    kind: ShardingType
    rank: int
    ledger_bytes: int
    peak_bytes: int
    """Above what the idle rank holds."""
    held_tables: tuple[str, ...]
    planned_tables: tuple[str, ...]
    """Those that the plan gives this rank."""

    @property
    def ratio(self) -> float:
        """Peak over ledger."""
        return self.peak_bytes / self.ledger_bytes

    def to_json(self) -> dict[str, Any]:
        """As a plain dictionary."""
        return {
            "sharding_type": self.kind.value,
            "rank": self.rank,
            "ledger_bytes": self.ledger_bytes,
            "peak_bytes": self.peak_bytes,
            "ratio": self.ratio,
            "holds_only_its_own": set(self.held_tables) == set(self.planned_tables),
        }


def memory_model(kind: ShardingType, *, scale: float = 1.0) -> Model:
    """Tables of dim 64 that put at least 1 GiB of weights on each of 2 ranks."""
    num_tables = 5 if kind is ShardingType.DATA_PARALLEL else 10
    rows = max(1, round(1_000_000 * scale))
    return Model(
        name="memory",
        tables=uniform_tables(num_tables, rows),
        batch_size=512,
        description=f"{num_tables} tables × {rows:,} rows × dim 64, 512 samples per rank",
    )


def measure_memory(kind: ShardingType, *, scale: float = 1.0) -> list[RankMemory]:
    """Run one plan in fresh processes.

    Args:
        kind: how all tables are sharded.
        scale: of the tables' rows.

    Raises:
        UnsupportedError: the system keeps no high-water mark.
        AutoshardError: a rank failed; see `WorkerGroup.run`.
    """
    if not _CLEAR_REFS.exists():
        raise UnsupportedError("peak memory is read from /proc", got=platform.system())
    tiny = make_plan(memory_model(ShardingType.TABLE_WISE, scale=1e-5), ShardingType.TABLE_WISE, 2)
    plan = make_plan(memory_model(kind, scale=scale), kind, 2)
    with WorkerGroup(2, timeout_s=_TIMEOUT_S) as group:
        peaks = group.run(_peak, tiny, plan)
    slices = plan.slices_by_rank()
    ledgers = memory_ledger(plan.problem, slices)
    return [
        RankMemory(
            kind=kind,
            rank=rank,
            ledger_bytes=ledger.total_bytes - ledger.lines_bytes["reserved"],
            peak_bytes=peak_bytes,
            held_tables=held,
            planned_tables=tuple(sorted({s.table.name for s in slices[rank] if s.num_rows})),
        )
        for rank, ((peak_bytes, held), ledger) in enumerate(zip(peaks, ledgers, strict=True))
    ]


def _peak(
    process: RankProcess, tiny: ShardingPlan, plan: ShardingPlan
) -> tuple[int, tuple[str, ...]]:
    options = RunOptions(num_steps=_NUM_STEPS, warmup_steps=1)
    execute_plan(process, tiny, options)
    gc.collect()
    if platform.libc_ver()[0] == "glibc":
        ctypes.CDLL(None).malloc_trim(0)
    _CLEAR_REFS.write_text(_RESET_PEAK, encoding="ascii")
    idle_bytes = _status_bytes("VmRSS")
    result = execute_plan(process, plan, options)
    return _status_bytes("VmHWM") - idle_bytes, result.held_tables[process.rank]


def _status_bytes(field: str) -> int:
    for line in _STATUS.read_text(encoding="ascii").splitlines():
        name, _, value = line.partition(":")
        if name == field:
            return int(value.split()[0]) * 1024
    raise UnsupportedError(f"/proc/self/status has no {field}")
