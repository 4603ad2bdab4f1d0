"""The columns of measurement files: one row per measured shard set or collective.

Times are medians in milliseconds, `…_p20_ms`, `…_p80_ms` and `…_min_ms` their spread,
`…_relative_error` the standard error of the median as a share of it.
"""

from __future__ import annotations

from enum import Enum

import pyarrow as pa

from autoshard.features import TRAFFIC_FEATURES
from autoshard.measure.config import Collective
from autoshard.measure.references import REFERENCE_COLUMNS


class RowKind(Enum):
    """What a file's rows measure."""

    KERNELS = "kernels"
    COLLECTIVES = "collectives"


_TEXT, _COUNT, _NUMBER, _FLAG = pa.string(), pa.int64(), pa.float64(), pa.bool_()


def _repetitions(name: str) -> dict[str, pa.DataType]:
    columns = [f"{name}_{suffix}" for suffix in ("ms", "p20_ms", "p80_ms", "min_ms")]
    return dict.fromkeys([*columns, f"{name}_relative_error"], _NUMBER)


#: How a row came about; the same for kernels and collectives.
ORIGIN_COLUMNS: dict[str, pa.DataType] = {
    "key": _TEXT,  # names the row: protocol, number, repeat, pass
    "protocol": _TEXT,  # fingerprint of everything that decides the row's meaning
    "seed": _COUNT,
    "index": _COUNT,  # number of the draw
    "repeat": _COUNT,  # number of the measurement: 0, or 1 for a second one of the same
    "pass": _COUNT,  # number of the pass within the measurement
    "order": _COUNT,  # place in the (shuffled) order of the run
    "measured_at": _TEXT,  # UTC, ISO 8601
    "device": _TEXT,
    "worker": _COUNT,
    "pinned": _FLAG,  # whether each process had a core of its own
    "concurrent_workers": _COUNT,  # processes that measured or exchanged at the same time
    "threads": _COUNT,
    "hardware_fingerprint": _TEXT,
    "software_fingerprint": _TEXT,
    "iterations": _COUNT,
    "warmup_iterations": _COUNT,
    "reached_target": _FLAG,
}

KERNEL_COLUMNS: dict[str, pa.DataType] = {
    **ORIGIN_COLUMNS,
    "split": _TEXT,
    "augmented": _FLAG,
    "num_slices": _COUNT,
    "num_kernels": _COUNT,
    "num_samples": _COUNT,  # of all ranks together
    "world_size": _COUNT,  # of the plan: replicas look up num_samples / world_size
    "optimizer": _TEXT,
    "cache": _TEXT,
    "slices": _TEXT,  # JSON, see `slices_json`
    **_repetitions("fwd"),
    **_repetitions("bwd"),
    "fwd_wall_ms": _NUMBER,
    "bwd_wall_ms": _NUMBER,
    "build_ms": _NUMBER,
    **dict.fromkeys(REFERENCE_COLUMNS, _NUMBER),
}

COLLECTIVE_COLUMNS: dict[str, pa.DataType] = {
    **ORIGIN_COLUMNS,
    "collective": _TEXT,  # see `config.Collective`
    "backend": _TEXT,
    "direction": _TEXT,  # of all-to-alls, see `traffic_sampling.Direction`; others are even
    "oversubscribed": _FLAG,  # more ranks than cores
    **dict.fromkeys(TRAFFIC_FEATURES, _NUMBER),
    "bytes_per_peer": pa.list_(_COUNT),  # [world_size], see `traffic_sampling.Traffic`
    **_repetitions("transfer"),
    "wait_ms": _NUMBER,  # median, over repetitions, of the last rank's arrival less the first's
}

COLUMNS: dict[RowKind, dict[str, pa.DataType]] = {
    RowKind.KERNELS: KERNEL_COLUMNS,
    RowKind.COLLECTIVES: COLLECTIVE_COLUMNS,
}
#: Columns that came later, and what the rows of files without them are.
LATER_COLUMNS: dict[RowKind, dict[str, str]] = {
    RowKind.KERNELS: {},
    RowKind.COLLECTIVES: {"collective": Collective.ALL_TO_ALL.value},
}
#: A row without these says nothing about how far it can be trusted.
TRUST_COLUMNS: dict[RowKind, tuple[str, ...]] = {
    RowKind.KERNELS: (
        "warmup_iterations",
        "iterations",
        *(f"{phase}_{suffix}" for phase in ("fwd", "bwd") for suffix in ("p20_ms", "p80_ms")),
        "fwd_relative_error",
        "bwd_relative_error",
    ),
    RowKind.COLLECTIVES: (
        "warmup_iterations",
        "iterations",
        "transfer_p20_ms",
        "transfer_p80_ms",
        "transfer_relative_error",
    ),
}


def arrow_schema(kind: RowKind) -> pa.Schema:
    """The schema of a file of that kind."""
    return pa.schema(list(COLUMNS[kind].items()))
