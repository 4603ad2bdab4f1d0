"""The lockstep state against costing from scratch, at every step, for every candidate."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.costing import predict_step
from autoshard.memory import memory_ledger
from autoshard.placement import PlacementState, PlacementTask, largest_of_others, prepare_task
from autoshard.problem import ShardingProblem, TrainingConfig
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import Table
from autoshard.topology import GIB, Topology


@dataclass(frozen=True, kw_only=True)
class CurvedCostModel(AnalyticCostModel):
    """Not additive: a set's cost depends on how many shards it has."""

    def compute_ms(self, encoding_sum_ND: np.ndarray, num_shards_N: np.ndarray) -> np.ndarray:
        plain = super().compute_ms(encoding_sum_ND, num_shards_N)
        return plain * (1 + 0.3 / (1 + np.asarray(num_shards_N)[:, None])) + np.sqrt(plain)


MODEL = CurvedCostModel(latency_ms=0.03, bytes_per_ms=3e4)


def make_tables(num: int, seed: int) -> list[Table]:
    generator = np.random.default_rng(seed)
    return [
        Table(
            name=f"t{index}",
            num_embeddings=int(10 ** generator.uniform(1, 4)),
            embedding_dim=int(generator.choice([4, 10, 32])),
            pooling_factor=float(generator.choice([0.0, 0.5, 3.0, 20.0])),
            weighted=bool(generator.random() < 0.3),
        )
        for index in range(num)
    ]


def problem_of(tables: Sequence[Table], hbm: Sequence[int]) -> ShardingProblem:
    return ShardingProblem(
        tables=tuple(tables),
        topology=Topology(world_size=len(hbm), hbm_bytes=tuple(hbm)),
        training=TrainingConfig(batch_size=16),
    )


