"""What a policy sees of a placement state: one definition, trained and planned with.

Every number is relative to the task (its ideal balanced cost, its memory, its traffic), so
that one policy serves any number of tables and ranks. Ranks are described one by one, in the
same way, and the policy may not know their numbers.

Shapes: N=tasks, R=ranks, K=rank features, G=global features.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.placement import Candidates, PlacementState, PlacementTask, largest_of_others

Float32Array = NDArray[np.float32]

RANK_FEATURES = (
    "exists",
    "is_legal",
    "fwd_compute",
    "bwd_compute",
    "fwd_compute_with_slice",
    "bwd_compute_with_slice",
    "objective_increase",
    "objective_regret",
    "log_objective_regret",
    "compute_regret",
    "log_compute_regret",
    "projected_regret",
    "log_projected_regret",
    "objective_order",
    "projected_order",
    "compute_order",
    "fwd_share_with_slice",
    "bwd_share_with_slice",
    "output_share_with_slice",
    "ids_share_with_slice",
    "memory_used",
    "memory_used_with_slice",
    "memory_regret",
    "output_share",
    "ids_share",
    "num_slices",
)
GLOBAL_FEATURES = (
    "progress",
    "slice_fwd_compute",
    "slice_bwd_compute",
    "next_slice_compute",
    "remaining_fwd_compute",
    "remaining_bwd_compute",
    "remaining_memory",
    "slice_memory",
    "slice_output",
    "objective",
    "fwd_imbalance",
    "bwd_imbalance",
    "output_imbalance",
    "log_world_size",
    "log_num_slices",
    "projected_objective",
    "legal_share",
)
NUM_RANK_FEATURES = len(RANK_FEATURES)
NUM_GLOBAL_FEATURES = len(GLOBAL_FEATURES)
#: All features are clipped to ±this, which bounds the observation space.
FEATURE_LIMIT = 10.0


@dataclass(frozen=True, kw_only=True, eq=False)
class Observation:
    """The observation of N tasks; padding ranks are all 0."""

    ranks_NRK: Float32Array
    globals_NG: Float32Array
    legal_NR: NDArray[np.bool_]


def reference_ms(task: PlacementTask) -> float:
    """The task's scale: its slices' predicted compute cost spread evenly over its ranks.

    At least 1 µs, so that it can divide.
    """
    return max(float(task.alone_ms_SP.sum()) / task.world_size, 1e-3)


def observe(state: PlacementState, candidates: Candidates) -> Observation:
    """Describe each task's ranks and its current slice.

    Args:
        state: N tasks side by side.
        candidates: `state.candidates()` of this very state.

    Returns:
        float32 features within ±`FEATURE_LIMIT`, as named in `RANK_FEATURES` and
        `GLOBAL_FEATURES`, and the legal ranks.
    """
    legal_NR = state.legal_NR()
    scale_N1 = np.array([[reference_ms(task)] for task in state.tasks])
    world_N1 = state.world_size_N[:, None].astype(np.float64)
    slices_N1 = np.array([[max(task.num_slices, 1)] for task in state.tasks], dtype=np.float64)
    now_N1 = state.objective_ms_N()[:, None]
    objective_NR = np.where(state.exists_NR, candidates.objective_ms_NR, 0.0)
    best_N1 = _smallest(objective_NR, legal_NR)
    regret_NR = np.maximum(objective_NR - best_N1, 0.0) / scale_N1
    compute_NR = candidates.compute_ms_NRP.sum(axis=2)
    compute_regret_NR = np.maximum(compute_NR - _smallest(compute_NR, legal_NR), 0.0) / scale_N1
    capacity_NR = np.ones_like(state.free_bytes_NR)
    for index, task in enumerate(state.tasks):
        capacity_NR[index, : task.world_size] = np.maximum(task.capacity_bytes_R, 1)
    used_NR = 1.0 - state.free_bytes_NR / capacity_NR
    facts = _SliceFacts.of(state)
    projected_NR = np.where(state.exists_NR, _projected_ms_NR(state, candidates, facts), 0.0)
    projected_best_N1 = _smallest(projected_NR, legal_NR)
    projected_regret_NR = np.maximum(projected_NR - projected_best_N1, 0.0) / scale_N1
    memory_with_NR = used_NR + facts.memory_N[:, None] / capacity_NR
    # 1 is an equal share of the whole task's work.
    share_NRP = candidates.compute_ms_NRP * (world_N1 / facts.total_ms_NP)[:, None, :]
    output_share_N1 = world_N1 / facts.total_output_N[:, None]
    ids_share_N1 = world_N1 / facts.total_ids_N[:, None]
    ranks_NRK = np.stack(
        [
            state.exists_NR,
            legal_NR,
            state.compute_ms_NRP[:, :, 0] / scale_N1,
            state.compute_ms_NRP[:, :, 1] / scale_N1,
            candidates.compute_ms_NRP[:, :, 0] / scale_N1,
            candidates.compute_ms_NRP[:, :, 1] / scale_N1,
            (objective_NR - now_N1) / scale_N1,
            regret_NR,
            np.log1p(100.0 * regret_NR),
            compute_regret_NR,
            np.log1p(100.0 * compute_regret_NR),
            projected_regret_NR,
            np.log1p(100.0 * projected_regret_NR),
            _order(objective_NR, compute_NR, legal_NR),
            _order(projected_NR, compute_NR, legal_NR),
            _order(compute_NR, objective_NR, legal_NR),
            share_NRP[:, :, 0],
            share_NRP[:, :, 1],
            (state.output_bytes_NR + facts.output_N[:, None]) * output_share_N1,
            (state.ids_bytes_NR + facts.ids_N[:, None]) * ids_share_N1,
            used_NR,
            memory_with_NR,
            memory_with_NR - _smallest(memory_with_NR, legal_NR),
            state.output_bytes_NR * output_share_N1,
            state.ids_bytes_NR * ids_share_N1,
            state.num_slices_NR * world_N1 / slices_N1,
        ],
        axis=2,
    )
    ranks_NRK *= state.exists_NR[:, :, None]
    scale_N = scale_N1[:, 0]
    globals_NG = np.stack(
        [
            state.position_N / slices_N1[:, 0],
            facts.alone_ms_NP[:, 0] / scale_N,
            facts.alone_ms_NP[:, 1] / scale_N,
            facts.next_alone_ms_N / scale_N,
            facts.remaining_ms_NP[:, 0] / facts.total_ms_NP[:, 0],
            facts.remaining_ms_NP[:, 1] / facts.total_ms_NP[:, 1],
            facts.remaining_bytes_N / np.maximum(state.free_bytes_NR.sum(axis=1), 1),
            facts.memory_N / np.maximum(capacity_NR.max(axis=1), 1),
            facts.output_N * world_N1[:, 0] / facts.total_output_N,
            now_N1[:, 0] / scale_N,
            _imbalance(state.compute_ms_NRP[:, :, 0], world_N1[:, 0]),
            _imbalance(state.compute_ms_NRP[:, :, 1], world_N1[:, 0]),
            _imbalance(state.output_bytes_NR, world_N1[:, 0]),
            np.log2(world_N1[:, 0]) / 4.0,
            np.log2(slices_N1[:, 0]) / 8.0,
            projected_best_N1[:, 0] / scale_N,
            legal_NR.sum(axis=1) / world_N1[:, 0],
        ],
        axis=1,
    )
    return Observation(
        ranks_NRK=_bounded(ranks_NRK), globals_NG=_bounded(globals_NG), legal_NR=legal_NR
    )


def _projected_ms_NR(
    state: PlacementState, candidates: Candidates, facts: _SliceFacts
) -> NDArray[np.float64]:
    """The objective if all that is still to come could be spread like a fluid.

    Each compute term is then its largest rank so far or the mean of everything, whichever is
    more: a rank that would stand above the mean in the end is seen long before the end.
    Communication is taken as it is with the slice placed.
    """
    compute_NRP = candidates.compute_ms_NRP
    world_N = state.world_size_N.astype(np.float64)
    projected_NR = candidates.fwd_comms_ms_NR + candidates.bwd_comms_ms_NR
    for phase in range(2):
        held_NR = state.compute_ms_NRP[:, :, phase]
        mean_N = (held_NR.sum(axis=1) + facts.remaining_ms_NP[:, phase]) / world_N
        slowest_NR = np.maximum(compute_NRP[:, :, phase], largest_of_others(held_NR))
        projected_NR = projected_NR + np.maximum(slowest_NR, mean_N[:, None])
    return projected_NR


def _order(
    values_NR: NDArray[np.float64], ties_NR: NDArray[np.float64], legal_NR: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """How each legal rank stands by a value: 1 the smallest, 1/2 the second, 1/3, …; else 0.

    Equal values stand as `ties_NR` says, and equal ranks stand equal. Orders tell ranks apart
    whose values differ by less than a network resolves.
    """
    first_NR = _position(np.where(legal_NR, values_NR, np.inf))
    largest = max(float(ties_NR.max(initial=0.0)), 1e-9)
    both_NR = np.where(legal_NR, first_NR + 0.5 * ties_NR / largest, np.inf)
    return np.where(legal_NR, 1.0 / (1.0 + _position(both_NR)), 0.0)


def _position(values_NR: NDArray[np.float64]) -> NDArray[np.float64]:
    """How many values of the row are smaller; differences by rounding count as none."""
    order_NR = np.argsort(values_NR, axis=1, kind="stable")
    sorted_NR = np.take_along_axis(values_NR, order_NR, axis=1)
    larger_NR = sorted_NR[:, 1:] > sorted_NR[:, :-1] * (1.0 + 1e-9) + 1e-12
    place_NR = np.zeros(values_NR.shape)
    steps_NR = np.arange(1, values_NR.shape[1]) * larger_NR
    np.maximum.accumulate(steps_NR, axis=1, out=place_NR[:, 1:])
    position_NR = np.empty(values_NR.shape)
    np.put_along_axis(position_NR, order_NR, place_NR, axis=1)
    return position_NR


def _bounded(values: NDArray[np.float64]) -> Float32Array:
    return np.clip(values, -FEATURE_LIMIT, FEATURE_LIMIT).astype(np.float32)


def _smallest(values_NR: NDArray[np.float64], legal_NR: NDArray[np.bool_]) -> NDArray[np.float64]:
    """The smallest legal value of each task, [N, 1]; 0 where nothing is legal."""
    smallest = np.where(legal_NR, values_NR, np.inf).min(axis=1, keepdims=True)
    return np.where(np.isfinite(smallest), smallest, 0.0)


def _imbalance(values_NR: NDArray[np.float64], world_N: NDArray[np.float64]) -> NDArray[np.float64]:
    """Largest over mean, less 1; 0 where all are 0."""
    mean = values_NR.sum(axis=1) / world_N
    return np.where(mean > 0, values_NR.max(axis=1) / np.where(mean > 0, mean, 1.0) - 1.0, 0.0)


@dataclass(frozen=True, kw_only=True, eq=False)
class _SliceFacts:
    """Each task's current slice, and what is still to come."""

    memory_N: NDArray[np.float64]
    ids_N: NDArray[np.float64]
    output_N: NDArray[np.float64]
    alone_ms_NP: NDArray[np.float64]
    next_alone_ms_N: NDArray[np.float64]
    remaining_ms_NP: NDArray[np.float64]
    total_ms_NP: NDArray[np.float64]
    remaining_bytes_N: NDArray[np.float64]
    total_output_N: NDArray[np.float64]
    total_ids_N: NDArray[np.float64]

    @classmethod
    def of(cls, state: PlacementState) -> _SliceFacts:
        num = len(state)
        memory, output, following = np.zeros(num), np.zeros(num), np.zeros(num)
        ids = np.zeros(num)
        alone, remaining, total = np.zeros((num, 2)), np.zeros((num, 2)), np.ones((num, 2))
        remaining_bytes, total_output, total_ids = np.zeros(num), np.ones(num), np.ones(num)
        for index, (task, position) in enumerate(zip(state.tasks, state.position_N, strict=True)):
            sums = task.sums
            total[index] = np.maximum(sums.remaining_ms_SP[0], 1e-9)
            total_output[index] = max(sums.output_bytes, 1.0)
            total_ids[index] = max(sums.ids_bytes, 1.0)
            remaining[index] = sums.remaining_ms_SP[position]
            remaining_bytes[index] = sums.remaining_bytes_S[position]
            if position < task.num_slices:
                memory[index] = task.memory_bytes_S[position]
                output[index] = task.output_bytes_S[position]
                ids[index] = task.ids_bytes_S[position]
                alone[index] = task.alone_ms_SP[position]
            if position + 1 < task.num_slices:
                following[index] = task.alone_ms_SP[position + 1].sum()
        return cls(
            memory_N=memory,
            ids_N=ids,
            output_N=output,
            alone_ms_NP=alone,
            next_alone_ms_N=following,
            remaining_ms_NP=remaining,
            total_ms_NP=total,
            remaining_bytes_N=remaining_bytes,
            total_output_N=total_output,
            total_ids_N=total_ids,
        )
