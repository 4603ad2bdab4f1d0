"""Local search on the cost model: moves and swaps off the slowest ranks, kicks when stuck.

A move or swap changes two ranks, so re-costing it takes two rows of the cost model and the
largest and smallest of the other ranks. Memory and "parts of one table on different ranks"
hold at every step.

Shapes: S=slices, R=ranks, D=encoding width, K=candidate changes, P=phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.placement import PlacementTask
from autoshard.protocols import CostModel
from autoshard.sharders.meter import Meter
from autoshard.traffic import PeerBytes, comms_ms

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

#: Candidates costed in one call of the cost model.
CHUNK = 2048
#: A change must gain this share of the objective to count, so that rounding never does.
MIN_GAIN = 1e-9
#: Slices moved at random when no single change helps.
KICK_SIZES = (2, 3, 4)
#: After so many kicks in a row without a better placement the search ends: small problems
#: are exhausted long before their budget. A search of many slices spends the budget first.
MAX_FRUITLESS_KICKS = 200


@dataclass(frozen=True, kw_only=True, eq=False)
class _Changes:
    """K changes: slice `out_K` leaves rank `source_K` for `target_K`; `in_K` comes back, or −1."""

    source_K: IntArray
    target_K: IntArray
    out_K: IntArray
    in_K: IntArray

    def __len__(self) -> int:
        return len(self.out_K)

    def take(self, index: IntArray | slice) -> _Changes:
        return _Changes(
            source_K=self.source_K[index],
            target_K=self.target_K[index],
            out_K=self.out_K[index],
            in_K=self.in_K[index],
        )


class _Placement:
    """A complete placement and what re-costing a change of it needs."""

    def __init__(self, task: PlacementTask, cost_model: CostModel, ranks: Sequence[int]) -> None:
        self.task, self.cost_model = task, cost_model
        self.rank_S: IntArray = np.array(ranks, dtype=np.int64)
        self.world_size = task.world_size
        # Row S of each array is the nothing that a plain move brings back.
        self.encoding_SD = np.vstack([task.encoding_SD, np.zeros_like(task.encoding_SD[:1])])
        self.memory_S = np.append(task.memory_bytes_S, 0)
        self.ids_S = np.append(task.ids_bytes_S, 0.0)
        self.output_S = np.append(task.output_bytes_S, 0.0)
        self.count_S = np.append(np.ones(task.num_slices, dtype=np.int64), 0)
        width = task.encoding_SD.shape[1]
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

    def legal_K(self, changes: _Changes) -> BoolArray:
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

    def objective_K(self, changes: _Changes) -> FloatArray:
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
    def _peer_bytes_K(bytes_R: FloatArray, bytes_S: FloatArray, changes: _Changes) -> PeerBytes:
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

    def apply(self, changes: _Changes, index: int) -> None:
        """Make one of the changes."""
        source, target = int(changes.source_K[index]), int(changes.target_K[index])
        for slice_index, old, new in (
            (int(changes.out_K[index]), source, target),
            (int(changes.in_K[index]), target, source),
        ):
            if slice_index < 0:
                continue
            self.rank_S[slice_index] = new
            if self.held_TR is not None:
                table = self.task.table_S[slice_index]
                self.held_TR[table, old] -= 1
                self.held_TR[table, new] += 1
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


def _moves(placement: _Placement, source: int) -> _Changes:
    """Every slice on `source`, to every other rank."""
    held = np.flatnonzero(placement.rank_S == source)
    others = np.flatnonzero(np.arange(placement.world_size) != source)
    out_K = np.repeat(held, len(others))
    return _Changes(
        source_K=np.full(len(out_K), source),
        target_K=np.tile(others, len(held)),
        out_K=out_K,
        in_K=np.full(len(out_K), -1),
    )


def _swaps(placement: _Placement, source: int, generator: np.random.Generator) -> _Changes:
    """Slices on `source` against slices elsewhere; a random sample where there are many."""
    held = np.flatnonzero(placement.rank_S == source)
    elsewhere = np.flatnonzero(placement.rank_S != source)
    num = len(held) * len(elsewhere)
    picked = np.arange(num) if num <= 4 * CHUNK else generator.integers(0, num, size=4 * CHUNK)
    out_K = held[picked // max(len(elsewhere), 1)] if num else np.zeros(0, dtype=np.int64)
    in_K = elsewhere[picked % max(len(elsewhere), 1)] if num else np.zeros(0, dtype=np.int64)
    return _Changes(
        source_K=np.full(len(out_K), source),
        target_K=placement.rank_S[in_K],
        out_K=out_K,
        in_K=in_K,
    )


def _improve(
    placement: _Placement, changes: _Changes, meter: Meter, generator: np.random.Generator
) -> bool:
    """Apply the best change of the first chunk, in random order, that holds a better one."""
    changes = changes.take(np.flatnonzero(placement.legal_K(changes)))
    order = generator.permutation(len(changes))
    for start in range(0, len(changes), CHUNK):
        if not meter.may_go_on():
            return False
        chunk = changes.take(order[start : start + min(CHUNK, meter.remaining)])
        objective_K = placement.objective_K(chunk)
        meter.spend(len(chunk))
        best = int(np.argmin(objective_K))
        if objective_K[best] < placement.objective_ms * (1 - MIN_GAIN):
            placement.apply(chunk, best)
            return True
    return False


def _kick(placement: _Placement, generator: np.random.Generator) -> None:
    """Move a few random slices off the focus ranks, or any, to random legal ranks."""
    for _ in range(int(generator.choice(KICK_SIZES))):
        sources = placement.focus_ranks()
        source = int(generator.choice(sources))
        moves = _moves(placement, source)
        legal = np.flatnonzero(placement.legal_K(moves))
        if len(legal):
            placement.apply(moves, int(generator.choice(legal)))


def local_search(
    task: PlacementTask,
    cost_model: CostModel,
    start: Sequence[int],
    *,
    meter: Meter,
    seed: int,
    target_ms: float | None = None,
) -> tuple[tuple[int, ...], float]:
    """Improve a placement until the budget ends, or `MAX_FRUITLESS_KICKS` in a row gain nothing.

    Args:
        task: the task.
        cost_model: the objective's model.
        start: a rank for each slice, within memory.
        meter: evaluations and time.
        seed: decides the order of candidates and the kicks.
        target_ms: stop at this objective, such as a lower bound.

    Returns:
        The best placement found and its objective, never worse than `start`.
    """
    placement = _Placement(task, cost_model, start)
    best, best_ms = tuple(int(r) for r in placement.rank_S), placement.objective_ms
    if task.world_size == 1:
        return best, best_ms
    generator = np.random.default_rng(seed)
    goal_ms = -np.inf if target_ms is None else target_ms * (1 + MIN_GAIN)
    num_fruitless = 0
    while best_ms > goal_ms and num_fruitless <= MAX_FRUITLESS_KICKS and meter.may_go_on():
        improved = False
        for source in placement.focus_ranks():
            if _improve(placement, _moves(placement, source), meter, generator) or _improve(
                placement, _swaps(placement, source, generator), meter, generator
            ):
                improved = True
                break
        if placement.objective_ms < best_ms * (1 - MIN_GAIN):
            best, best_ms = tuple(int(r) for r in placement.rank_S), placement.objective_ms
            num_fruitless = 0
        if not improved and meter.may_go_on():
            num_fruitless += 1
            placement = _Placement(task, cost_model, best)
            _kick(placement, generator)
            meter.spend(1)  # a stuck search with no legal change still ends
    return best, best_ms


def placement_objective_ms(
    task: PlacementTask, cost_model: CostModel, ranks: Sequence[int]
) -> float:
    """The objective of a complete placement, from scratch."""
    return _Placement(task, cost_model, ranks).objective_ms
