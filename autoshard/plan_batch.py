"""What many placements of one task cost at once, such as the candidates of a search of one's own.

Beside `costing`, which costs one finished plan, and `placement_costs`, which costs changes of
one. Features and encodings are taken from the prepared task; costing N placements then takes
one sparse matrix product, one call of the model for all ranks and one for all collectives.

Shapes: N=placements, S=slices, R=ranks, D=encoding width, P=phases (forward, backward).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import sparse

from autoshard.features import shard_features
from autoshard.objective import CostSource, StepCost, step_ms
from autoshard.placement import PlacementTask
from autoshard.placement_costs import check_ranks
from autoshard.protocols import CostModel
from autoshard.traffic import PeerBytes, comms_ms

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Ranks costed in one call of the model at most: what that takes stays below 100 MB.
MAX_RANKS_PER_CALL = 2**16


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementBatchCosts:
    """The terms of N placements, predicted like those of `autoshard.costing.predict_step`."""

    source: CostSource
    extrapolated: bool
    """Whether some input lies outside the range of the measurements; where slices lie does
    not matter for that."""
    compute_ms_NRP: FloatArray
    """Forward and backward compute of every rank, replicas included; 0 for an empty rank."""
    fwd_comms_ms_N: FloatArray
    bwd_comms_ms_N: FloatArray

    def __len__(self) -> int:
        return len(self.fwd_comms_ms_N)

    @cached_property
    def step_ms_N(self) -> FloatArray:
        """The objective, float64 [N]; see `autoshard.objective`."""
        return step_ms(
            self.compute_ms_NRP[:, :, 0],
            self.compute_ms_NRP[:, :, 1],
            self.fwd_comms_ms_N,
            self.bwd_comms_ms_N,
        )

    def step_cost(self, index: int) -> StepCost:
        """The cost of placement number `index` as plans have it."""
        return StepCost(
            source=self.source,
            fwd_compute_ms=tuple(self.compute_ms_NRP[index, :, 0].tolist()),
            bwd_compute_ms=tuple(self.compute_ms_NRP[index, :, 1].tolist()),
            fwd_comms_ms=float(self.fwd_comms_ms_N[index]),
            bwd_comms_ms=float(self.bwd_comms_ms_N[index]),
            extrapolated=self.extrapolated,
        )


def cost_assignments(
    task: PlacementTask, cost_model: CostModel, ranks_NS: ArrayLike
) -> PlacementBatchCosts:
    """Cost complete placements, from scratch.

    Memory and whether slices of one table lie apart are not looked at: what does not fit is
    costed like anything else.

    Args:
        task: from `autoshard.placement.prepare_task`, prepared with `cost_model`.
        cost_model: the model.
        ranks_NS: a rank in [0, R) for each of the task's slices, in their order, whole numbers
            [N, S]. Replicas lie on every rank and are not named. N may be 0.

    Returns:
        The terms of each placement.

    Raises:
        InputError: another shape, other numbers, or a rank that does not exist.
    """
    ranks_NS = check_ranks(task, ranks_NS)
    world_size = task.world_size
    num = len(ranks_NS)
    features_SF = np.concatenate(
        [
            task.features_SF,
            shard_features(task.replicas, task.problem.training, world_size),
        ]
    )
    costs = PlacementBatchCosts(
        source=cost_model.source,
        extrapolated=cost_model.is_extrapolated(features_SF, task.problem),
        compute_ms_NRP=np.zeros((num, world_size, 2)),
        fwd_comms_ms_N=np.zeros(num),
        bwd_comms_ms_N=np.zeros(num),
    )
    per_call = max(1, MAX_RANKS_PER_CALL // world_size)
    for start in range(0, num, per_call):
        some = slice(start, start + per_call)
        _cost(task, cost_model, ranks_NS[some], costs, some)
    return costs


def _cost(
    task: PlacementTask,
    cost_model: CostModel,
    ranks_NS: IntArray,
    costs: PlacementBatchCosts,
    rows: slice,
) -> None:
    """Fill in the given rows of `costs`."""
    num, world_size = len(ranks_NS), task.world_size
    ones_S = np.ones(task.num_slices)
    what_SK = np.column_stack(
        [ones_S, task.ids_bytes_S, task.output_bytes_S, task.encoding_SD],
    )
    held_K = np.array([len(task.replicas), task.replica_ids_bytes, 0.0, *task.base_encoding_D])
    # 1 where rank r of placement n holds slice s, [N · R, S].
    rank_of = (ranks_NS + world_size * np.arange(num)[:, None]).ravel()
    slice_of = np.tile(np.arange(task.num_slices), num)
    holds = sparse.csr_matrix(
        (np.ones(rank_of.size), (rank_of, slice_of)), shape=(num * world_size, task.num_slices)
    )
    sums = holds @ what_SK + held_K
    compute = cost_model.compute_ms(sums[:, 3:], sums[:, 0].astype(np.int64))
    costs.compute_ms_NRP[rows] = compute.reshape(num, world_size, 2)
    costs.fwd_comms_ms_N[rows], costs.bwd_comms_ms_N[rows] = comms_ms(
        cost_model,
        np.full(num, world_size),
        PeerBytes.of(sums[:, 1].reshape(num, world_size)),
        PeerBytes.of(sums[:, 2].reshape(num, world_size)),
        np.full(num, task.replica_bytes),
    )