def mixed_task(num: int, ranks: int, seed: int) -> PlacementTask:
    """Whole tables, one in column halves, one in row thirds (ranks permitting), one replica."""
    tables = make_tables(num, seed)
    slices: list[ShardSlice] = [ShardSlice.whole(t) for t in tables[3:]]
    first, second, third = tables[:3]
    slices.append(ShardSlice.whole(first, ShardingType.DATA_PARALLEL))
    dim, rows = second.embedding_dim, third.num_embeddings
    if ranks >= 2 and dim > 4:
        slices.append(ShardSlice(second, ShardingType.COLUMN_WISE, 0, 0, second.num_embeddings, 4))
        slices.append(
            ShardSlice(second, ShardingType.COLUMN_WISE, 0, 4, second.num_embeddings, dim - 4)
        )
    else:
        slices.append(ShardSlice.whole(second))
    parts = min(ranks, 3)
    cuts = [rows * part // parts for part in range(parts + 1)]
    for low, high in itertools.pairwise(cuts):
        slices.append(
            ShardSlice(third, ShardingType.ROW_WISE, low, 0, high - low, third.embedding_dim)
        )
    return prepare_task(problem_of(tables, [GIB] * ranks), MODEL, slices)


def held_by(task: PlacementTask, ranks: Sequence[int]) -> list[list[ShardSlice]]:
    held: list[list[ShardSlice]] = [list(task.replicas) for _ in range(task.world_size)]
    for slice_, rank in zip(task.slices, ranks, strict=False):
        held[rank].append(slice_)
    return held


def legal_by_rule(task: PlacementTask, ranks: Sequence[int]) -> list[bool]:
    """What may be, by the ledger and the names alone."""
    if len(ranks) >= task.num_slices:
        return [False] * task.world_size
    nxt = task.slices[len(ranks)]
    legal = []
    for rank in range(task.world_size):
        held = held_by(task, ranks)
        sibling = any(s.table.name == nxt.table.name for s in held[rank])
        held[rank].append(nxt)
        legal.append(memory_ledger(task.problem, held)[rank].free_bytes >= 0 and not sibling)
    return legal


@pytest.mark.parametrize("max_ranks", [None, 7])
def test_every_candidate_at_every_step_costs_what_costing_from_scratch_says(
    max_ranks: int | None,
) -> None:
    shapes = [(9, 3), (5, 1), (7, 4), (3, 2), (11, 5)]
    tasks = [mixed_task(num, ranks, seed) for seed, (num, ranks) in enumerate(shapes)]
    state = PlacementState(tasks, MODEL, max_ranks)
    generator = np.random.default_rng(0)
    chosen: list[list[int]] = [[] for _ in tasks]
    while not state.done_N.all():
        legal = state.legal_NR()
        candidates = state.candidates()
        picks = np.zeros(len(tasks), dtype=np.int64)
        active = np.zeros(len(tasks), dtype=bool)
        for index, task in enumerate(tasks):
            done = len(chosen[index]) == task.num_slices
            assert legal[index, : task.world_size].tolist() == legal_by_rule(task, chosen[index])
            assert not legal[index, task.world_size :].any()
            now = predict_step(task.problem, held_by(task, chosen[index]), MODEL)
            assert state.objective_ms_N()[index] == pytest.approx(now.step_ms, rel=1e-12)
            if done:
                continue
            for rank in range(task.world_size):
                after = predict_step(task.problem, held_by(task, [*chosen[index], rank]), MODEL)
                assert candidates.objective_ms_NR[index, rank] == pytest.approx(
                    after.step_ms, rel=1e-12
                )
                assert candidates.fwd_comms_ms_NR[index, rank] == pytest.approx(after.fwd_comms_ms)
                assert candidates.bwd_comms_ms_NR[index, rank] == pytest.approx(after.bwd_comms_ms)
                np.testing.assert_allclose(
                    candidates.compute_ms_NRP[index, rank],
                    [after.fwd_compute_ms[rank], after.bwd_compute_ms[rank]],
                )
            assert np.isinf(candidates.objective_ms_NR[index, task.world_size :]).all()
            if generator.random() < 0.8:  # tasks fall out of step
                picks[index] = generator.choice(np.flatnonzero(legal[index]))
                active[index] = True
        state.place(picks, active, candidates)
        for index in np.flatnonzero(active):
            chosen[index].append(int(picks[index]))
    assert state.ranks == chosen


def test_a_reset_task_starts_from_empty_ranks() -> None:
    first, second = mixed_task(6, 3, 0), mixed_task(5, 2, 1)
    state = PlacementState([first, first], MODEL)
    state.place(np.array([1, 2]), np.array([True, True]), state.candidates())
    state.reset(0, second)
    fresh = PlacementState([second], MODEL, 3)
    np.testing.assert_array_equal(state.objective_ms_N()[0], fresh.objective_ms_N()[0])
    np.testing.assert_array_equal(state.legal_NR()[0], fresh.legal_NR()[0])
    np.testing.assert_array_equal(
        state.candidates().objective_ms_NR[0], fresh.candidates().objective_ms_NR[0]
    )
    assert state.ranks[0] == []
    assert state.ranks[1] == [2]


def test_memory_closes_ranks_to_the_byte() -> None:
    tables = make_tables(4, 0)
    roomy = prepare_task(problem_of(tables, [GIB, GIB]), MODEL)
    fixed = GIB - int(roomy.capacity_bytes_R[0])
    need = int(roomy.memory_bytes_S[0])
    slices = [ShardSlice.whole(table) for table in tables]
    task = prepare_task(problem_of(tables, [fixed + need, fixed + need - 1]), MODEL, slices)
    assert PlacementState([task], MODEL).legal_NR().tolist() == [[True, False]]


def test_costliest_slices_come_first_and_replicas_lie_everywhere() -> None:
    task = mixed_task(9, 3, 0)
    alone = task.alone_ms_SP.sum(axis=1)
    assert (np.diff(alone) <= 0).all()
    given = [2] * task.num_slices
    assignment = task.assignment(given)
    assert assignment.ranks[task.num_slices :] == (0, 1, 2)
    assert {s.sharding_type for s in assignment.slices[task.num_slices :]} == {
        ShardingType.DATA_PARALLEL
    }
    np.testing.assert_allclose(task.sums.remaining_ms_SP[2], task.alone_ms_SP[2:].sum(axis=0))
    assert task.sums.remaining_bytes_S[1] == task.memory_bytes_S[1:].sum()


def test_replicas_take_room_on_every_rank() -> None:
    tables = make_tables(2, 3)
    slices = [ShardSlice.whole(tables[0], ShardingType.DATA_PARALLEL), ShardSlice.whole(tables[1])]
    task = prepare_task(problem_of(tables, [GIB, 2 * GIB]), MODEL, slices)
    ledgers = memory_ledger(task.problem, [[slices[0]], [slices[0]]])
    assert task.capacity_bytes_R.tolist() == [ledger.free_bytes for ledger in ledgers]


@pytest.mark.parametrize("shape", [(3, 1), (1, 2), (4, 5)])
def test_largest_of_others_by_looking(shape: tuple[int, int]) -> None:
    values = np.random.default_rng(1).integers(-3, 3, size=shape).astype(float)
    expected = [
        [
            max([v for other, v in enumerate(row) if other != rank], default=-7.0)
            for rank in range(shape[1])
        ]
        for row in values.tolist()
    ]
    np.testing.assert_array_equal(largest_of_others(values, -7.0), expected)
