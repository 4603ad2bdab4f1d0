"""Packing by memory, where a perfect packing is known because the tables were cut from it."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.errors import InfeasibleError
from autoshard.placement import PlacementTask, prepare_task
from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.protocols import SearchBudget
from autoshard.sharders.cost_greedy import place_by_cost
from autoshard.sharders.packing import pack_by_memory
from autoshard.sharders.registry import make_sharder
from autoshard.shards import ShardingType, ShardSlice, fixed_rank_bytes
from autoshard.tables import Table
from autoshard.topology import Topology

MODEL = AnalyticCostModel()
ROW_BYTES = 16  # four fp32 columns under SGD


def tight_problem(ranks: int, per_rank: int, seed: int, slack: float) -> ShardingProblem:
    """Each rank's rows are cut into `per_rank` random tables; `slack` is what stays free."""
    generator = np.random.default_rng(seed)
    rows_per_rank = 200_000
    sizes = []
    for _ in range(ranks):
        shares = generator.dirichlet(np.full(per_rank, 1.5))
        cuts = np.maximum((shares * rows_per_rank).astype(int), 1)
        sizes.extend(cuts.tolist())
    generator.shuffle(sizes)
    tables = tuple(
        Table(
            name=f"t{i}",
            num_embeddings=rows,
            embedding_dim=4,
            pooling_factor=float(generator.uniform(0, 30)),
        )
        for i, rows in enumerate(sizes)
    )
    training = TrainingConfig(batch_size=1, optimizer=Optimizer.SGD)
    roomless = ShardingProblem(
        tables=tables, topology=Topology.uniform(ranks, 0), training=training
    )
    # Beyond weights every table needs a few bytes of ids and outputs: counted generously.
    small = per_rank * ranks * (30 * 24 + 200)
    room = int(rows_per_rank * ROW_BYTES * (1 + slack)) + small
    return ShardingProblem(
        tables=tables,
        topology=Topology.uniform(ranks, room + sum(fixed_rank_bytes(roomless).values())),
        training=training,
    )


def check(task: PlacementTask, ranks: tuple[int, ...]) -> None:
    used = np.bincount(ranks, weights=task.memory_bytes_S, minlength=task.world_size)
    assert (used <= task.capacity_bytes_R).all()


@pytest.mark.parametrize("seed", range(6))
def test_a_known_packing_with_two_percent_to_spare_is_found(seed: int) -> None:
    problem = tight_problem(ranks=4, per_rank=8, seed=seed, slack=0.02)
    task = prepare_task(problem, MODEL)
    total, room = task.memory_bytes_S.sum(), task.capacity_bytes_R.sum()
    assert total > 0.95 * room
    ranks = pack_by_memory(task, seed=0)
    assert ranks is not None
    check(task, ranks)
    assert pack_by_memory(task, seed=0) == ranks


def test_the_sharder_finds_room_where_the_greedy_does_not() -> None:
    greedy_failed = 0
    for seed in range(6):
        problem = tight_problem(ranks=4, per_rank=8, seed=seed, slack=0.02)
        task = prepare_task(problem, MODEL)
        try:
            place_by_cost(task, MODEL)
        except InfeasibleError:
            greedy_failed += 1
        found = make_sharder("autoshard", policy=None).assign(
            problem, MODEL, seed=0, budget=SearchBudget(num_evaluations=200)
        )
        check(task, found.ranks)
    assert greedy_failed > 0


def test_what_cannot_be_packed_is_none() -> None:
    problem = tight_problem(ranks=2, per_rank=3, seed=0, slack=0.0)
    whole = prepare_task(problem, MODEL)
    less = int(whole.capacity_bytes_R.sum() - whole.memory_bytes_S.sum()) // 2 + 1
    hbm = tuple(b - less for b in problem.topology.hbm_bytes)
    smaller = ShardingProblem(
        tables=problem.tables,
        topology=Topology(world_size=2, hbm_bytes=hbm),
        training=problem.training,
    )
    slices = [ShardSlice.whole(t) for t in problem.tables]
    assert pack_by_memory(prepare_task(smaller, MODEL, slices), seed=0) is None


def test_parts_of_a_table_go_to_different_ranks() -> None:
    table = Table(name="t", num_embeddings=100, embedding_dim=8, pooling_factor=1.0)
    halves = [ShardSlice(table, ShardingType.COLUMN_WISE, 0, c, 100, 4) for c in (0, 4)]
    problem = ShardingProblem(
        tables=(table,),
        topology=Topology.uniform(2, 10**6),
        training=TrainingConfig(batch_size=1),
    )
    ranks = pack_by_memory(prepare_task(problem, MODEL, halves), seed=0)
    assert ranks is not None
    assert sorted(ranks) == [0, 1]
