"""Placing slices on ranks one at a time: tasks, the state of many at once, masks and costs.

The environment, the learned policy and the greedy sharders all step through
`PlacementState`; nobody else keeps track of what is where or what is legal.

Shapes: N=tasks side by side, S=slices, R=ranks, D=encoding width, P=phases (forward, backward).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from autoshard.features import shard_features
from autoshard.objective import step_ms
from autoshard.problem import ShardingProblem
from autoshard.protocols import Assignment, CostModel
from autoshard.shards import ShardingType, ShardSlice, shard_load
from autoshard.splitting import default_slices, free_capacity_bytes
from autoshard.traffic import PeerBytes, comms_ms

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, eq=False)
class TaskSums:
    """Totals of a task, worked out once."""

    remaining_ms_SP: FloatArray
    """Predicted cost of slices s, s + 1, … each alone, [S + 1, 2]; the last row is 0."""
    remaining_bytes_S: FloatArray
    """Memory of slices s, s + 1, …, [S + 1]."""
    ids_bytes: float
    output_bytes: float


@dataclass(frozen=True, kw_only=True, eq=False)
class PlacementTask:
    """A problem cut into slices, encoded, and put in placement order (costliest first).

    Replicas (`data_parallel`) lie on every rank whatever is decided; they count in
    `base_*` and in the capacities.
    """

    problem: ShardingProblem
    slices: tuple[ShardSlice, ...]
    """[S], in placement order."""
    replicas: tuple[ShardSlice, ...]
    features_SF: FloatArray
    encoding_SD: FloatArray
    alone_ms_SP: FloatArray
    """Predicted cost of each slice alone on a rank."""
    memory_bytes_S: IntArray
    ids_bytes_S: FloatArray
    """What each other rank sends the slice's rank."""
    output_bytes_S: FloatArray
    """What the slice's rank sends each other rank."""
    table_S: IntArray
    """Index of each slice's table; slices of one table go to different ranks."""
    capacity_bytes_R: IntArray
    base_encoding_D: FloatArray
    base_alone_ms_P: FloatArray
    replica_ids_bytes: float
    """What every rank sends each other rank of its replicas' ids."""
    replica_bytes: float
    """What every rank sends each other rank of its replicas' gradients."""

    @property
    def num_slices(self) -> int:
        """How many slices there are to place."""
        return len(self.slices)

    @property
    def world_size(self) -> int:
        """How many ranks there are."""
        return self.problem.topology.world_size

    def assignment(
        self, ranks: Sequence[int], *, num_evaluations: int = 0, cut_short: bool = False
    ) -> Assignment:
        """What a sharder returns: a rank for each slice, and every rank for each replica."""
        everywhere = range(self.world_size)
        return Assignment(
            slices=self.slices + tuple(replica for replica in self.replicas for _ in everywhere),
            ranks=tuple(ranks) + tuple(rank for _ in self.replicas for rank in everywhere),
            num_evaluations=num_evaluations,
            cut_short=cut_short,
        )

    @cached_property
    def sums(self) -> TaskSums:
        """Totals over the slices."""
        tail_ms_SP = np.zeros((self.num_slices + 1, 2))
        tail_ms_SP[:-1] = np.cumsum(self.alone_ms_SP[::-1], axis=0)[::-1]
        tail_bytes_S = np.zeros(self.num_slices + 1)
        tail_bytes_S[:-1] = np.cumsum(self.memory_bytes_S[::-1].astype(np.float64))[::-1]
        return TaskSums(
            remaining_ms_SP=tail_ms_SP,
            remaining_bytes_S=tail_bytes_S,
            ids_bytes=float(self.ids_bytes_S.sum()),
            output_bytes=float(self.output_bytes_S.sum()),
        )

    @cached_property
    def has_siblings(self) -> bool:
        """Whether some table was split."""
        return len(np.unique(self.table_S)) < self.num_slices


