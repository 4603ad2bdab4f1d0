"""Packing by memory alone: finds room where every cost-minded greedy runs into a dead end."""

from __future__ import annotations

import numpy as np

from autoshard.placement import PlacementTask

#: Best-fit decreasing first, then this many tries with perturbed orders.
NUM_TRIES = 200
#: Standard deviation of the log-normal factor on a slice's size in those orders.
ORDER_NOISE = 0.1


def pack_by_memory(task: PlacementTask, seed: int) -> tuple[int, ...] | None:
    """Place every slice within memory, heaviest first, each where least room is left over.

    Args:
        task: the task.
        seed: perturbs the order after the first try.

    Returns:
        A rank for each slice, or None if no try succeeded (which proves nothing).
    """
    generator = np.random.default_rng(seed)
    weight_S = task.memory_bytes_S.astype(np.float64)
    for attempt in range(NUM_TRIES):
        noise_S = generator.lognormal(0.0, ORDER_NOISE, task.num_slices) if attempt else 1.0
        ranks = _best_fit(task, np.argsort(-weight_S * noise_S, kind="stable"))
        if ranks is not None:
            return ranks
    return None


def _best_fit(task: PlacementTask, order: np.ndarray) -> tuple[int, ...] | None:
    free_R = task.capacity_bytes_R.copy()
    rank_S = np.full(task.num_slices, -1, dtype=np.int64)
    for index in order:
        left_R = free_R - task.memory_bytes_S[index]
        legal_R = left_R >= 0
        if task.has_siblings:
            taken = rank_S[task.table_S == task.table_S[index]]
            legal_R[taken[taken >= 0]] = False
        if not legal_R.any():
            return None
        rank = int(np.argmin(np.where(legal_R, left_R, np.iinfo(np.int64).max)))
        rank_S[index] = rank
        free_R[rank] = left_R[rank]
    return tuple(int(rank) for rank in rank_S)
