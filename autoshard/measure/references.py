"""The reference kernels: the same on every machine and at all times, timed in between.

A shared machine becomes slower and faster within seconds and for minutes, by up to a factor
of two, and it does so differently for what lives in the caches and for what comes from
memory. Two small kernels, one of each sort, are therefore run every few milliseconds between
the iterations of what is measured. `normalising` takes the drift out by what they show.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from autoshard.shards import ShardSlice
from autoshard.tables import Table


class Reference(Enum):
    """Which reference kernel."""

    CACHED = "cached"
    """256 KB of weights: what else runs on the core decides."""
    MEMORY = "memory"
    """128 MB of weights, rows in no order: memory and shared caches decide."""


@dataclass(frozen=True)
class ReferenceKernel:
    """A fixed shard set."""

    num_samples: int
    slices: tuple[ShardSlice, ...]


REFERENCE_KERNELS: dict[Reference, ReferenceKernel] = {
    Reference.CACHED: ReferenceKernel(
        512,
        tuple(
            ShardSlice.whole(
                Table(name=f"c{i}", num_embeddings=1000, embedding_dim=32, pooling_factor=8.0)
            )
            for i in range(2)
        ),
    ),
    Reference.MEMORY: ReferenceKernel(
        256,
        tuple(
            ShardSlice.whole(
                Table(name=f"m{i}", num_embeddings=250_000, embedding_dim=64, pooling_factor=4.0)
            )
            for i in range(2)
        ),
    ),
}
PHASES = ("fwd", "bwd")
#: Their columns in measured rows: the median over the time in which the row was measured.
REFERENCE_COLUMNS = tuple(
    f"reference_{reference.value}_{phase}_ms" for reference in Reference for phase in PHASES
)


def reference_columns(medians_ms: Sequence[float]) -> dict[str, float]:
    """Forward and backward of each reference, as columns."""
    return dict(zip(REFERENCE_COLUMNS, medians_ms, strict=True))
