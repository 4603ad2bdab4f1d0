"""Which all-to-alls a placement causes in one step, and how large they are.

With per-peer bytes id_r (what each other rank sends rank r as ids, for the slices there and
for its replicas), out_r (what rank r sends each other rank as pooled outputs) and rep (what
every rank sends each other rank of its replicas' gradients), a step over R ranks has

    ids        rank q sends Σ_{r≠q} id_r      and receives (R − 1)·id_q
    outputs    rank r sends (R − 1)·out_r     and receives Σ_{q≠r} out_q
    gradients  the outputs with senders and receivers exchanged
    replicas   every rank sends and receives (R − 1)·rep

so the largest sender and receiver follow from the totals, the maxima and the minima.

Shapes: N=placements.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.features import traffic_features
from autoshard.protocols import CostModel

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class PeerBytes:
    """Per-peer bytes of N placements: total, largest and smallest over ranks, float64 [N]."""

    total_N: FloatArray
    largest_N: FloatArray
    smallest_N: FloatArray

    @classmethod
    def of(cls, bytes_NR: FloatArray) -> PeerBytes:
        """Summarise per-rank values, [N, R]."""
        return cls(
            total_N=bytes_NR.sum(axis=-1),
            largest_N=bytes_NR.max(axis=-1),
            smallest_N=bytes_NR.min(axis=-1),
        )

    def plus(self, bytes_N: FloatArray, world_size_N: NDArray[np.int64]) -> PeerBytes:
        """The same with `bytes_N` more on every rank, as replicas bring them."""
        return PeerBytes(
            total_N=self.total_N + bytes_N * world_size_N,
            largest_N=self.largest_N + bytes_N,
            smallest_N=self.smallest_N + bytes_N,
        )


def comms_ms(
    cost_model: CostModel,
    world_size_N: NDArray[np.int64],
    ids: PeerBytes,
    outputs: PeerBytes,
    replica_bytes_N: FloatArray,
) -> tuple[FloatArray, FloatArray]:
    """Forward and backward communication time of N placements.

    Returns:
        `fwd_comms_ms` (ids and outputs) and `bwd_comms_ms` (gradients and replicas), float64 [N].
    """
    peers_N = world_size_N - 1.0
    gathered_ids = traffic_features(
        world_size_N,
        ids.total_N - ids.smallest_N,
        peers_N * ids.largest_N,
        peers_N * ids.total_N,
    )
    scattered_outputs = traffic_features(
        world_size_N,
        peers_N * outputs.largest_N,
        outputs.total_N - outputs.smallest_N,
        peers_N * outputs.total_N,
    )
    gathered_gradients = scattered_outputs[..., [0, 2, 1, 3]]
    replica_N = peers_N * replica_bytes_N
    replicas = traffic_features(world_size_N, replica_N, replica_N, world_size_N * replica_N)
    num = len(world_size_N)
    times = cost_model.collective_ms(
        np.concatenate([gathered_ids, scattered_outputs, gathered_gradients, replicas])
    )
    return times[:num] + times[num : 2 * num], times[2 * num : 3 * num] + times[3 * num :]
