"""Tables that one small machine can hold: production-like and dlrm-like ones, cut to size.

Measuring, training and evaluating on a laptop draw from this pool, so that every plan can
also be run there. Reuse, pooling and the mix of dims stay those of the two sources; only
rows, dims and pooling factors beyond the limits are cut.
"""

from __future__ import annotations

from dataclasses import replace

from autoshard.tables import Table
from autoshard.workloads.dlrm_tables import dlrm_tables
from autoshard.workloads.production import production_tables
from autoshard.workloads.registry import register_workload


@register_workload("laptop")
def laptop_tables(
    num_tables: int,
    *,
    seed: int,
    max_num_embeddings: int = 500_000,
    max_embedding_dim: int = 256,
    max_pooling_factor: float = 200.0,
) -> tuple[Table, ...]:
    """Generate a pool, alternately from the production model and from dlrm_datasets.

    Args:
        num_tables: how many, >= 2; half of each kind. A longer list of one seed begins with
            the shorter one.
        seed: >= 0; equal seeds give equal tables.
        max_num_embeddings: larger tables are cut to this many rows.
        max_embedding_dim: wider production tables are cut to this dimension.
        max_pooling_factor: larger pooling factors are cut to this.

    Raises:
        InputError: an option is out of range.
    """
    num_production = (num_tables + 1) // 2
    production = production_tables(
        num_production,
        seed=seed,
        max_num_embeddings=max_num_embeddings,
        max_embedding_dim=max_embedding_dim,
        max_pooling_factor=max_pooling_factor,
    )
    dlrm = (
        _renamed(
            replace(
                table,
                num_embeddings=min(table.num_embeddings, max_num_embeddings),
                pooling_factor=min(table.pooling_factor, max_pooling_factor),
            ),
            f"dlrm_{table.name}",
        )
        for table in dlrm_tables(num_production, seed=seed + 1)
    )
    named = (_renamed(table, f"production_{table.name}") for table in production)
    mixed = [table for pair in zip(named, dlrm, strict=True) for table in pair]
    return tuple(mixed[:num_tables])


def _renamed(table: Table, name: str) -> Table:
    return replace(table, name=name, feature_names=(name,))
