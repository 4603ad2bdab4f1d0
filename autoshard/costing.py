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

#: Two calls of a model that computes in float32 differ by less than this share.
_ROUNDING = 1e-6


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

    A step is the sum of four terms, so the sum of a bound of each is a bound of the step.
    Let slices s lie on ranks r, and let every rank hold all replicas, whatever is decided.

    * Compute: max_r of a phase is bounded by the model itself, over all placements of the
      slices on top of the replicas' encodings (`CostModel.compute_lower_bound_ms`). Where a
      rank's cost is φ · (overhead + Σ own) with own >= 0 and φ >= φ_min, each rank costs at
      least φ_min · (overhead + Σ_replicas own + Σ_{s on r} own); the replicas' sum is the
      same for all r and comes out of the maximum.
    * All-to-alls of ids, outputs and gradients: a slice sends the same bytes wherever it
      lies, and replicas' ids come from every rank, so the total is fixed, and
      `CostModel.collective_lower_bound_ms` holds for every way to spread it.
    * The all-to-all of the replicas' gradients does not depend on the placement at all: it
      counts in full, less what float32 may differ by between two calls.

    Without slices there is but one placement, which costs what it costs.

    Args:
        problem: tables, training and topology.
        slices: what is placed; replicas once, or once for every rank.
        cost_model: the model.

    Returns:
        The bound in ms, or None if the model has none.
    """
    training, world_size = problem.training, problem.topology.world_size
    placed = [s for s in slices if s.sharding_type is not ShardingType.DATA_PARALLEL]
    by_name = {s.table.name: s for s in slices if s.sharding_type is ShardingType.DATA_PARALLEL}
    replicas = list(by_name.values())
    if not placed:
        only = predict_step(problem, [replicas] * world_size, cost_model)
        return only.step_ms * (1 - _ROUNDING)
    base_D = None
    if replicas:
        base_D = cost_model.encode(shard_features(replicas, training, world_size)).sum(axis=0)
    encoding_SD = cost_model.encode(shard_features(placed, training, world_size))
    compute_P = cost_model.compute_lower_bound_ms(encoding_SD, world_size, base_D)
    if compute_P is None:
        return None
    loads = [shard_load(slice_, training, world_size) for slice_ in placed]
    everywhere = [shard_load(replica, training, world_size) for replica in replicas]
    peers = world_size - 1
    total_ids = peers * (
        sum(load.send_ids_bytes_per_peer for load in loads)
        + world_size * sum(load.send_ids_bytes_per_peer for load in everywhere)
    )
    total_output = peers * sum(load.send_output_bytes_per_peer for load in loads)
    ids_ms = cost_model.collective_lower_bound_ms(total_ids, world_size)
    output_ms = cost_model.collective_lower_bound_ms(total_output, world_size)
    if ids_ms is None or output_ms is None:
        return None
    nothing = PeerBytes.of(np.zeros((1, world_size)))
    _, replicas_ms = comms_ms(
        cost_model,
        np.array([world_size]),
        nothing,
        nothing,
        np.array([sum(load.send_replica_bytes_per_peer for load in everywhere)], dtype=np.float64),
    )
    return float(compute_P.sum() + ids_ms + 2 * output_ms + replicas_ms[0] * (1 - _ROUNDING))
