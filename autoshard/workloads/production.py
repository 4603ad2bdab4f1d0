"""Tables like those of one production recommender model.

Calibrated to the 1,933 pooled tables that TorchRec publishes as a planner report
(pytorch/torchrec, `docs/wiki/sharding_stats_example.txt`): the distribution of rows,
then the dimension and the pooling factor given the decade of rows, which carries their
dependence. How ids repeat comes from `reuse`.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtri

from autoshard.errors import InputError, quoted
from autoshard.tables import BagLengths, PoolingType, Table
from autoshard.workloads.registry import register_workload
from autoshard.workloads.reuse import REUSE_2021, ReuseLaw

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Published quantiles of num_embeddings: (percent of tables, rows).
_ROW_QUANTILES = (
    (0, 1), (5, 2), (10, 2), (20, 2), (25, 14), (30, 100), (40, 335), (50, 537),
    (60, 738), (70, 1e3), (75, 3e3), (80, 3.8e4), (90, 5e5), (95, 1e7), (99, 2.5e7), (100, 4e7),
)  # fmt: skip
#: Published number of tables in each decade of rows: 1..10, 10..100, …, above 10^7.
_DECADE_TABLES = (454, 93, 736, 217, 102, 161, 68, 102)
#: Tables by dimension in each decade. Fifteen tables are published only in the totals by
#: dimension (six of 4, two of 12 and 1280, one of 8, 32, 1536, 1792 and 2048); they fill
#: the decades that are short of their count.
_DECADE_DIMS: tuple[dict[int, int], ...] = (
    {4: 379, 8: 45, 128: 22, 32: 8},
    {8: 56, 128: 17, 32: 15, 64: 4, 4: 1},
    {8: 612, 128: 113, 64: 4, 32: 4, 4: 3},
    {128: 203, 64: 4, 1280: 4, 32: 3, 4: 2, 8: 1},
    {128: 78, 1280: 10, 64: 9, 32: 3, 12: 1, 2048: 1},
    {128: 130, 64: 21, 1280: 8, 32: 2},
    {128: 39, 64: 14, 12: 4, 1024: 3, 256: 3, 1280: 2, 32: 1, 1536: 1, 1792: 1},
    {64: 56, 128: 34, 32: 9, 1280: 2, 12: 1},
)
#: The pooling factor rounds to 0 at the published minimum; this value, with pooling
#: interpolated in logarithms, gives the published correlation of log rows and log pooling.
_TINY = 3e-4
#: Published quantiles of the pooling factor (10, 25, 50, 75, 90, 99%) in each decade, as
#: (percent, value). The 0% and 100% ends are assumed. In the third decade the step from
#: 1 to 5 stands where 42% of all tables have at most 1, as published.
_DECADE_POOLING: tuple[tuple[tuple[float, float], ...], ...] = (
    ((0, 1), (90, 1), (99, 5), (100, 6)),
    ((0, 1), (50, 1), (75, 2), (90, 5), (99, 7), (100, 8)),
    ((0, 1), (23, 1), (24, 5), (90, 5), (99, 6), (100, 7)),
    ((0, 1), (10, 1), (25, 4.5), (50, 8), (75, 35), (90, 100), (99, 182), (100, 200)),
    ((0, _TINY), (10, 0.9), (25, 1), (50, 2.2), (75, 13.5), (90, 35), (99, 82), (100, 90)),
    ((0, _TINY), (10, 5e-3), (25, 0.6), (50, 1), (75, 12.6), (90, 91), (99, 167), (100, 184)),
    ((0, _TINY), (10, 0.6), (25, 1), (50, 28), (75, 82), (90, 167), (99, 502), (100, 552)),
    ((0, _TINY), (10, 0.2), (25, 0.7), (50, 2.3), (75, 108), (90, 531), (99, 961), (100, 1058)),
)
#: Wide tables draw their pooling factor from the lower part of their decade's curve. With
#: independent draws the top 5% of tables would carry 80% of lookups · dim; published: 74%.
_WIDE_DIM = 1024
_WIDE_POOLING_SHARE = 0.75


@dataclass(frozen=True, kw_only=True)
class TableStatistics:
    """Rows, dimension and pooling factor of generated tables, and two draws for reuse."""

    num_embeddings: IntArray
    embedding_dim: IntArray
    pooling_factor: FloatArray
    exponent_normal: FloatArray
    shift_normal: FloatArray


@dataclass(frozen=True, kw_only=True)
class ProductionConfig:
    """Options of `production_tables`, as a Hydra schema."""

    num_tables: int = 100
    seed: int = 0
    max_num_embeddings: int | None = None
    row_scale: float = 1.0
    max_embedding_dim: int | None = None
    max_pooling_factor: float | None = None

    def tables(self) -> tuple[Table, ...]:
        """The tables that these options describe."""
        return production_tables(**asdict(self))


@register_workload("production")
def production_tables(
    num_tables: int,
    *,
    seed: int,
    max_num_embeddings: int | None = None,
    row_scale: float = 1.0,
    max_embedding_dim: int | None = None,
    max_pooling_factor: float | None = None,
    reuse: ReuseLaw = REUSE_2021,
) -> tuple[Table, ...]:
    """Generate tables like those of a production model.

    Args:
        num_tables: how many, >= 1. A longer list of one seed begins with the shorter one.
        seed: >= 0; equal seeds give equal tables.
        max_num_embeddings: larger tables are cut to this many rows.
        row_scale: multiplies the rows of every table, in (0, 1]; at least 1 row stays.
        max_embedding_dim: wider tables are cut to this dimension.
        max_pooling_factor: larger pooling factors are cut to this.
        reuse: how ids repeat.

    Raises:
        InputError: an option is out of range.
    """
    draws = draw_statistics(num_tables, seed=seed)
    rows = scale_rows(draws.num_embeddings, row_scale)
    rows = _cap("max_num_embeddings", rows, max_num_embeddings)
    dims = _cap("max_embedding_dim", draws.embedding_dim, max_embedding_dim)
    pooling = _cap("max_pooling_factor", draws.pooling_factor, max_pooling_factor)
    return assemble_tables(draws, rows, dims, pooling, reuse, PoolingType.SUM)


def draw_statistics(num_tables: int, *, seed: int) -> TableStatistics:
    """Draw the uncut statistics of `num_tables` tables.

    Raises:
        InputError: `num_tables` or `seed` is out of range.
    """
    for name, value, low in (("num_tables", num_tables, 1), ("seed", seed, 0)):
        if isinstance(value, bool) or not isinstance(value, int | np.integer) or value < low:
            raise InputError(
                f"{name} is not usable", got=quoted(value), allowed=f"integers >= {low}"
            )
    # One row of uniforms per table: a longer list of one seed begins with the shorter.
    uniform = np.random.default_rng(seed).random((num_tables, 5))
    percent, log_rows = _row_curve()
    rows = np.maximum(np.round(np.exp(np.interp(100.0 * uniform[:, 0], percent, log_rows))), 1.0)
    decade = np.minimum(np.searchsorted(10.0 ** np.arange(1, 8), rows, side="right"), 7)
    dims = np.zeros(num_tables, dtype=np.int64)
    pooling = np.zeros(num_tables)
    for index, (by_dim, curve) in enumerate(zip(_DECADE_DIMS, _DECADE_POOLING, strict=True)):
        members = decade == index
        share = np.cumsum(list(by_dim.values())) / sum(by_dim.values())
        dims[members] = np.array(list(by_dim))[
            np.searchsorted(share, uniform[members, 1], side="right")
        ]
        curve_percent, value = np.array(curve).T
        share = np.where(dims[members] >= _WIDE_DIM, _WIDE_POOLING_SHARE, 1.0)
        pooling[members] = np.exp(
            np.interp(100.0 * share * uniform[members, 2], curve_percent, np.log(value))
        )
    normal = ndtri(np.clip(uniform[:, 3:], 1e-9, 1.0 - 1e-9))
    return TableStatistics(
        num_embeddings=rows.astype(np.int64),
        embedding_dim=dims,
        # Rounded, so that atoms such as 1 are exact and written lists stay short.
        pooling_factor=np.round(pooling, 4),
        exponent_normal=normal[:, 0],
        shift_normal=normal[:, 1],
    )


def _row_curve() -> tuple[FloatArray, FloatArray]:
    """Percent of tables and log rows: the published quantiles and decades in one curve."""
    below = np.cumsum(_DECADE_TABLES)[:-1] / sum(_DECADE_TABLES) * 100.0
    decades = [(float(share), 10.0**power) for power, share in enumerate(below, start=1)]
    percent, rows = np.array(sorted([*_ROW_QUANTILES, *decades])).T
    return percent, np.log(np.maximum.accumulate(rows))


def scale_rows(num_embeddings: IntArray, row_scale: float) -> IntArray:
    """Multiply rows by `row_scale`, keeping at least one.

    Raises:
        InputError: `row_scale` is not in (0, 1].
    """
    if isinstance(row_scale, bool) or not isinstance(row_scale, int | float):
        raise InputError("row_scale is not a number", got=quoted(row_scale))
    if not 0.0 < row_scale <= 1.0:
        raise InputError("row_scale is out of range", got=row_scale, allowed="(0, 1]")
    return np.maximum(np.round(num_embeddings * float(row_scale)), 1.0).astype(np.int64)


def _cap(name: str, values: NDArray, most: float | None) -> NDArray:
    if most is None:
        return values
    low = 0 if name == "max_pooling_factor" else 1
    if isinstance(most, bool) or not isinstance(most, int | float) or not most >= low:
        raise InputError(f"{name} is not usable", got=quoted(most), allowed=f"numbers >= {low}")
    return np.minimum(values, values.dtype.type(most))


def assemble_tables(
    draws: TableStatistics,
    num_embeddings: IntArray,
    embedding_dim: IntArray,
    pooling_factor: FloatArray,
    reuse: ReuseLaw,
    pooling: PoolingType,
) -> tuple[Table, ...]:
    """Make tables named `table_0`, `table_1`, … of the given columns."""
    return tuple(
        Table(
            name=f"table_{index}",
            num_embeddings=int(num_embeddings[index]),
            embedding_dim=int(embedding_dim[index]),
            pooling_factor=float(pooling_factor[index]),
            pooling=pooling,
            ids=reuse.distribution(
                int(num_embeddings[index]),
                float(draws.exponent_normal[index]),
                float(draws.shift_normal[index]),
            ),
            # At most one id per sample is the mark of a one-hot feature.
            bag_lengths=(
                BagLengths.CONSTANT if pooling_factor[index] <= 1.0 else BagLengths.POISSON
            ),
        )
        for index in range(len(num_embeddings))
    )
