"""The error of a sharder that ran out of room, the same for all of them."""

from __future__ import annotations

from collections.abc import Sequence

from autoshard.errors import InfeasibleError
from autoshard.placement import PlacementTask
from autoshard.splitting import describe_bytes_by_rank
from autoshard.topology import GIB


def dead_end_error(
    name: str, task: PlacementTask, slice_index: int, ranks: Sequence[int | None]
) -> InfeasibleError:
    """Say which slice found no rank, what it needs and what each rank has left.

    Args:
        name: the sharder.
        task: the task.
        slice_index: the slice that fits nowhere.
        ranks: where the other slices are; None for those not placed. Shorter lists are padded.
    """
    free = task.capacity_bytes_R.copy()
    for index, rank in enumerate(ranks):
        if rank is not None:
            free[rank] -= task.memory_bytes_S[index]
    need = int(task.memory_bytes_S[slice_index])
    # Sums of plain integers: int64 would overflow on many ranks of absurd size.
    total = sum(task.memory_bytes_S.tolist())
    room = sum(max(capacity, 0) for capacity in task.capacity_bytes_R.tolist())
    where = describe_bytes_by_rank([int(value) for value in free])
    return InfeasibleError(
        f"{name} found no rank for table {task.slices[slice_index].table.name!r}",
        got=f"{need / GIB:.3f} GiB needed; free on {where}; "
        f"all shards together need {total / GIB:.3f} of {room / GIB:.3f} GiB",
        remedy=(
            "give more memory or ranks, or a smaller batch size"
            if total > room
            else "try the sharder 'autoshard', which also packs by memory, "
            "or give more memory or ranks"
        ),
    )
