"""What is run: tables, plans and batches, drawn once and read by every contender.

The driver writes each case into a folder; the workers of all contenders read the same
plan, the same ids and the same gradients of the outputs from it.

Shapes: F=features, B=samples of a rank, L=ids, C=columns of all outputs together.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import torch
from torch import Tensor

from autoshard.errors import InputError
from autoshard.plan import ShardingPlan, load_plan, plan_from_slices
from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import Table
from autoshard.topology import Topology

#: Different batches of a case; steps use them in turn.
NUM_BATCHES = 8
#: Large enough that a few steps change the outputs far beyond rounding.
LEARNING_RATE = 0.1
#: What a contender's name ends with if its source of batches is slow.
WAITING = "-waiting"
#: How long such a source takes for a batch, without using the core: a disk, a network.
SOURCE_WAIT_S = 0.010
#: One for each of two ranks, as every table of the published model has. Of a rank that holds
#: no row of its last tables, FBGEMM's CPU backward of row-wise Adagrad reads the number of
#: rows beyond the end of `hash_size_cumsum`, and refuses the step if it finds a large one.
_MIN_ROWS = 2
_GIB = 2**30
SHARDING_TYPES = (
    ShardingType.TABLE_WISE,
    ShardingType.COLUMN_WISE,
    ShardingType.ROW_WISE,
    ShardingType.TABLE_ROW_WISE,
    ShardingType.DATA_PARALLEL,
)


@dataclass(frozen=True, kw_only=True)
class Model:
    """Tables and a batch size."""

    name: str
    tables: tuple[Table, ...]
    batch_size: int
    """Samples per rank."""
    description: str


def uniform_tables(count: int, rows: int) -> tuple[Table, ...]:
    """Equal tables of dim 64, each with one feature of 10 ids per bag."""
    return tuple(
        Table(
            name=f"t{i}",
            feature_names=(f"f{i}",),
            num_embeddings=rows,
            embedding_dim=64,
            pooling_factor=10.0,
        )
        for i in range(count)
    )


def uniform_model(*, scale: float = 1.0) -> Model:
    """8 tables × 100,000 rows × dim 64, 512 bags of 10 ids per rank."""
    rows = max(1, round(100_000 * scale))
    return Model(
        name="uniform",
        tables=uniform_tables(8, rows),
        batch_size=512,
        description=f"8 tables × {rows:,} rows × dim 64, 512 bags of 10 uniform ids per rank",
    )


def mlperf_model(*, scale: float = 0.005, batch_size: int = 256) -> Model:
    """MLPerf DLRM-DCNv2's 26 tables with their rows and batch scaled down.

    Dimension 128 and the multi-hot sizes (214 ids per sample) stay; the rows of every
    table are multiplied by `scale`, of which at least two are left, and ids repeat by the
    library's published law.
    """
    from autoshard.workloads.registry import make_workload

    tables = tuple(
        replace(table, num_embeddings=max(_MIN_ROWS, table.num_embeddings))
        for table in make_workload("mlperf_dcnv2", scale=scale)
    )
    rows = sum(table.num_embeddings for table in tables)
    return Model(
        name="mlperf_dcnv2",
        tables=tables,
        batch_size=batch_size,
        description=(
            f"MLPerf DLRM-DCNv2: 26 tables × dim 128, multi-hot sizes as published, rows × "
            f"{scale:g} ({rows:,} rows), {batch_size} samples per rank (published: 65,536 of "
            f"all ranks together)"
        ),
    )


def training_of(model: Model, optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD) -> TrainingConfig:
    """The training that every contender does."""
    return TrainingConfig(
        batch_size=model.batch_size, optimizer=optimizer, learning_rate=LEARNING_RATE
    )


def make_plan(
    model: Model,
    kind: ShardingType,
    world_size: int,
    optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD,
) -> ShardingPlan:
    """Spread the tables over the ranks in one sharding type.

    Whole tables go, largest traffic first, to the rank with the least; rows and columns
    are cut into one slice per rank, as evenly as TorchRec cuts them: slices of
    ceil(rows / ranks), and of columns / ranks.
    """
    problem = ShardingProblem(
        tables=model.tables,
        topology=Topology.uniform(world_size, 64 * _GIB),
        training=training_of(model, optimizer),
    )
    placed: list[tuple[ShardSlice, int]] = []
    load = [0.0] * world_size
    for table in sorted(
        model.tables, key=lambda t: (-t.lookups_per_sample * t.embedding_dim, t.name)
    ):
        if kind is ShardingType.DATA_PARALLEL:
            placed += [(ShardSlice.whole(table, kind), rank) for rank in range(world_size)]
        elif kind is ShardingType.TABLE_WISE:
            rank = load.index(min(load))
            load[rank] += table.lookups_per_sample * table.embedding_dim
            placed.append((ShardSlice.whole(table, kind), rank))
        else:
            slices = _row_slices if kind.splits_rows else _column_slices
            placed += [(s, rank) for rank, s in enumerate(slices(table, kind, world_size))]
    return plan_from_slices(problem, placed)


def _row_slices(table: Table, kind: ShardingType, parts: int) -> list[ShardSlice]:
    block = -(-table.num_embeddings // parts)
    bounds = [min(block * i, table.num_embeddings) for i in range(parts + 1)]
    return [
        ShardSlice(table, kind, low, 0, high - low, table.embedding_dim)
        for low, high in pairwise(bounds)
    ]


def _column_slices(table: Table, kind: ShardingType, parts: int) -> list[ShardSlice]:
    if table.embedding_dim % (4 * parts):
        raise InputError(
            f"table {table.name!r}: its columns cannot be cut evenly",
            got=f"{table.embedding_dim} columns, {parts} ranks",
            allowed="a multiple of 4 columns per rank",
        )
    width = table.embedding_dim // parts
    return [
        ShardSlice(table, kind, 0, width * i, table.num_embeddings, width) for i in range(parts)
    ]


@dataclass(frozen=True, eq=False)
class RawBatch:
    """What a data loader would deliver: plain tensors, feature-major."""

    lengths_FB: Tensor
    values_L: Tensor


@dataclass(frozen=True, eq=False)
class CaseData:
    """One rank's view of a case."""

    plan: ShardingPlan
    feature_names: tuple[str, ...]
    batches: list[RawBatch]
    """This rank's."""
    other_batches: list[list[RawBatch]]
    """[rank][batch], of every rank: for contenders that arrange their ids beforehand."""
    gradient_BC: Tensor
    """Gradient of this rank's outputs; columns are the features' outputs in order."""
    gradients_RBC: list[Tensor]
    """The same of every rank."""
    seed: int

    @property
    def dims(self) -> list[int]:
        """Columns of each output, in the features' order."""
        return [entry.table.embedding_dim for entry in self.plan.tables]


