"""Checks a plan before anything is allocated: shards, ranks, memory, and that it is not stale.

Every plan that is made, read, run or exported passes through `validate_plan`.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from autoshard.errors import InfeasibleError, PlanError
from autoshard.memory import RankLedger, memory_ledger
from autoshard.plan import ShardingPlan, TablePlan
from autoshard.shards import Shard, ShardingType, shard_load
from autoshard.tables import Table
from autoshard.topology import GIB, Topology

#: How many names a message lists before it says "and n more".
MAX_NAMED = 8


def validate_plan(
    plan: ShardingPlan, *, tables: Sequence[Table] | None = None
) -> tuple[RankLedger, ...]:
    """Check a plan.

    Args:
        plan: any plan, made or written by hand.
        tables: the table list that it must be for; not compared if None.

    Returns:
        The memory ledger of every rank, in rank order.

    Raises:
        PlanError: two tables share a name, a shard lies outside its table or on no rank, the
            shards of a table do not tile it or do not have the shape of its sharding type,
            the cost is for other ranks, or the plan was made for other tables.
        InfeasibleError: a rank has less memory than it needs.
    """
    names: set[str] = set()
    for entry in plan.tables:
        if entry.table.name in names:
            raise PlanError(
                f"the plan has two tables called {entry.table.name!r}",
                remedy="give each table its own name",
            )
        names.add(entry.table.name)
        check_shards(entry, plan.topology)
    world_size = plan.topology.world_size
    if plan.cost is not None and len(plan.cost.step.fwd_compute_ms) != world_size:
        raise PlanError(
            "the plan's cost is for another number of ranks",
            got=len(plan.cost.step.fwd_compute_ms),
            allowed=world_size,
            remedy="cost the plan again",
        )
    if tables is not None:
        check_made_for(plan, tables)
    ledgers = memory_ledger(plan.problem, plan.slices_by_rank())
    check_memory(plan, ledgers)
    return ledgers


def check_shards(entry: TablePlan, topology: Topology) -> None:
    """Check one table's shards: ranks, bounds, shape by sharding type, exact tiling.

    Every sharding type cuts along one dimension only, so once shapes are right, tiling is a
    sweep over sorted intervals: exact integers, O(n log n) for n shards.

    Raises:
        PlanError: names the table, the shard and, for gaps and overlaps, the rectangle.
    """
    table, kind = entry.table, entry.sharding_type
    where = f"table {table.name!r} ({kind.value})"
    if not entry.shards:
        raise PlanError(f"{where} has no shards", remedy="give at least one")
    for index, shard in enumerate(entry.shards):
        _check_bounds(shard, f"{where}, shard {index}", table, topology)
    if kind is ShardingType.DATA_PARALLEL:
        _check_replicas(entry, where, topology)
        return
    if kind is ShardingType.TABLE_WISE:
        if len(entry.shards) > 1:
            raise PlanError(f"{where} must be one shard", got=f"{len(entry.shards)} shards")
        _check_whole(entry.shards[0], f"{where}, shard 0", table)
        return
    _check_slices(entry, where)
    if kind in (ShardingType.TABLE_ROW_WISE, ShardingType.TABLE_COLUMN_WISE):
        _check_one_node(entry, where, topology)


def _check_bounds(shard: Shard, where: str, table: Table, topology: Topology) -> None:
    if not 0 <= shard.rank < topology.world_size:
        raise PlanError(
            f"{where} is on a rank that does not exist",
            got=shard.rank,
            allowed=f"0..{topology.world_size - 1}",
        )
    for offset, size, limit, unit in (
        (shard.row_offset, shard.num_rows, table.num_embeddings, "rows"),
        (shard.col_offset, shard.num_cols, table.embedding_dim, "columns"),
    ):
        if offset < 0 or size < 0 or offset + size > limit:
            raise PlanError(
                f"{where} lies outside its table",
                got=f"{unit} [{offset}, {offset + size})",
                allowed=f"{unit} within [0, {limit})",
            )


def _check_whole(shard: Shard, where: str, table: Table) -> None:
    # Within bounds, a shard of the table's size can only start at 0.
    if (shard.num_rows, shard.num_cols) != (table.num_embeddings, table.embedding_dim):
        raise PlanError(
            f"{where} must be the whole table",
            got=_rectangle(shard),
            allowed=f"rows [0, {table.num_embeddings}) × columns [0, {table.embedding_dim})",
        )


def _check_replicas(entry: TablePlan, where: str, topology: Topology) -> None:
    seen: set[int] = set()
    for index, shard in enumerate(entry.shards):
        _check_whole(shard, f"{where}, shard {index}", entry.table)
        if shard.rank in seen:
            raise PlanError(
                f"{where} has two replicas on one rank",
                got=f"rank {shard.rank}",
                allowed="one on every rank",
            )
        seen.add(shard.rank)
    if missing := sorted(set(range(topology.world_size)) - seen):
        raise PlanError(
            f"{where} lacks a replica",
            got=f"none on rank {listed(missing)}",
            allowed="one on every rank",
        )


def _check_slices(entry: TablePlan, where: str) -> None:
    table, by_rows = entry.table, entry.sharding_type.splits_rows
    intervals: list[tuple[int, int]] = []
    ranks: dict[int, int] = {}
    for index, shard in enumerate(entry.shards):
        across, full, unit = (
            (shard.num_cols, table.embedding_dim, "columns")
            if by_rows
            else (shard.num_rows, table.num_embeddings, "rows")
        )
        if across != full:
            raise PlanError(
                f"{where}, shard {index} must have all {unit}",
                got=_rectangle(shard),
                allowed=f"{unit} [0, {full})",
            )
        if by_rows:
            # Ids travel to the rank that holds their row, so a rank holds one block of rows.
            # The block may be empty: with few rows and many ranks, some get none.
            if shard.rank in ranks:
                raise PlanError(
                    f"{where} has two shards on one rank",
                    got=f"shards {ranks[shard.rank]} and {index} on rank {shard.rank}",
                    allowed="at most one block of rows per rank",
                    remedy="join the two blocks or move one",
                )
            ranks[shard.rank] = index
            intervals.append((shard.row_offset, shard.row_offset + shard.num_rows))
        else:
            if shard.num_cols == 0:
                raise PlanError(
                    f"{where}, shard {index} has no columns", remedy="leave the shard out"
                )
            intervals.append((shard.col_offset, shard.col_offset + shard.num_cols))
    _check_intervals(intervals, where, table, by_rows=by_rows)


def _check_intervals(
    intervals: list[tuple[int, int]], where: str, table: Table, *, by_rows: bool
) -> None:
    """Refuse the first gap or overlap of half-open intervals over the split dimension."""

    def rectangle(low: int, high: int) -> str:
        rows = (low, high) if by_rows else (0, table.num_embeddings)
        cols = (0, table.embedding_dim) if by_rows else (low, high)
        return f"rows [{rows[0]}, {rows[1]}) × columns [{cols[0]}, {cols[1]})"

    end = table.num_embeddings if by_rows else table.embedding_dim
    occupied = sorted((low, high) for low, high in intervals if low < high)
    for (_, left_high), (low, high) in pairwise([(0, 0), *occupied, (end, end)]):
        if low > left_high:
            raise PlanError(
                f"{where}: no shard holds {rectangle(left_high, low)}",
                allowed="shards that tile the table exactly",
            )
        if low < left_high:
            raise PlanError(
                f"{where}: two shards hold {rectangle(low, min(high, left_high))}",
                allowed="shards that tile the table exactly",
            )


def _check_one_node(entry: TablePlan, where: str, topology: Topology) -> None:
    nodes = sorted({shard.rank // topology.local_world_size for shard in entry.shards})
    if len(nodes) > 1:
        raise PlanError(
            f"{where} lies on more than one node",
            got=f"nodes {listed(nodes)}",
            allowed=f"ranks of one node ({topology.local_world_size} ranks each)",
        )


def check_made_for(plan: ShardingPlan, tables: Sequence[Table]) -> None:
    """Refuse a plan that was made for other tables than these. Their order does not matter.

    Raises:
        PlanError: names the tables that are missing, extra or different, and how.
    """
    planned = {entry.table.name: entry.table for entry in plan.tables}
    given = {table.name: table for table in tables}
    remedy = "plan again for these tables"
    faults = []
    if missing := [name for name in given if name not in planned]:
        faults.append(f"it lacks {listed(missing)}")
    if extra := [name for name in planned if name not in given]:
        faults.append(f"it has {listed(extra)}, which the table list has not")
    changed = [
        f"{name} ({difference})"
        for name, table in given.items()
        if name in planned
        and (difference := _difference(planned[name], table, by_hand=not plan.provenance))
    ]
    if changed:
        faults.append(f"different: {listed(changed)}")
    if faults:
        raise PlanError(
            "the plan is stale: it was made for other tables", got="; ".join(faults), remedy=remedy
        )


def _difference(planned: Table, given: Table, *, by_hand: bool) -> str:
    """What differs between two tables of one name; empty if nothing does."""
    then, now = planned.to_json(), given.to_json()
    keys = list(then)
    # A plan written by hand may leave out how ids are spread.
    if by_hand and planned.ids == type(planned.ids)():
        keys = [key for key in keys if key not in ("ids", "bag_lengths")]
    return ", ".join(
        f"{key} differ" if key == "ids" else f"{key} {_shown(then[key])} -> {_shown(now[key])}"
        for key in keys
        if then[key] != now[key]
    )


def _shown(value: object) -> str:
    return "|".join(map(str, value)) if isinstance(value, list) else str(value)


def check_memory(plan: ShardingPlan, ledgers: Sequence[RankLedger]) -> None:
    """Refuse a plan that some rank has no room for.

    Raises:
        InfeasibleError: names the overfull ranks, what each needs and has, the largest
            tables on the worst of them, and what would help.
    """
    overfull = sorted((ledger for ledger in ledgers if ledger.free_bytes < 0), key=_free_bytes)
    if not overfull:
        return
    shown = [
        f"rank {ledger.rank} needs {_gib(ledger.total_bytes)} ({ledger.total_bytes} bytes) "
        f"and has {_gib(ledger.hbm_bytes)} ({ledger.hbm_bytes} bytes)"
        for ledger in sorted(overfull[:MAX_NAMED], key=lambda ledger: ledger.rank)
    ]
    if len(overfull) > MAX_NAMED:
        shown.append(f"{len(overfull) - MAX_NAMED} more ranks are overfull")
    worst = overfull[0]
    largest = sorted(
        (
            (
                shard_load(slice_, plan.training, plan.topology.world_size).memory_bytes,
                slice_.table.name,
            )
            for slice_ in plan.slices_by_rank()[worst.rank]
        ),
        key=lambda need: (-need[0], need[1]),
    )[:3]
    if largest:
        tables = ", ".join(f"{name} {_gib(need)}" for need, name in largest)
        shown.append(f"largest on rank {worst.rank}: {tables}")
    raise InfeasibleError(
        f"the plan does not fit the memory of {len(overfull)} rank(s)",
        got="; ".join(shown),
        remedy=_memory_remedy(ledgers, worst),
    )


def _memory_remedy(ledgers: Sequence[RankLedger], worst: RankLedger) -> str:
    lines = worst.lines_bytes
    of_batches = sum(
        lines[line]
        for line in ("inputs", "outputs", "gradients", "batches_in_flight", "pooled_outputs")
    )
    advice = []
    if sum(ledger.free_bytes for ledger in ledgers) >= 0:
        advice.append("plan again (the ranks together have room)")
    if 2 * of_batches > worst.total_bytes:
        advice.append("use a smaller batch size (batches take most of the memory)")
    if lines["optimizer_state"] > lines["weights"] // 2:
        advice.append("use an optimizer with less state")
    advice.append("give more ranks or more memory per rank")
    return ", or ".join(advice)


def _free_bytes(ledger: RankLedger) -> int:
    return ledger.free_bytes


def _rectangle(shard: Shard) -> str:
    return (
        f"rows [{shard.row_offset}, {shard.row_offset + shard.num_rows}) × "
        f"columns [{shard.col_offset}, {shard.col_offset + shard.num_cols})"
    )


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / GIB:.3f} GiB"


def listed(names: Sequence[object], limit: int = MAX_NAMED) -> str:
    """The first names, and how many more there are."""
    shown = ", ".join(str(name) for name in names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
