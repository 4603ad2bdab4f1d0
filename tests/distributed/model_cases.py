"""Builds random models, plans and data for the runtime's tests, and their reference results.

Structure (tables, placements, batch sizes) comes from `rng` draw by draw, simplest first, so
that a property-based test can shrink it; numbers come from a generator that is seeded once.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.plan import ShardingPlan, TablePlan
from autoshard.problem import Optimizer, TrainingConfig
from autoshard.shards import Shard, ShardingType
from autoshard.tables import DataType, PoolingType, Table
from autoshard.topology import GIB, Topology
from autoshard.validate import validate_plan
from tests.distributed.placements import random_shards, spread_shards
from tests.distributed.runtime_cases import Case
from tests.reference_trainer import ReferenceBatch, ReferenceTable, ReferenceTrainer

CAPACITY = 4
LEARNING_RATE, EPS = 0.25, 0.125
SHARDING_TYPES = tuple(ShardingType)
CPU_OPTIMIZERS = (Optimizer.SGD, Optimizer.ADAGRAD, Optimizer.ROWWISE_ADAGRAD)

Kind = str | ShardingType | Sequence[Shard]
"""How a table is placed: "dp", the rank of a table-wise table as text, a sharding type for
`spread_shards`, or shards."""


def make_plan(
    tables: Sequence[Table],
    kinds: Sequence[Kind],
    world_size: int,
    optimizer: Optimizer = Optimizer.SGD,
    batch_size: int = CAPACITY,
    *,
    local_world_size: int = 0,
    sharding_types: Sequence[ShardingType] | None = None,
) -> ShardingPlan:
    """A valid plan; `sharding_types` belong to kinds that are lists of shards."""
    topology = Topology.uniform(world_size, GIB, local_world_size=local_world_size)
    entries = []
    for index, (table, kind) in enumerate(zip(tables, kinds, strict=True)):
        if isinstance(kind, str) and kind.isdigit():
            whole = Shard(int(kind), 0, 0, table.num_embeddings, table.embedding_dim)
            entries.append(TablePlan(table, ShardingType.TABLE_WISE, (whole,)))
        elif isinstance(kind, str | ShardingType):
            sharding_type = ShardingType.DATA_PARALLEL if kind == "dp" else ShardingType(kind)
            shards = spread_shards(table, sharding_type, topology)
            entries.append(TablePlan(table, sharding_type, shards))
        else:
            assert sharding_types is not None
            entries.append(TablePlan(table, sharding_types[index], tuple(kind)))
    plan = ShardingPlan(
        topology=topology,
        training=TrainingConfig(
            batch_size=batch_size, optimizer=optimizer, learning_rate=LEARNING_RATE, eps=EPS
        ),
        tables=tuple(entries),
    )
    validate_plan(plan)
    return plan


def two_table_case(kinds: Sequence[Kind], bags: list[list[list[list[int]]]]) -> Case:
    """Tables `large` (50 rows) and `small` (5 rows) look up feature `f`; `bags[rank][step]`."""
    tables = [
        Table(name=n, num_embeddings=r, embedding_dim=4, pooling_factor=1, feature_names=("f",))
        for n, r in (("large", 50), ("small", 5))
    ]
    batches = [[ReferenceBatch({"f": step}, {}) for step in own] for own in bags]
    return Case(
        make_plan(tables, kinds, len(bags)),
        batches,
        {"large/f": torch.ones(4), "small/f": torch.full((4,), 2.0)},
        {"large": torch.zeros(50, 4), "small": torch.zeros(5, 4)},
    )


def random_table(
    rng: random.Random,
    index: int,
    data_type: DataType = DataType.FP32,
    *,
    pooling: PoolingType | None = None,
    weighted: bool | None = None,
) -> Table:
    """Up to 13 rows of up to 20 columns; some share feature f0, some have several."""
    features = [f"f{index}"]
    if rng.random() < 0.4:
        features.append(f"g{index}")
    if index and rng.random() < 0.3:
        features.append("f0")
    return Table(
        name=f"t{index}",
        num_embeddings=rng.randint(1, 13),
        embedding_dim=rng.choice([1, 4, 3, 5, 8, 6, 12, rng.randint(1, 20)]),
        # Decides, with the width, how replicas are kept equal: by rows or by bags.
        pooling_factor=rng.choice([2.0, 4.0, 0.5]),
        feature_names=tuple(features),
        data_type=data_type,
        pooling=rng.choice(list(PoolingType)) if pooling is None else pooling,
        weighted=rng.random() < 0.4 if weighted is None else weighted,
    )


def random_tables(rng: random.Random, data_type: DataType | None = DataType.FP32) -> list[Table]:
    """One to six tables; of both data types if `data_type` is None."""
    types = [DataType.FP32, DataType.FP16] if data_type is None else [data_type]
    return [random_table(rng, index, rng.choice(types)) for index in range(rng.randint(1, 6))]


def tables_of_every_pooling(rng: random.Random, data_type: DataType) -> list[Table]:
    """Sum and mean, weighted and not, twice each."""
    kinds = [(p, w) for p in PoolingType for w in (False, True)] * 2
    return [
        random_table(rng, index, data_type, pooling=pooling, weighted=weighted)
        for index, (pooling, weighted) in enumerate(kinds)
    ]


def random_batch(
    rng: random.Random,
    tables: Sequence[Table],
    size: int,
    *,
    whole_weights: bool = False,
    lengths: Sequence[int] = (0, 1, 2, 4),
) -> ReferenceBatch:
    """Bags of ids of few distinct rows, so that duplicates abound."""
    limits: dict[str, int] = {}
    for table in tables:
        for feature in table.feature_names:
            limits[feature] = min(limits.get(feature, 1 << 30), table.num_embeddings)
    bags = {
        f: [[rng.randrange(n) for _ in range(rng.choice(lengths))] for _ in range(size)]
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
    data_type: DataType | None = DataType.FP32,
    num_steps: int = 3,
    kinds: str | Sequence[ShardingType] = "mixed",
    tables: list[Table] | None = None,
) -> Case:
    """A random model on `world_size` ranks.

    `exact`: values that fp32 adds without rounding. Sizes and bag lengths are powers of
    2, weights and coefficients whole multiples of the number of ranks.
    `kinds`: the sharding types to choose from; "mixed" for all, "dp" and "tw" for one.
    """
    choices = {
        "mixed": list(ShardingType),
        "dp": [ShardingType.DATA_PARALLEL],
        "tw": [ShardingType.TABLE_WISE],
    }
    allowed = choices[kinds] if isinstance(kinds, str) else list(kinds)
    divisors = [n for n in range(world_size, 0, -1) if world_size % n == 0]
    topology = Topology.uniform(world_size, GIB, local_world_size=rng.choice(divisors))
    tables = random_tables(rng, data_type) if tables is None else tables
    sharding_types = [rng.choice(allowed) for _ in tables]
    plan = make_plan(
        tables,
        [
            random_shards(rng, table, kind, topology)
            for table, kind in zip(tables, sharding_types, strict=True)
        ],
        world_size,
        optimizer,
        local_world_size=topology.local_world_size,
        sharding_types=sharding_types,
    )
    sizes = [1, 2, 4] if exact else [0, 1, 2, 3, 4]
    lengths = rng.choice([(0, 1), (0, 1, 2), (0, 0, 1, 2, 4), (0,)])
    batch_sizes = [[rng.choice(sizes) for _ in range(num_steps)] for _ in range(world_size)]
    numbers = random.Random(rng.randrange(1 << 16))
    batches = [
        [random_batch(numbers, tables, size, whole_weights=exact, lengths=lengths) for size in own]
        for own in batch_sizes
    ]
    integers = [torch.int64, torch.int32]
    return Case(
        plan,
        batches,
        _coefficients(numbers, tables, world_size, exact=exact),
        {table.name: _weights(numbers, table, exact=exact) for table in tables},
        id_dtype=rng.choice(integers),
        length_dtype=rng.choice(integers),
    )


def _coefficients(
    numbers: random.Random, tables: Sequence[Table], world_size: int, *, exact: bool
) -> dict[str, Tensor]:
    coefficients = {
        f"{table.name}/{feature}": torch.tensor(
            [
                float(world_size * numbers.randint(-4, 4)) if exact else numbers.uniform(-1, 1)
                for _ in range(table.embedding_dim)
            ]
        )
        for table in tables
        for feature in table.feature_names
    }
    return coefficients if exact else {**coefficients, "quadratic": torch.ones(())}


def _weights(numbers: random.Random, table: Table, *, exact: bool) -> Tensor:
    values = [
        [
            float(numbers.randint(-8, 8)) if exact else numbers.uniform(-1, 1)
            for _ in range(table.embedding_dim)
        ]
        for _ in range(table.num_embeddings)
    ]
    return torch.tensor(values).to(
        torch.float16 if table.data_type is DataType.FP16 else torch.float32
    )


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
                tuple(sorted({shard.col_offset for shard in entry.shards} - {0})),
            )
            for entry in case.plan.tables
        },
        optimizer=training.optimizer.value,
        learning_rate=training.learning_rate,
        eps=training.eps,
        dense=dense,
        rounds_steps=True,
    )


def describe(case: Case) -> str:
    """The case in a few lines, for the message of a failing test."""
    training, topology = case.plan.training, case.plan.topology
    lines = [
        f"{topology.world_size} ranks, {topology.local_world_size} per node, "
        f"{training.optimizer.value}, ids {case.id_dtype}, lengths {case.length_dtype}"
    ]
    for entry in case.plan.tables:
        table = entry.table
        lines.append(
            f"{table.name}: {table.num_embeddings} × {table.embedding_dim} "
            f"{table.data_type.value} {table.pooling.value}"
            f"{' weighted' if table.weighted else ''} {entry.sharding_type.value} "
            f"features {', '.join(table.feature_names)}"
        )
        lines += [
            f"    rank {s.rank}: rows [{s.row_offset}, {s.row_offset + s.num_rows}) × "
            f"columns [{s.col_offset}, {s.col_offset + s.num_cols})"
            for s in entry.shards
        ]
    for rank, own in enumerate(case.batches):
        lines += [f"rank {rank}, step {step}: {batch.bags}" for step, batch in enumerate(own)]
    return "\n".join(lines)
