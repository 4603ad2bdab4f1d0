"""What changes from one plan to another: tables, ranks, and the bytes that must move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from autoshard.plan import ShardingPlan, TablePlan
from autoshard.shards import Shard


@dataclass(frozen=True, kw_only=True)
class TableMove:
    """A table that both plans have, split or placed differently."""

    name: str
    from_type: str
    to_type: str
    from_ranks: tuple[int, ...]
    to_ranks: tuple[int, ...]
    moved_bytes: int
    """Weights that some rank needs and does not hold yet."""


@dataclass(frozen=True, kw_only=True)
class PlanDiff:
    """The difference between two plans."""

    moved: tuple[TableMove, ...]
    unmoved: int
    """How many tables stay as they are."""
    removed: tuple[str, ...]
    """Tables of the first plan only."""
    added: tuple[str, ...]
    changed: tuple[str, ...]
    """Tables of one name whose rows, columns or data type differ: no shard carries over."""
    settings: dict[str, tuple[Any, Any]]
    """Topology and workload values that differ: (first, second)."""
    received_bytes: tuple[int, ...]
    """Weights that each rank of the second plan must be sent for the moved tables."""

    @property
    def moved_bytes(self) -> int:
        """Weights that change place."""
        return sum(move.moved_bytes for move in self.moved)

    @property
    def is_empty(self) -> bool:
        """Whether both plans place the same tables alike on the same ranks."""
        return not (self.moved or self.removed or self.added or self.changed or self.settings)

    def to_json(self) -> dict[str, Any]:
        """The difference as a plain dictionary."""
        return {
            **asdict(self),
            "settings": {key: list(pair) for key, pair in self.settings.items()},
            "moved_bytes": self.moved_bytes,
        }


def diff_plans(first: ShardingPlan, second: ShardingPlan) -> PlanDiff:
    """Compare two validated plans, whatever their order of tables or shards.

    Rank r of one is taken to be rank r of the other. Weights are counted unpadded and without
    optimizer state.
    """
    before = {entry.table.name: entry for entry in first.tables}
    after = {entry.table.name: entry for entry in second.tables}
    received = [0] * second.topology.world_size
    moved, changed, unmoved = [], [], 0
    for name, new in after.items():
        old = before.get(name)
        if old is None:
            continue
        if _shape(old) != _shape(new):
            changed.append(name)
            continue
        if _placement(old) == _placement(new):
            unmoved += 1
            continue
        total = 0
        for shard in new.shards:
            num_bytes = _missing_elements(shard, old.shards) * new.table.data_type.num_bytes
            received[shard.rank] += num_bytes
            total += num_bytes
        moved.append(
            TableMove(
                name=name,
                from_type=old.sharding_type.value,
                to_type=new.sharding_type.value,
                from_ranks=tuple(shard.rank for shard in old.shards),
                to_ranks=tuple(shard.rank for shard in new.shards),
                moved_bytes=total,
            )
        )
    moved.sort(key=lambda move: (-move.moved_bytes, move.name))
    return PlanDiff(
        moved=tuple(moved),
        unmoved=unmoved,
        removed=tuple(name for name in before if name not in after),
        added=tuple(name for name in after if name not in before),
        changed=tuple(changed),
        settings=_settings(first, second),
        received_bytes=tuple(received),
    )


def _shape(entry: TablePlan) -> tuple[object, ...]:
    table = entry.table
    return table.num_embeddings, table.embedding_dim, table.data_type


def _placement(entry: TablePlan) -> tuple[object, ...]:
    shards = frozenset(shard for shard in entry.shards if shard.num_rows and shard.num_cols)
    return entry.sharding_type, shards


def _missing_elements(shard: Shard, held: Sequence[Shard]) -> int:
    """Elements of `shard` that its rank does not hold in `held` (whose shards are disjoint)."""
    here = [old for old in held if old.rank == shard.rank]
    return shard.num_rows * shard.num_cols - sum(
        _overlap(shard.row_offset, shard.num_rows, old.row_offset, old.num_rows)
        * _overlap(shard.col_offset, shard.num_cols, old.col_offset, old.num_cols)
        for old in here
    )


def _overlap(offset: int, size: int, other_offset: int, other_size: int) -> int:
    return max(0, min(offset + size, other_offset + other_size) - max(offset, other_offset))


def _settings(first: ShardingPlan, second: ShardingPlan) -> dict[str, tuple[Any, Any]]:
    before = {**first.topology.to_json(), **first.training.to_json()}
    after = {**second.topology.to_json(), **second.training.to_json()}
    return {key: (before[key], after[key]) for key in before if before[key] != after[key]}
