"""One placement and what changes of it would cost: two ranks are re-costed, never all.

Local search, and whoever searches with moves of their own, step through this. A move or swap
changes two ranks, so re-costing it takes two rows of the cost model and the largest and smallest
of the other ranks. `plan_batch` costs many placements that have nothing in common.

Shapes: S=slices, R=ranks, D=encoding width, K=candidate changes, P=phases, N=placements.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from autoshard.errors import InputError, quoted
from autoshard.placement import PlacementTask
from autoshard.protocols import CostModel
from autoshard.traffic import PeerBytes, comms_ms

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class Changes:
    """K changes: slice `out_K` leaves rank `source_K` for `target_K`; `in_K` comes back, or −1."""

    source_K: IntArray
    target_K: IntArray
    out_K: IntArray
    in_K: IntArray

    def __len__(self) -> int:
        return len(self.out_K)

    def take(self, index: IntArray | slice) -> Changes:
        """Some of the changes."""
        return Changes(
            source_K=self.source_K[index],
            target_K=self.target_K[index],
            out_K=self.out_K[index],
            in_K=self.in_K[index],
        )


class PlacementCosts:
    """A complete placement, its objective, and what re-costing a change of it needs.

    `objective_ms` is the objective, `rank_S` the rank of each slice, and `compute_RP` what each
    rank computes in ms, all as of the last change. They are there to be read; `move` and `apply`
    change them.
    """

    def __init__(self, task: PlacementTask, cost_model: CostModel, ranks: Sequence[int]) -> None:
        """Cost a placement from scratch.

        Args:
            task: from `autoshard.placement.prepare_task`, prepared with `cost_model`.
            cost_model: the model.
            ranks: a rank for each of the task's slices. That they fit is not checked.

        Raises:
            InputError: not one rank per slice, or a rank that does not exist.
        """
        self.task, self.cost_model = task, cost_model
        self.rank_S: IntArray = check_ranks(task, [list(ranks)])[0]
        self.world_size = task.world_size
        width = task.encoding_SD.shape[1]
        # Row S of each array is the nothing that a plain move brings back.
        self.encoding_SD = np.vstack([task.encoding_SD, np.zeros((1, width))])
        self.memory_S = np.append(task.memory_bytes_S, 0)
        self.ids_S = np.append(task.ids_bytes_S, 0.0)
        self.output_S = np.append(task.output_bytes_S, 0.0)
        self.count_S = np.append(np.ones(task.num_slices, dtype=np.int64), 0)
        self.encoding_RD = np.zeros((self.world_size, width))
        self.num_R = np.zeros(self.world_size, dtype=np.int64)
        self.free_R = np.zeros(self.world_size, dtype=np.int64)
        self.ids_R = np.zeros(self.world_size)
        self.output_R = np.zeros(self.world_size)
        self.held_TR: IntArray | None = None
        if task.has_siblings:
            self.held_TR = np.zeros((int(task.table_S.max()) + 1, self.world_size), dtype=np.int64)
            np.add.at(self.held_TR, (task.table_S, self.rank_S), 1)
        self._resum(range(self.world_size))
        self.compute_RP = cost_model.compute_ms(self.encoding_RD, self.num_R)
        self.objective_ms = self._objective_now()

    def _resum(self, ranks: Sequence[int] | range) -> None:
        """Sum up what `ranks` hold from scratch, so that rounding never piles up."""
        task = self.task
        for rank in ranks:
            held = np.flatnonzero(self.rank_S == rank)
            self.encoding_RD[rank] = task.base_encoding_D + task.encoding_SD[held].sum(axis=0)
            self.num_R[rank] = len(task.replicas) + len(held)
            self.free_R[rank] = task.capacity_bytes_R[rank] - task.memory_bytes_S[held].sum()
            self.ids_R[rank] = task.replica_ids_bytes + task.ids_bytes_S[held].sum()
            self.output_R[rank] = task.output_bytes_S[held].sum()

    def _objective_now(self) -> float:
        fwd_comms, bwd_comms = comms_ms(
            self.cost_model,
            np.array([self.world_size]),
            PeerBytes.of(self.ids_R[None]),
            PeerBytes.of(self.output_R[None]),
            np.array([self.task.replica_bytes]),
        )
        return float(self.compute_RP.max(axis=0).sum() + fwd_comms[0] + bwd_comms[0])

    def legal_K(self, changes: Changes) -> BoolArray:
        """Which changes keep both ranks within memory and siblings apart."""
        out_bytes, in_bytes = self.memory_S[changes.out_K], self.memory_S[changes.in_K]
        legal = (self.free_R[changes.target_K] + in_bytes >= out_bytes) & (
            self.free_R[changes.source_K] + out_bytes >= in_bytes
        )
        if self.held_TR is not None:
            table_S = np.append(self.task.table_S, -1)
            out_table, in_table = table_S[changes.out_K], table_S[changes.in_K]
            same = out_table == in_table
            legal &= same | (self.held_TR[out_table, changes.target_K] == 0)
            comes_back = changes.in_K >= 0
            legal &= ~comes_back | same | (self.held_TR[in_table, changes.source_K] == 0)
        return legal

    def objective_K(self, changes: Changes) -> FloatArray:
        """The objective after each change by itself, ms."""
        source_K, target_K = changes.source_K, changes.target_K
        num = len(changes)
        delta_KD = self.encoding_SD[changes.in_K] - self.encoding_SD[changes.out_K]
        delta_num_K = self.count_S[changes.in_K] - self.count_S[changes.out_K]
        compute = self.cost_model.compute_ms(
            np.concatenate(
                [self.encoding_RD[source_K] + delta_KD, self.encoding_RD[target_K] - delta_KD]
            ),
            np.concatenate(
                [self.num_R[source_K] + delta_num_K, self.num_R[target_K] - delta_num_K]
            ),
        )
        compute_KP = np.maximum(compute[:num], compute[num:])
        total_K = np.zeros(num)
        for phase in range(2):
            others_K = largest_except(self.compute_RP[:, phase], source_K, target_K, 0.0)
            total_K += np.maximum(compute_KP[:, phase], others_K)
        fwd_comms, bwd_comms = comms_ms(
            self.cost_model,
            np.full(num, self.world_size),
            self._peer_bytes_K(self.ids_R, self.ids_S, changes),
            self._peer_bytes_K(self.output_R, self.output_S, changes),
            np.full(num, self.task.replica_bytes),
        )
        return total_K + fwd_comms + bwd_comms

    @staticmethod
    def _peer_bytes_K(bytes_R: FloatArray, bytes_S: FloatArray, changes: Changes) -> PeerBytes:
        source_K, target_K = changes.source_K, changes.target_K
        delta_K = bytes_S[changes.in_K] - bytes_S[changes.out_K]
        low, high = bytes_R[source_K] + delta_K, bytes_R[target_K] - delta_K
        largest = largest_except(bytes_R, source_K, target_K, -np.inf)
        smallest = -largest_except(-bytes_R, source_K, target_K, -np.inf)
        return PeerBytes(
            total_N=np.full(len(changes), bytes_R.sum()),
            largest_N=np.maximum(np.maximum(low, high), largest),
            smallest_N=np.minimum(np.minimum(low, high), smallest),
        )

    def legal_R(self, slice_index: int) -> BoolArray:
        """Where a slice may go, bool [R]: memory suffices and no part of its table is there.

        Where it lies counts as legal.

        Raises:
            InputError: there is no such slice.
        """
        self._check_slice(slice_index)
        source = int(self.rank_S[slice_index])
        every = np.arange(self.world_size)
        legal_R = self.legal_K(
            Changes(
                source_K=np.full_like(every, source),
                target_K=every,
                out_K=np.full_like(every, slice_index),
                in_K=np.full_like(every, -1),
            )
        )
        legal_R[source] = True
        return legal_R

    def move(self, slice_index: int, rank: int) -> float:
        """Move a slice to another rank; the model costs the two ranks concerned anew.

        Whether it fits there is not checked; `legal_R` says.

        Args:
            slice_index: in [0, S), as in `task.slices`.
            rank: in [0, R). Where the slice lies already, nothing happens.

        Returns:
            The objective after the move, ms.

        Raises:
            InputError: there is no such slice or rank.
        """
        self._check_slice(slice_index)
        check_ranks(self.task, np.full((1, self.task.num_slices), rank))
        source, target = int(self.rank_S[slice_index]), int(rank)
        if source != target:
            self._relocate(int(slice_index), source, target)
            self._recost(source, target)
        return self.objective_ms

    def apply(self, changes: Changes, index: int) -> None:
        """Make one of the changes."""
        source, target = int(changes.source_K[index]), int(changes.target_K[index])
        self._relocate(int(changes.out_K[index]), source, target)
        if changes.in_K[index] >= 0:
            self._relocate(int(changes.in_K[index]), target, source)
        self._recost(source, target)

    def _check_slice(self, slice_index: int) -> None:
        is_whole = isinstance(slice_index, int | np.integer) and not isinstance(slice_index, bool)
        if not is_whole or not 0 <= slice_index < self.task.num_slices:
            raise InputError(
                "there is no such slice",
                got=quoted(slice_index),
                allowed=f"0..{self.task.num_slices - 1}",
            )

    def _relocate(self, slice_index: int, source: int, target: int) -> None:
        self.rank_S[slice_index] = target
        if self.held_TR is not None:
            table = self.task.table_S[slice_index]
            self.held_TR[table, source] -= 1
            self.held_TR[table, target] += 1

    def _recost(self, source: int, target: int) -> None:
        """Cost two ranks whose slices have changed, and the collectives."""
        changed = [source, target]
        self._resum(changed)
        self.compute_RP[changed] = self.cost_model.compute_ms(
            self.encoding_RD[changed], self.num_R[changed]
        )
        self.objective_ms = self._objective_now()

    def focus_ranks(self) -> list[int]:
        """The ranks that the objective waits for: slowest forward, backward, heaviest sender."""
        ranks = [
            int(np.argmax(self.compute_RP[:, 0])),
            int(np.argmax(self.compute_RP[:, 1])),
            int(np.argmax(self.output_R)),
            int(np.argmax(self.ids_R)),
        ]
        return list(dict.fromkeys(ranks))


def largest_except(
    values_R: FloatArray, first_K: IntArray, second_K: IntArray, alone: float
) -> FloatArray:
    """The largest value outside two ranks, for K pairs of ranks; `alone` if none is left."""
    order = np.argsort(-values_R, kind="stable")[:3]
    result = np.full(len(first_K), alone)
    for rank in order[::-1]:
        result = np.where((first_K != rank) & (second_K != rank), values_R[rank], result)
    return result


def placement_objective_ms(
    task: PlacementTask, cost_model: CostModel, ranks: Sequence[int]
) -> float:
    """The objective of a complete placement, from scratch."""
    return PlacementCosts(task, cost_model, ranks).objective_ms


def check_ranks(task: PlacementTask, ranks_NS: ArrayLike) -> IntArray:
    """The ranks as int64 [N, S].

    Raises:
        InputError: another shape, other numbers, or a rank that does not exist.
    """
    allowed = f"[N, {task.num_slices}], one rank for each slice of the task"
    try:
        ranks = np.asarray(ranks_NS)
    except ValueError as error:  # rows of different lengths
        raise InputError(
            "ranks are not a table of numbers", got=str(error), allowed=allowed
        ) from error
    if ranks.shape == (0,):  # no placement, given as an empty list
        ranks = np.zeros((0, task.num_slices), dtype=np.int64)
    if ranks.ndim != 2 or ranks.shape[1] != task.num_slices:
        what, got = "ranks do not have the shape of placements", str(list(ranks.shape))
        raise InputError(what, got=got, allowed=allowed)
    if ranks.size and not np.issubdtype(ranks.dtype, np.integer):
        raise InputError(
            "ranks are not whole numbers", got=str(ranks.dtype), allowed="an integer type"
        )
    outside = (ranks < 0) | (ranks >= task.world_size)
    if outside.any():
        raise InputError(
            "a placement names a rank that does not exist",
            got=quoted(int(ranks[outside][0])),
            allowed=f"0..{task.world_size - 1}",
        )
    return ranks.astype(np.int64)
