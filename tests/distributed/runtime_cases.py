"""What the ranks of the runtime's tests do; importable by name in spawned workers."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from autoshard.plan import ShardingPlan
from autoshard.runtime.batch import JaggedBatch
from autoshard.runtime.clocks import measure_offsets_ns
from autoshard.runtime.dense import DenseHead, DenseOutput, TrainingBatch
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.ids import IdsMode
from autoshard.runtime.loop import PlainLoop
from autoshard.runtime.worker import RankProcess
from tests.reference_trainer import ReferenceBatch


@dataclass
class Case:
    plan: ShardingPlan
    batches: list[list[ReferenceBatch]]  # [rank][step]
    coefficients: dict[str, Tensor] = field(default_factory=dict)
    weights: dict[str, Tensor] | None = None
    ids_mode: IdsMode = IdsMode.FATAL
    dense_seed: int | None = None
    num_steps: int | None = None
    as_generator: bool = False
    id_dtype: torch.dtype = torch.int64
    length_dtype: torch.dtype = torch.int64


@dataclass
class Outcome:
    weights: dict[str, Tensor]
    states: dict[str, Tensor | None]
    dense: list[Tensor]
    losses: list[float]
    outputs: list[dict[str, Tensor]]
    unused_batches: int
    unused_is_exact: bool
    num_out_of_range: int
    allocated_bytes: int
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
        loss = torch.zeros(())
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


def stalling(batches: list[TrainingBatch], stalls_at: int | None) -> Iterator[TrainingBatch]:
    for index, batch in enumerate(batches):
        if index == stalls_at:
            time.sleep(3600)
        yield batch


def train(process: RankProcess, case: Case, stalls_at: int | None = None) -> Outcome:
    """Train as the case says; the source of data falls silent before batch `stalls_at`."""
    collectives = process.collectives
    embeddings = ShardedEmbeddings(case.plan, collectives, ids_mode=case.ids_mode)
    for name in embeddings.held_tables() if case.weights is not None else ():
        embeddings.table_weights(name).copy_(case.weights[name])
    dense: nn.Module
    if case.dense_seed is None:
        dense = CoefficientLoss(case.plan, case.coefficients)
    else:
        dense = DenseHead(embeddings.output_dims, hidden=(6,), seed=case.dense_seed)
    optimizer = torch.optim.SGD(dense.parameters(), lr=case.plan.training.learning_rate)
    batches = [to_batch(batch, case) for batch in case.batches[process.rank]]
    result = PlainLoop(embeddings, dense, optimizer, collectives).train_steps(
        stalling(batches, stalls_at) if case.as_generator or stalls_at else batches,
        num_steps=case.num_steps or max(len(own) for own in case.batches),
    )
    held = embeddings.held_tables()
    states = {name: embeddings.optimizer_state(name) for name in held}
    return Outcome(
        weights={name: embeddings.table_weights(name).clone() for name in held},
        states={name: None if s is None else s.clone() for name, s in states.items()},
        dense=[p.detach().clone() for p in dense.parameters()],
        losses=result.losses,
        outputs=getattr(dense, "outputs", []),
        unused_batches=result.unused_batches,
        unused_is_exact=result.unused_is_exact,
        num_out_of_range=embeddings.num_out_of_range,
        allocated_bytes=embeddings.allocated_bytes(),
        phases=[set(r.collectives_ns) for r in result.records],
    )


def fatal_messages(process: RankProcess, case: Case) -> str:
    """The error that this rank raises; the group stays usable, so all ranks raised together."""
    try:
        train(process, case)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def lookup_only(process: RankProcess, case: Case) -> tuple[dict[str, Tensor], bool]:
    """Pooled outputs without gradients, and whether weights stayed as they were."""
    embeddings = ShardedEmbeddings(case.plan, process.collectives)
    before = {n: embeddings.table_weights(n).clone() for n in embeddings.held_tables()}
    with torch.no_grad():
        pooled = embeddings(to_batch(case.batches[process.rank][0], case).sparse)
    same = all(torch.equal(w, embeddings.table_weights(n)) for n, w in before.items())
    return {n: v.clone() for n, v in pooled.items()}, same


def initial_weights(process: RankProcess, case: Case) -> dict[str, Tensor]:
    embeddings = ShardedEmbeddings(case.plan, process.collectives, seed=5)
    return {n: embeddings.table_weights(n).clone() for n in embeddings.held_tables()}


def different_plans(process: RankProcess, plans: list[Case]) -> str:
    """Each rank runs another plan of the list."""
    return fatal_messages(process, plans[process.rank])


def clock_offsets(process: RankProcess) -> list[int]:
    return measure_offsets_ns(process.collectives)


def die(process: RankProcess, rank: int) -> None:
    """Rank `rank` is killed while the others wait for it in a collective."""
    process.report("step 7 of 20")
    time.sleep(0.15)
    if process.rank == rank:
        os.kill(os.getpid(), signal.SIGKILL)
    torch.distributed.all_reduce(torch.zeros(1))


def fail(process: RankProcess, rank: int) -> None:
    if process.rank == rank:
        raise ZeroDivisionError("a fault of this rank")
    torch.distributed.all_reduce(torch.zeros(1))


def hang(process: RankProcess, rank: int, case: Case) -> None:
    """Rank `rank` stops answering before step 1; the others' error says where they waited."""
    train(process, case, stalls_at=1 if process.rank == rank else None)