def write_case(folder: Path, model: Model, plan: ShardingPlan, *, seed: int) -> None:
    """Draw the batches of all ranks and write the case; every table has one feature."""
    from autoshard.runtime.data import SyntheticBatches

    plan.save(folder / "plan.json")
    generator = torch.Generator().manual_seed(seed)
    columns = sum(table.embedding_dim for table in model.tables)
    for rank in range(plan.topology.world_size):
        drawn = SyntheticBatches(plan, rank=rank, num_batches=NUM_BATCHES, seed=seed)
        stored = [(b.sparse.lengths_FB, b.sparse.values_L) for b in drawn]
        labels = [b.labels_B for b in drawn]
        gradient = torch.randn(model.batch_size, columns, generator=generator) / model.batch_size
        torch.save(
            {"batches": stored, "labels": labels, "gradient": gradient},
            folder / f"rank{rank}.pt",
        )
    (folder / "seed").write_text(str(seed), encoding="ascii")


def read_case(folder: Path, rank: int) -> CaseData:
    """Read what `write_case` wrote."""
    plan = load_plan(folder / "plan.json")
    per_rank = [
        torch.load(folder / f"rank{r}.pt", weights_only=True)
        for r in range(plan.topology.world_size)
    ]
    batches = [[RawBatch(*pair) for pair in stored["batches"]] for stored in per_rank]
    gradients = [stored["gradient"] for stored in per_rank]
    return CaseData(
        plan=plan,
        feature_names=tuple(entry.table.feature_names[0] for entry in plan.tables),
        batches=batches[rank],
        other_batches=batches,
        gradient_BC=gradients[rank],
        gradients_RBC=gradients,
        seed=int((folder / "seed").read_text(encoding="ascii")),
    )


def read_labels(folder: Path, rank: int) -> list[Tensor]:
    """Labels of this rank's batches, float32 [B] each."""
    labels: list[Tensor] = torch.load(folder / f"rank{rank}.pt", weights_only=True)["labels"]
    return labels
