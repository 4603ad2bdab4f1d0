"""What a finished plan costs under a cost model, from scratch, and how low it could be."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.features import shard_features
from autoshard.objective import StepCost
from autoshard.plan import ShardingPlan
from autoshard.problem import ShardingProblem
from autoshard.protocols import CostModel
from autoshard.shards import ShardingType, ShardSlice, shard_load
from autoshard.traffic import PeerBytes, comms_ms


def predict_step(
    problem: ShardingProblem,
    slices_by_rank: Sequence[Sequence[ShardSlice]],
    cost_model: CostModel,
) -> StepCost:
    """Predict the four terms of a placement.

    Args:
        problem: tables, training and topology.
        slices_by_rank: what each rank holds, [world_size].
        cost_model: the model.
    """
    training, world_size = problem.training, problem.topology.world_size
    flat = [slice_ for held in slices_by_rank for slice_ in held]
    rank_of = np.repeat(np.arange(world_size), [len(held) for held in slices_by_rank])
    features_SF = shard_features(flat, training, world_size)
    encoding_SD = cost_model.encode(features_SF)
    encoding_RD = np.zeros((world_size, encoding_SD.shape[1]))
    np.add.at(encoding_RD, rank_of, encoding_SD)
    compute_RP = cost_model.compute_ms(encoding_RD, np.bincount(rank_of, minlength=world_size))
    ids_R, output_R = np.zeros(world_size), np.zeros(world_size)
    replica_bytes = 0.0
    for slice_, rank in zip(flat, rank_of, strict=True):
        load = shard_load(slice_, training, world_size)
        ids_R[rank] += load.send_ids_bytes_per_peer
        output_R[rank] += load.send_output_bytes_per_peer
        if rank == 0:  # replicas lie on every rank; count them once
            replica_bytes += load.send_replica_bytes_per_peer
    fwd_comms, bwd_comms = comms_ms(
        cost_model,
        np.array([world_size]),
        PeerBytes.of(ids_R[None]),
        PeerBytes.of(output_R[None]),
        np.array([replica_bytes]),
    )
    return StepCost(
        source=cost_model.source,
        fwd_compute_ms=tuple(compute_RP[:, 0].tolist()),
        bwd_compute_ms=tuple(compute_RP[:, 1].tolist()),
        fwd_comms_ms=float(fwd_comms[0]),
        bwd_comms_ms=float(bwd_comms[0]),
        extrapolated=cost_model.is_extrapolated(features_SF, problem),
    )


def predict_plan(plan: ShardingPlan, cost_model: CostModel) -> StepCost:
    """Predict the four terms of a plan."""
    return predict_step(plan.problem, plan.slices_by_rank(), cost_model)


def lower_bound_ms(
    problem: ShardingProblem, slices: Sequence[ShardSlice], cost_model: CostModel
) -> float | None:
    """What every placement of these slices costs at least under the cost model.

    Each of the four terms is bounded by itself: the compute terms by the model's own
    bound over all placements, the all-to-alls by their total bytes, which no placement
    changes. Replicas lie on every rank and are left out of the compute bound.

    Returns:
        The bound in ms, or None if the model has none.
    """
    training, world_size = problem.training, problem.topology.world_size
    placed = [s for s in slices if s.sharding_type is not ShardingType.DATA_PARALLEL]
    encoding_SD = cost_model.encode(shard_features(placed, training, world_size))
    compute_P = cost_model.compute_lower_bound_ms(encoding_SD, world_size)
    if compute_P is None:
        return None
    loads = [shard_load(slice_, training, world_size) for slice_ in placed]
    peers = world_size - 1
    total_ids = peers * sum(load.send_ids_bytes_per_peer for load in loads)
    total_output = peers * sum(load.send_output_bytes_per_peer for load in loads)
    ids_ms = cost_model.collective_lower_bound_ms(total_ids, world_size)
    output_ms = cost_model.collective_lower_bound_ms(total_output, world_size)
    if ids_ms is None or output_ms is None:
        return None
    return float(compute_P.sum() + ids_ms + 2 * output_ms)
