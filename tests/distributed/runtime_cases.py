"""What the ranks of the runtime's tests do; importable by name in spawned workers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from autoshard.plan import ShardingPlan
from autoshard.runtime.batch import JaggedBatch
from autoshard.runtime.collectives import Collectives
from autoshard.runtime.dense import DenseOutput, TrainingBatch
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.group import WorkerGroup
from autoshard.runtime.ids import IdsMode
from autoshard.runtime.timing import Recorder
from autoshard.runtime.worker import RankProcess
from autoshard.shards import Shard
from tests.reference_trainer import ReferenceBatch

if TYPE_CHECKING:
    from autoshard.runtime.sharding import LocalShard


@dataclass
class Case:
    plan: ShardingPlan
    batches: list[list[ReferenceBatch]]  # [rank][step]
    coefficients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] | None = None
    ids_mode: IdsMode = IdsMode.FATAL
    id_dtype: torch.dtype = torch.int64
    length_dtype: torch.dtype = torch.int64


@dataclass
class HeldShard:
    """A copy of a `LocalShard`."""

    table: str
    shard: Shard
    weights: Tensor
    states: dict[str, Tensor]


@dataclass
class Outcome:
    """What one rank has after training."""

    shards: list[HeldShard]
    losses: list[float]
    outputs: list[dict[str, Tensor]]  # [step]["table/feature"]
    num_out_of_range: int
    allocated_bytes: int
    held_tables: tuple[str, ...]
    phases: list[set[str]]


class CoefficientLoss(nn.Module):
    """The reference trainer's loss without dense layers."""

    def __init__(self, plan: ShardingPlan, coefficients: dict[str, Tensor]) -> None:
        super().__init__()
        self._parameter = nn.Parameter(torch.zeros(1))
        self._coefficients = coefficients
        uses = [f for entry in plan.tables for f in entry.table.feature_names]
        self._names = {
            (f if uses.count(f) == 1 else f"{f}@{e.table.name}"): f"{e.table.name}/{f}"
            for e in plan.tables
            for f in e.table.feature_names
        }
        self.outputs: list[dict[str, Tensor]] = []

    def forward(self, pooled: dict[str, Tensor], batch: TrainingBatch) -> DenseOutput:
        self.outputs.append({self._names[n]: v.detach().clone() for n, v in pooled.items()})
        size = max(1, batch.sparse.batch_size)
        loss = 0 * self._parameter.sum()
        for name, value in pooled.items():
            loss = loss + (value * self._coefficients[self._names[name]]).sum() / size
            if "quadratic" in self._coefficients:
                loss = loss + (value * value).sum() / 2 / size
        return DenseOutput(loss, torch.zeros(batch.sparse.batch_size))


def to_batch(batch: ReferenceBatch, case: Case) -> TrainingBatch:
    built = JaggedBatch.from_bags(batch.bags, batch.weights)
    sparse = JaggedBatch(
        built.feature_names,
        built.lengths_FB.to(case.length_dtype),
        built.values_L.to(case.id_dtype),
        built.weights_L,
    )
    labels = batch.labels or [0.0] * batch.num_samples
    return TrainingBatch(sparse, torch.tensor(labels, dtype=torch.float32))


def copy_of(shard: LocalShard) -> HeldShard:
    states = {name: state.clone() for name, state in shard.optimizer_states.items()}
    return HeldShard(shard.table.name, shard.shard, shard.weights.clone(), states)


def outcome_of(
    embeddings: ShardedEmbeddings,
    losses: list[float],
    outputs: list[dict[str, Tensor]],
    recorder: Recorder,
) -> Outcome:
    return Outcome(
        shards=[copy_of(shard) for shard in embeddings.local_shards()],
        losses=losses,
        outputs=outputs,
        num_out_of_range=embeddings.num_out_of_range,
        allocated_bytes=embeddings.allocated_bytes(),
        held_tables=embeddings.held_tables(),
        phases=[set(record.collectives_ns) for record in recorder.records],
    )


def build(process: RankProcess, case: Case) -> ShardedEmbeddings:
    """The case's tables with the case's weights."""
    embeddings = ShardedEmbeddings(case.plan, process.collectives, ids_mode=case.ids_mode)
    for local in embeddings.local_shards() if case.weights is not None else ():
        assert case.weights is not None
        part = local.shard
        rows = slice(part.row_offset, part.row_offset + part.num_rows)
        columns = slice(part.col_offset, part.col_offset + part.num_cols)
        local.weights.copy_(case.weights[local.table.name][rows, columns])
    return embeddings


def train(process: RankProcess, case: Case) -> Outcome:
    """Train on every batch of the case, one step after the other."""
    recorder = process.collectives.recorder
    recorder.records.clear()
    embeddings = build(process, case)
    dense = CoefficientLoss(case.plan, case.coefficients)
    losses = []
    for step, batch in enumerate(case.batches[process.rank]):
        recorder.start_step(step)
        training_batch = to_batch(batch, case)
        loss = dense(embeddings(training_batch.sparse), training_batch).loss
        loss.backward()
        recorder.end_step()
        losses.append(float(loss.detach()))
    return outcome_of(embeddings, losses, dense.outputs, recorder)


def train_many(process: RankProcess, cases: Sequence[Case]) -> list[Outcome]:
    """Train one case after the other."""
    return [train(process, case) for case in cases]


def message_of(function: Callable[[], object]) -> str:
    """The error that this rank raises; the group stays usable if all ranks raise together."""
    try:
        function()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def messages_of(process: RankProcess, cases: Sequence[Case]) -> list[str]:
    """The error of training each case."""
    return [message_of(partial(train, process, case)) for case in cases]


def messages_of_ranks(process: RankProcess, per_rank: Sequence[Sequence[Case]]) -> list[str]:
    """The same, where each rank has cases of its own."""
    return messages_of(process, per_rank[process.rank])


def alone() -> RankProcess:
    """The only rank of a world of one, in this process."""
    collectives = Collectives(0, 1, device=torch.device("cpu"))
    return RankProcess(collectives, oversubscribed=False, report=lambda line: None)


def run_ranks(
    groups: dict[int, WorkerGroup], world_size: int, function: Callable[..., Any], *arguments: Any
) -> list[Any]:
    """Run on every rank: in worker processes, or in this one where there is only one rank."""
    if world_size == 1:
        return [function(alone(), *arguments)]
    return groups[world_size].run(function, *arguments)


def per_case(ranks: Sequence[Sequence[Outcome]]) -> list[list[Outcome]]:
    """What every rank has, per case, from what every case gave, per rank."""
    return [list(of_case) for of_case in zip(*ranks, strict=True)]
