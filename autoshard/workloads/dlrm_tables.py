"""Tables like those that AutoShard, DreamShard and NeuroShard are evaluated on.

The papers take facebookresearch/dlrm_datasets: tables with real reuse, at least 100
rows, and a dimension that is drawn at random per table. Its files are large; this
generator needs none of them. The published means (pooling factor, distinct rows per
table) and reuse histograms are matched; the spread of rows and pooling factors, which is
not published, is that of the production model. To use the real files, see
`dlrm_datasets`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from autoshard.errors import InputError
from autoshard.tables import PoolingType, Table
from autoshard.workloads.production import assemble_tables, draw_statistics, scale_rows
from autoshard.workloads.registry import register_workload
from autoshard.workloads.reuse import REUSE_2021, REUSE_2022, ReuseLaw

#: Dimensions that each paper draws from.
AUTOSHARD_DIMS = (16, 32)
NEUROSHARD_DIMS = (4, 8, 16, 32, 64, 128)
#: The papers count at least this many rows per table.
MIN_NUM_EMBEDDINGS = 100
#: Mean pooling factor that `draw_statistics` tends to (seen over 400,000 tables).
_PRODUCTION_MEAN_POOLING = 16.02


@dataclass(frozen=True, kw_only=True)
class DlrmVersion:
    """What is published about one version of the dataset."""

    batch_size: int
    mean_pooling_factor: float
    unique_rows_per_table: float
    reuse: ReuseLaw


DLRM_VERSIONS: dict[int, DlrmVersion] = {
    2021: DlrmVersion(
        batch_size=65_536,
        mean_pooling_factor=15.81,
        unique_rows_per_table=150_042,
        reuse=REUSE_2021,
    ),
    2022: DlrmVersion(
        batch_size=131_072,
        mean_pooling_factor=13.60,
        unique_rows_per_table=139_923,
        reuse=REUSE_2022,
    ),
}


@dataclass(frozen=True, kw_only=True)
class DlrmConfig:
    """Options of `dlrm_tables`, as a Hydra schema."""

    num_tables: int = 856
    seed: int = 0
    dims: tuple[int, ...] = NEUROSHARD_DIMS
    version: int = 2021
    row_scale: float = 1.0

    def tables(self) -> tuple[Table, ...]:
        """The tables that these options describe."""
        return dlrm_tables(**asdict(self))


@register_workload("dlrm")
def dlrm_tables(
    num_tables: int,
    *,
    seed: int,
    dims: Sequence[int] = NEUROSHARD_DIMS,
    version: int = 2021,
    row_scale: float = 1.0,
) -> tuple[Table, ...]:
    """Generate tables with the reuse of dlrm_datasets.

    Args:
        num_tables: how many, >= 1; the dataset has 856 (2021) or 788 (2022).
        seed: >= 0; equal seeds give equal tables.
        dims: dimensions to draw from, evenly: `AUTOSHARD_DIMS` or `NEUROSHARD_DIMS`.
        version: 2021 or 2022.
        row_scale: multiplies the rows of every table, in (0, 1].

    Raises:
        InputError: an option is out of range.
    """
    if version not in DLRM_VERSIONS:
        raise InputError(
            "version of dlrm_datasets is not known",
            got=version,
            allowed=", ".join(map(str, DLRM_VERSIONS)),
        )
    published = DLRM_VERSIONS[version]
    draws = draw_statistics(num_tables, seed=seed)
    rows = scale_rows(np.maximum(draws.num_embeddings, MIN_NUM_EMBEDDINGS), row_scale)
    pooling = draws.pooling_factor * (published.mean_pooling_factor / _PRODUCTION_MEAN_POOLING)
    return assemble_tables(
        draws,
        rows,
        draw_dims(num_tables, dims, seed),
        np.round(pooling, 4),
        published.reuse,
        PoolingType.SUM,
    )


def draw_dims(num_tables: int, dims: Sequence[int], seed: int) -> np.ndarray:
    """Draw a dimension for each table, evenly from `dims`: int64 [num_tables].

    Raises:
        InputError: `dims` is empty or holds something else than integers >= 1.
    """
    if not dims or any(
        isinstance(dim, bool) or not isinstance(dim, int | np.integer) or dim < 1 for dim in dims
    ):
        raise InputError("dims is not usable", got=tuple(dims), allowed="integers >= 1")
    # A stream of its own: other dimensions leave rows and pooling factors as they are.
    generator = np.random.default_rng([seed, 1])
    return np.array(dims, dtype=np.int64)[generator.integers(0, len(dims), size=num_tables)]
