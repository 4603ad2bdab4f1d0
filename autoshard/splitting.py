"""The rule that splits a table which fits on no rank whole: columns first, then rows.

Every sharder starts from these slices, so that all of them answer the same question.
"""

from __future__ import annotations

from itertools import pairwise

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
    """The slices of one table by the rule, or None if none fits."""

    def fits(parts: tuple[ShardSlice, ...]) -> bool:
        # The k-th largest part needs a rank of its own that holds it.
        needs = sorted(
            (
                shard_load(part, problem.training, problem.topology.world_size).memory_bytes
                for part in parts
            ),
            reverse=True,
        )
        room = sorted(free, reverse=True)
        return all(need <= have for need, have in zip(needs, room, strict=False))

    whole = (ShardSlice.whole(table),)
    if fits(whole):
        return whole
    world_size = problem.topology.world_size
    for num_parts in range(2, min(world_size, table.embedding_dim // KERNEL_ALIGNMENT) + 1):
        parts = _column_parts(table, num_parts)
        if fits(parts):
            return parts
    for num_parts in range(2, min(world_size, table.num_embeddings) + 1):
        parts = _row_parts(table, num_parts)
        if fits(parts):
            return parts
    return None


def _cuts(total: int, num_parts: int) -> list[int]:
    """Offsets of `num_parts` near-equal parts of `total`, the end included."""
    return [total * part // num_parts for part in range(num_parts + 1)]


def _column_parts(table: Table, num_parts: int) -> tuple[ShardSlice, ...]:
    vectors = table.embedding_dim // KERNEL_ALIGNMENT
    cuts = [cut * KERNEL_ALIGNMENT for cut in _cuts(vectors, num_parts)]
    cuts[-1] = table.embedding_dim  # a remainder below one vector stays with the last part
    return tuple(
        ShardSlice(table, ShardingType.COLUMN_WISE, 0, low, table.num_embeddings, high - low)
        for low, high in pairwise(cuts)
    )


def _row_parts(table: Table, num_parts: int) -> tuple[ShardSlice, ...]:
    cuts = _cuts(table.num_embeddings, num_parts)
    return tuple(
        ShardSlice(table, ShardingType.ROW_WISE, low, 0, high - low, table.embedding_dim)
        for low, high in pairwise(cuts)
    )


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
