"""The rule that splits a table which fits on no rank whole: columns first, then rows.

Every sharder starts from these slices, so that all of them answer the same question.
"""

from __future__ import annotations

from autoshard.errors import InfeasibleError
from autoshard.problem import ShardingProblem
from autoshard.shards import (
    KERNEL_ALIGNMENT,
    ShardingType,
    ShardSlice,
    fixed_rank_bytes,
    shard_load,
)
from autoshard.tables import Table
from autoshard.topology import GIB


def free_capacity_bytes(problem: ShardingProblem) -> list[int]:
    """What each rank has left for shards: capacity less what every rank needs, may be < 0."""
    fixed = sum(fixed_rank_bytes(problem).values())
    return [
        problem.topology.capacity_bytes(rank) - fixed for rank in range(problem.topology.world_size)
    ]


def default_slices(problem: ShardingProblem) -> tuple[ShardSlice, ...]:
    """Slice every table: whole where it fits on some rank, else split by the rule.

    Columns are cut into the fewest parts (of whole kernel vectors, each on its own rank)
    that fit; if no number of column parts fits, rows are.

    Raises:
        InfeasibleError: a table fits in no way; all such tables are named.
    """
    free = free_capacity_bytes(problem)
    if max(free) < 0:
        fixed = fixed_rank_bytes(problem)
        needs = ", ".join(f"{name} {value / GIB:.3f} GiB" for name, value in fixed.items())
        raise InfeasibleError(
            "no rank has room for what every rank needs, whatever the plan",
            got=f"at most {max(problem.topology.hbm_bytes) / GIB:.3f} GiB per rank",
            allowed=f"at least {(sum(fixed.values()) + problem.topology.reserved_bytes) / GIB:.3f}"
            f" GiB ({needs}, reserved {problem.topology.reserved_bytes / GIB:.3f} GiB)",
            remedy="give more memory per rank or a smaller batch size",
        )
    slices: list[ShardSlice] = []
    failed: list[tuple[Table, int]] = []
    for table in problem.tables:
        parts = split_table(table, problem, free)
        if parts is None:
            whole = shard_load(
                ShardSlice.whole(table), problem.training, problem.topology.world_size
            )
            failed.append((table, whole.memory_bytes))
        else:
            slices.extend(parts)
    if failed:
        named = ", ".join(f"{t.name} ({need / GIB:.3f} GiB)" for t, need in failed[:8])
        more = f" and {len(failed) - 8} more" if len(failed) > 8 else ""
        raise InfeasibleError(
            f"{len(failed)} table(s) do not fit, whole or split: {named}{more}",
            got=f"free per rank: {describe_bytes_by_rank(free)}",
            remedy="give more ranks or more memory per rank, a smaller batch size, "
            "or an optimizer with less state",
        )
    return tuple(slices)


def split_table(
    table: Table, problem: ShardingProblem, free: list[int]
) -> tuple[ShardSlice, ...] | None:
    """The slices of one table by the rule, or None if none fits.

    Args:
        table: the table.
        problem: training and topology.
        free: what each rank has left for shards, [world_size].
    """
    world_size = problem.topology.world_size
    room = sorted(free, reverse=True)

    def need(part: ShardSlice) -> int:
        return shard_load(part, problem.training, world_size).memory_bytes

    whole = ShardSlice.whole(table)
    if need(whole) <= room[0]:
        return (whole,)
    for cut, most_parts in (
        (_column_part, table.embedding_dim // KERNEL_ALIGNMENT),
        (_row_part, table.num_embeddings),
    ):
        for num_parts in range(2, min(world_size, most_parts) + 1):
            # The last part is the largest: where it fits nowhere, the others need no look.
            if need(cut(table, num_parts, num_parts - 1)) > room[0]:
                continue
            parts = tuple(cut(table, num_parts, index) for index in range(num_parts))
            # The k-th largest part needs a rank of its own that holds it.
            needs = sorted(map(need, parts), reverse=True)
            if all(here <= have for here, have in zip(needs, room, strict=False)):
                return parts
    return None


def _bounds(total: int, num_parts: int, index: int) -> tuple[int, int]:
    """Where the `index`-th of `num_parts` near-equal parts of `total` begins and ends."""
    return total * index // num_parts, total * (index + 1) // num_parts


def _column_part(table: Table, num_parts: int, index: int) -> ShardSlice:
    low, high = _bounds(table.embedding_dim // KERNEL_ALIGNMENT, num_parts, index)
    low *= KERNEL_ALIGNMENT
    # A remainder below one vector stays with the last part.
    high = table.embedding_dim if index == num_parts - 1 else high * KERNEL_ALIGNMENT
    return ShardSlice(table, ShardingType.COLUMN_WISE, 0, low, table.num_embeddings, high - low)


def _row_part(table: Table, num_parts: int, index: int) -> ShardSlice:
    low, high = _bounds(table.num_embeddings, num_parts, index)
    return ShardSlice(table, ShardingType.ROW_WISE, low, 0, high - low, table.embedding_dim)


def describe_bytes_by_rank(values: list[int]) -> str:
    """`0: 1.250 GiB, 1: …`, with equal neighbours taken together."""
    groups: list[tuple[int, int, int]] = []
    for rank, value in enumerate(values):
        if groups and groups[-1][2] == value:
            groups[-1] = (groups[-1][0], rank, value)
        else:
            groups.append((rank, rank, value))
    shown = [
        f"rank {low}: {value / GIB:.3f} GiB"
        if low == high
        else f"ranks {low}-{high}: {value / GIB:.3f} GiB each"
        for low, high, value in groups[:16]
    ]
    return ", ".join(shown) + (", …" if len(groups) > 16 else "")
