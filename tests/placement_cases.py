"""Small placement problems, shared by the tests of environment, agent and policies."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.costing import predict_step
from autoshard.objective import StepCost
from autoshard.placement import PlacementTask, prepare_task
from autoshard.problem import ShardingProblem, TrainingConfig
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import Table
from autoshard.topology import GIB, Topology

COST_MODEL = AnalyticCostModel()


def random_tables(num: int, seed: int = 0) -> tuple[Table, ...]:
    rng = np.random.default_rng(seed)
    return tuple(
        Table(
            name=f"t{index}",
            num_embeddings=int(10 ** rng.uniform(2, 5)),
            embedding_dim=int(rng.choice([8, 16, 32, 64])),
            pooling_factor=float(np.round(rng.uniform(1, 30), 1)),
        )
        for index in range(num)
    )


def make_problem(
    tables: Sequence[Table], world_size: int, hbm_bytes: int | Sequence[int] = GIB
) -> ShardingProblem:
    per_rank = (hbm_bytes,) * world_size if isinstance(hbm_bytes, int) else tuple(hbm_bytes)
    return ShardingProblem(
        tables=tuple(tables),
        topology=Topology(world_size=world_size, hbm_bytes=per_rank),
        training=TrainingConfig(batch_size=128),
    )


def make_task(
    num_tables: int = 6, world_size: int = 2, seed: int = 0, hbm_bytes: int | Sequence[int] = GIB
) -> PlacementTask:
    return prepare_task(
        make_problem(random_tables(num_tables, seed), world_size, hbm_bytes), COST_MODEL
    )


def replicated_task(num_replicas: int, num_placed: int, world_size: int = 2) -> PlacementTask:
    tables = random_tables(num_replicas + num_placed)
    slices = [
        ShardSlice.whole(
            table,
            ShardingType.DATA_PARALLEL if index < num_replicas else ShardingType.TABLE_WISE,
        )
        for index, table in enumerate(tables)
    ]
    return prepare_task(make_problem(tables, world_size), COST_MODEL, slices)


def dead_end_task() -> PlacementTask:
    """Three equal tables on two ranks that hold one each: the third finds no rank."""
    tables = [
        Table(name=f"t{i}", num_embeddings=1000, embedding_dim=16, pooling_factor=2.0)
        for i in range(3)
    ]
    roomy = prepare_task(make_problem(tables, 2), COST_MODEL)
    fixed = GIB - int(roomy.capacity_bytes_R[0])
    return prepare_task(
        make_problem(tables, 2, fixed + int(1.5 * roomy.memory_bytes_S[0])), COST_MODEL
    )


def predicted(task: PlacementTask, ranks: Sequence[int]) -> StepCost:
    """The cost of a placement by the code that costs finished plans."""
    held: list[list[ShardSlice]] = [list(task.replicas) for _ in range(task.world_size)]
    for slice_, rank in zip(task.slices, ranks, strict=True):
        held[rank].append(slice_)
    return predict_step(task.problem, held, COST_MODEL)


def best_possible_ms(task: PlacementTask) -> float:
    """The least objective over all placements, by enumeration."""
    return min(
        predicted(task, ranks).step_ms
        for ranks in itertools.product(range(task.world_size), repeat=task.num_slices)
    )