def prepare_task(
    problem: ShardingProblem,
    cost_model: CostModel,
    slices: Sequence[ShardSlice] | None = None,
) -> PlacementTask:
    """Cut, encode and order a problem.

    Args:
        problem: the tables, training and topology.
        cost_model: encodes the slices and gives the order.
        slices: how the tables are cut; by `autoshard.splitting.default_slices` if None.

    Raises:
        InfeasibleError: a table fits in no way.
    """
    given = tuple(default_slices(problem) if slices is None else slices)
    replicas = tuple(s for s in given if s.sharding_type is ShardingType.DATA_PARALLEL)
    placed = tuple(s for s in given if s.sharding_type is not ShardingType.DATA_PARALLEL)
    training, world_size = problem.training, problem.topology.world_size
    features_SF = shard_features(placed, training, world_size)
    encoding_SD = cost_model.encode(features_SF)
    alone_SP = cost_model.compute_ms(encoding_SD, np.ones(len(placed), dtype=np.int64))
    # A stable sort: equal costs keep the problem's order, so runs repeat exactly.
    order = np.argsort(-alone_SP.sum(axis=1), kind="stable")
    loads = [shard_load(placed[index], training, world_size) for index in order]
    replica_loads = [shard_load(replica, training, world_size) for replica in replicas]
    replica_encoding = cost_model.encode(shard_features(replicas, training, world_size))
    capacity = np.array(free_capacity_bytes(problem), dtype=np.int64)
    capacity -= sum(load.memory_bytes for load in replica_loads)
    index_of = {table.name: index for index, table in enumerate(problem.tables)}
    base_D = replica_encoding.sum(axis=0)
    return PlacementTask(
        problem=problem,
        slices=tuple(placed[index] for index in order),
        replicas=replicas,
        features_SF=features_SF[order],
        encoding_SD=encoding_SD[order],
        alone_ms_SP=alone_SP[order],
        memory_bytes_S=np.array([load.memory_bytes for load in loads], dtype=np.int64),
        ids_bytes_S=np.array([load.send_ids_bytes_per_peer for load in loads], dtype=np.float64),
        output_bytes_S=np.array(
            [load.send_output_bytes_per_peer for load in loads], dtype=np.float64
        ),
        table_S=np.array([index_of[placed[i].table.name] for i in order], dtype=np.int64),
        capacity_bytes_R=capacity,
        base_encoding_D=base_D,
        base_alone_ms_P=cost_model.compute_ms(
            base_D[None], np.array([len(replicas)], dtype=np.int64)
        )[0],
        replica_ids_bytes=float(sum(load.send_ids_bytes_per_peer for load in replica_loads)),
        replica_bytes=float(sum(load.send_replica_bytes_per_peer for load in replica_loads)),
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class Candidates:
    """What placing the current slice on each rank would cost; inf on ranks that do not exist."""

    objective_ms_NR: FloatArray
    compute_ms_NRP: FloatArray
    """The cost of the rank itself, with the slice on it."""
    fwd_comms_ms_NR: FloatArray
    bwd_comms_ms_NR: FloatArray


class PlacementState:
    """N placement tasks in lockstep, each with its own tables, ranks and position.

    Ranks beyond a task's world size are padding: never legal, never counted.
    """

    def __init__(
        self, tasks: Sequence[PlacementTask], cost_model: CostModel, max_ranks: int | None = None
    ) -> None:
        """Start all tasks from empty ranks.

        Args:
            tasks: one or more tasks, prepared with `cost_model`.
            cost_model: costs every step.
            max_ranks: R; the largest world size among the tasks by default.
        """
        num = len(tasks)
        self.cost_model = cost_model
        self.max_ranks = max_ranks or max(task.world_size for task in tasks)
        width = tasks[0].encoding_SD.shape[1]
        self.tasks: list[PlacementTask] = list(tasks)
        self.world_size_N: IntArray = np.zeros(num, dtype=np.int64)
        self.position_N: IntArray = np.zeros(num, dtype=np.int64)
        self.exists_NR: BoolArray = np.zeros((num, self.max_ranks), dtype=bool)
        self.free_bytes_NR: IntArray = np.zeros((num, self.max_ranks), dtype=np.int64)
        self.num_slices_NR: IntArray = np.zeros((num, self.max_ranks), dtype=np.int64)
        self.encoding_NRD: FloatArray = np.zeros((num, self.max_ranks, width))
        self.ids_bytes_NR: FloatArray = np.zeros((num, self.max_ranks))
        self.output_bytes_NR: FloatArray = np.zeros((num, self.max_ranks))
        self.compute_ms_NRP: FloatArray = np.zeros((num, self.max_ranks, 2))
        self.replica_ids_bytes_N: FloatArray = np.zeros(num)
        self.replica_bytes_N: FloatArray = np.zeros(num)
        self.ranks: list[list[int]] = [[] for _ in range(num)]
        for index, task in enumerate(tasks):
            self.reset(index, task)

    def __len__(self) -> int:
        return len(self.tasks)

    def reset(self, index: int, task: PlacementTask) -> None:
        """Put `task`, from empty ranks, in place of the `index`-th task."""
        ranks = task.world_size
        self.tasks[index] = task
        self.world_size_N[index] = ranks
        self.position_N[index] = 0
        self.exists_NR[index] = np.arange(self.max_ranks) < ranks
        self.free_bytes_NR[index] = 0
        self.free_bytes_NR[index, :ranks] = task.capacity_bytes_R
        self.num_slices_NR[index] = len(task.replicas)
        self.encoding_NRD[index] = task.base_encoding_D
        self.ids_bytes_NR[index] = 0.0
        self.output_bytes_NR[index] = 0.0
        self.compute_ms_NRP[index] = np.where(
            self.exists_NR[index][:, None], task.base_alone_ms_P, 0.0
        )
        self.replica_ids_bytes_N[index] = task.replica_ids_bytes
        self.replica_bytes_N[index] = task.replica_bytes
        self.ranks[index] = []

    @property
    def done_N(self) -> BoolArray:
        """Whether each task has no slice left to place, bool [N]."""
        lengths = np.array([task.num_slices for task in self.tasks])
        return self.position_N >= lengths

    def _current(self, name: str) -> NDArray:
        """The current slice's entry of a per-slice array of each task; 0 where none is left."""
        rows = []
        for task, position in zip(self.tasks, self.position_N, strict=True):
            values = getattr(task, name)
            rows.append(
                values[position]
                if position < len(values)
                else np.zeros(values.shape[1:], dtype=values.dtype)
            )
        return np.stack(rows)

    def legal_NR(self) -> BoolArray:
        """Where each task's current slice may go: memory suffices and no sibling is there.

        All False for a task that is done, and for one that has run into a dead end.
        """
        need_N = self._current("memory_bytes_S")
        legal = self.exists_NR & (self.free_bytes_NR >= need_N[:, None]) & ~self.done_N[:, None]
        for index, task in enumerate(self.tasks):
            position = self.position_N[index]
            if task.has_siblings and position < task.num_slices:
                table = task.table_S[position]
                for earlier in np.flatnonzero(task.table_S[:position] == table):
                    legal[index, self.ranks[index][earlier]] = False
        return legal

    def objective_ms_N(self) -> FloatArray:
        """The objective of what has been placed so far, float64 [N]."""
        fwd_comms, bwd_comms = comms_ms(
            self.cost_model,
            self.world_size_N,
            self._peer_bytes(self.ids_bytes_NR).plus(self.replica_ids_bytes_N, self.world_size_N),
            self._peer_bytes(self.output_bytes_NR),
            self.replica_bytes_N,
        )
        return step_ms(
            self.compute_ms_NRP[:, :, 0], self.compute_ms_NRP[:, :, 1], fwd_comms, bwd_comms
        )

    def _peer_bytes(self, bytes_NR: FloatArray) -> PeerBytes:
        smallest = np.where(self.exists_NR, bytes_NR, np.inf).min(axis=1)
        return PeerBytes(
            total_N=bytes_NR.sum(axis=1), largest_N=bytes_NR.max(axis=1), smallest_N=smallest
        )

    def candidates(self) -> Candidates:
        """Cost every way to place each task's current slice (of a done task: nothing)."""
        num, ranks = self.exists_NR.shape
        encoding_NRD = self.encoding_NRD + self._current("encoding_SD")[:, None, :]
        compute_NRP = self.cost_model.compute_ms(
            encoding_NRD.reshape(num * ranks, -1), (self.num_slices_NR + 1).reshape(-1)
        ).reshape(num, ranks, 2)
        # The slowest rank is the changed one or the slowest of the others.
        slowest_NRP = np.maximum(
            compute_NRP,
            np.stack(
                [largest_of_others(self.compute_ms_NRP[:, :, phase]) for phase in range(2)],
                axis=-1,
            ),
        )
        world_size = np.repeat(self.world_size_N, ranks)
        ids = self._candidate_peer_bytes(self.ids_bytes_NR, self._current("ids_bytes_S"))
        fwd_comms, bwd_comms = comms_ms(
            self.cost_model,
            world_size,
            ids.plus(np.repeat(self.replica_ids_bytes_N, ranks), world_size),
            self._candidate_peer_bytes(self.output_bytes_NR, self._current("output_bytes_S")),
            np.repeat(self.replica_bytes_N, ranks),
        )
        fwd_comms, bwd_comms = fwd_comms.reshape(num, ranks), bwd_comms.reshape(num, ranks)
        objective = slowest_NRP[:, :, 0] + fwd_comms + bwd_comms + slowest_NRP[:, :, 1]
        return Candidates(
            objective_ms_NR=np.where(self.exists_NR, objective, np.inf),
            compute_ms_NRP=compute_NRP,
            fwd_comms_ms_NR=fwd_comms,
            bwd_comms_ms_NR=bwd_comms,
        )

    def _candidate_peer_bytes(self, bytes_NR: FloatArray, added_N: FloatArray) -> PeerBytes:
        ranks = bytes_NR.shape[1]
        changed_NR = bytes_NR + added_N[:, None]
        largest = np.maximum(changed_NR, largest_of_others(bytes_NR))
        others_smallest = -largest_of_others(np.where(self.exists_NR, -bytes_NR, -np.inf), -np.inf)
        smallest = np.minimum(changed_NR, others_smallest)
        total = np.repeat(bytes_NR.sum(axis=1) + added_N, ranks)
        return PeerBytes(
            total_N=total, largest_N=largest.reshape(-1), smallest_N=smallest.reshape(-1)
        )

    def place(self, rank_N: IntArray, active_N: BoolArray, candidates: Candidates) -> None:
        """Place the current slice of each active task on the given rank.

        Args:
            rank_N: the rank for each task; read only where active.
            active_N: which tasks move. Their choice must be legal.
            candidates: what `candidates()` returned for this very state.
        """
        for index in np.flatnonzero(active_N):
            task, position, rank = self.tasks[index], self.position_N[index], int(rank_N[index])
            self.encoding_NRD[index, rank] += task.encoding_SD[position]
            self.num_slices_NR[index, rank] += 1
            self.free_bytes_NR[index, rank] -= task.memory_bytes_S[position]
            self.ids_bytes_NR[index, rank] += task.ids_bytes_S[position]
            self.output_bytes_NR[index, rank] += task.output_bytes_S[position]
            self.compute_ms_NRP[index, rank] = candidates.compute_ms_NRP[index, rank]
            self.ranks[index].append(rank)
            self.position_N[index] += 1


def largest_of_others(values_NR: FloatArray, alone: float = 0.0) -> FloatArray:
    """For each rank the largest value among the other ranks; `alone` if there is no other."""
    num, ranks = values_NR.shape
    if ranks == 1:
        return np.full((num, 1), alone)
    top = np.argmax(values_NR, axis=1)
    rows = np.arange(num)
    first = values_NR[rows, top]
    rest = values_NR.copy()
    rest[rows, top] = -np.inf
    result = np.repeat(first[:, None], ranks, axis=1)
    result[rows, top] = rest.max(axis=1)
    return result
