"""Who looks up what, in which order: derived from the plan alone, hence equal on every rank.

An `Entry` is one (table, feature) pair. A feature that several tables look up is an
entry of each. Every rank works out the layout of all ranks, and the order of all
collectives follows from it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from autoshard.errors import PlanError
from autoshard.files import fingerprint
from autoshard.plan import ShardingPlan, TablePlan
from autoshard.shards import Shard, ShardingType
from autoshard.tables import Table


@dataclass(frozen=True)
class Entry:
    """One feature of one table."""

    table: Table
    feature: str
    output_name: str
    """`feature`, or `feature@table` where several tables look the feature up."""


@dataclass(frozen=True)
class PlacedTable:
    """A table, its shards (none of zero size), and what looks it up."""

    table: Table
    sharding_type: ShardingType
    shards: tuple[Shard, ...]
    entries: tuple[Entry, ...]


@dataclass(frozen=True)
class Layout:
    """The plan as the runtime reads it."""

    world_size: int
    tables: tuple[PlacedTable, ...]
    """In plan order."""
    entries: tuple[Entry, ...]
    """All entries, in plan order; pooled outputs come in this order."""
    features: tuple[str, ...]
    """Distinct features, in order of first use."""
    signature: int
    """A number below 2^48 that two ranks share only if they run the same plan."""

    @property
    def output_dims(self) -> dict[str, int]:
        """Columns of each pooled output, by output name."""
        return {entry.output_name: entry.table.embedding_dim for entry in self.entries}


def layout_of(plan: ShardingPlan) -> Layout:
    """Work out the layout of `plan`.

    Raises:
        PlanError: two outputs would have the same name.
    """
    uses = Counter(feature for entry in plan.tables for feature in entry.table.feature_names)
    tables = tuple(_place(table_plan, uses) for table_plan in plan.tables)
    entries = tuple(entry for placed in tables for entry in placed.entries)
    names = Counter(entry.output_name for entry in entries)
    if duplicates := sorted(name for name, count in names.items() if count > 1):
        raise PlanError("two pooled outputs have the same name", got=duplicates)
    body = {key: plan.to_json()[key] for key in ("topology", "workload", "tables")}
    return Layout(
        world_size=plan.topology.world_size,
        tables=tables,
        entries=entries,
        features=tuple(uses),
        signature=int(fingerprint(body)[:12], 16),
    )


def _place(table_plan: TablePlan, uses: Counter[str]) -> PlacedTable:
    table = table_plan.table
    return PlacedTable(
        table=table,
        sharding_type=table_plan.sharding_type,
        shards=tuple(s for s in table_plan.shards if s.num_rows and s.num_cols),
        entries=tuple(
            Entry(table, feature, feature if uses[feature] == 1 else f"{feature}@{table.name}")
            for feature in table.feature_names
        ),
    )
