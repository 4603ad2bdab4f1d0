"""Builds random models, plans and data for the runtime's tests, and their reference results."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from autoshard.plan import ShardingPlan, plan_from_slices
from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import DataType, PoolingType, Table
from autoshard.topology import GIB, Topology
from tests.distributed.runtime_cases import Case
from tests.reference_trainer import ReferenceBatch, ReferenceTable, ReferenceTrainer

CAPACITY = 4
LEARNING_RATE, EPS = 0.25, 0.125


def make_plan(
    tables: list[Table],
    kinds: list[str],
    world_size: int,
    optimizer: Optimizer = Optimizer.SGD,
    batch_size: int = CAPACITY,
) -> ShardingPlan:
    """`kinds`: "dp", or the rank of a table-wise table, as text."""
    problem = ShardingProblem(
        tables=tuple(tables),
        topology=Topology.uniform(world_size, GIB),
        training=TrainingConfig(
            batch_size=batch_size, optimizer=optimizer, learning_rate=LEARNING_RATE, eps=EPS
        ),
    )
    placed = []
    for table, kind in zip(tables, kinds, strict=True):
        if kind == "dp":
            replica = ShardSlice.whole(table, ShardingType.DATA_PARALLEL)
            placed += [(replica, rank) for rank in range(world_size)]
        else:
            placed.append((ShardSlice.whole(table), int(kind)))
    return plan_from_slices(problem, placed)


def random_tables(rng: random.Random, data_type: DataType = DataType.FP32) -> list[Table]:
    """Two to seven tables; some share a feature, some have several."""
    tables = []
    for index in range(rng.randint(2, 7)):
        features = [f"f{index}"]
        if rng.random() < 0.4:
            features.append(f"g{index}")
        if index and rng.random() < 0.3:
            features.append("f0")
        tables.append(
            Table(
                name=f"t{index}",
                num_embeddings=rng.randint(5, 12),
                embedding_dim=rng.choice([1, 3, 4, 5, 6, 8, 12]),
                pooling_factor=2.0,
                feature_names=tuple(features),
                data_type=data_type,
                pooling=rng.choice(list(PoolingType)),
                weighted=rng.random() < 0.4,
            )
        )
    return tables


def random_batch(
    rng: random.Random, tables: list[Table], size: int, *, whole_weights: bool = False
) -> ReferenceBatch:
    """Bags of 0 to 4 ids, of few distinct rows, so that duplicates abound."""
    limits: dict[str, int] = {}
    for table in tables:
        for feature in table.feature_names:
            limits[feature] = min(limits.get(feature, 1 << 30), table.num_embeddings)
    bags = {
        f: [[rng.randrange(n) for _ in range(rng.choice([0, 1, 2, 4]))] for _ in range(size)]
        for f, n in limits.items()
    }

    def weight() -> float:
        return float(rng.randint(-2, 3)) if whole_weights else rng.uniform(-1, 2)

    weights = {f: [[weight() for _ in bag] for bag in samples] for f, samples in bags.items()}
    labels = [float(rng.randint(0, 1)) for _ in range(size)]
    return ReferenceBatch(bags, weights, labels)


def random_case(
    rng: random.Random,
    world_size: int,
    optimizer: Optimizer,
    *,
    exact: bool = False,
    data_type: DataType = DataType.FP32,
    num_steps: int = 3,
    kinds: str = "mixed",
) -> Case:
    """A random model on `world_size` ranks.

    `exact`: values that fp32 adds without rounding. Sizes and bag lengths are powers of
    2, weights and coefficients whole multiples of the number of ranks.
    """
    tables = random_tables(rng, data_type)
    ranks = [str(rank) for rank in range(world_size)]
    choices = {"mixed": ["dp", *ranks], "dp": ["dp"], "tw": ranks}[kinds]
    plan = make_plan(tables, [rng.choice(choices) for _ in tables], world_size, optimizer)
    sizes = [1, 2, 4] if exact else [0, 1, 2, 3, 4]
    batches = [
        [
            random_batch(rng, tables, rng.choice(sizes), whole_weights=exact)
            for _ in range(num_steps)
        ]
        for _ in range(world_size)
    ]
    coefficients: dict[str, Tensor] = {}
    for table in tables:
        for feature in table.feature_names:
            shape = (table.embedding_dim,)
            values = (
                torch.tensor([float(world_size * rng.randint(-4, 4)) for _ in range(shape[0])])
                if exact
                else torch.tensor([rng.uniform(-1, 1) for _ in range(shape[0])])
            )
            coefficients[f"{table.name}/{feature}"] = values
    if not exact:
        coefficients["quadratic"] = torch.ones(())
    dtype = torch.float16 if data_type is DataType.FP16 else torch.float32
    weights = {
        t.name: torch.tensor(
            [
                [
                    float(rng.randint(-8, 8)) if exact else rng.uniform(-1, 1)
                    for _ in range(t.embedding_dim)
                ]
                for _ in range(t.num_embeddings)
            ]
        ).to(dtype)
        for t in tables
    }
    return Case(plan, batches, coefficients, weights)


def reference_of(case: Case, dense: list[tuple[Tensor, Tensor]] | None = None) -> ReferenceTrainer:
    """The trainer that holds the same model, before any step."""
    assert case.weights is not None
    training = case.plan.training
    return ReferenceTrainer(
        {
            entry.table.name: ReferenceTable(
                case.weights[entry.table.name].clone(),
                list(entry.table.feature_names),
                entry.table.pooling is PoolingType.MEAN,
                entry.table.weighted,
            )
            for entry in case.plan.tables
        },
        optimizer=training.optimizer.value,
        learning_rate=training.learning_rate,
        eps=training.eps,
        dense=dense,
    )
