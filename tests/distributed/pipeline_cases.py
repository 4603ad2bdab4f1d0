"""What ranks do in training loops: which batches they take, what overlaps, what goes wrong."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from autoshard.plan import ShardingPlan
from autoshard.runtime.batch import JaggedBatch
from autoshard.runtime.collectives import Collectives
from autoshard.runtime.dense import DenseHead, DenseOutput, TrainingBatch, logistic_loss
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.loop import EvaluationResult, LoopResult, PlainLoop, TrainingLoop
from autoshard.runtime.pipelined_loop import PipelinedLoop
from autoshard.runtime.worker import RankProcess
from tests.distributed.runtime_cases import (
    Case,
    HeldShard,
    copy_of,
    message_of,
    to_batch,
)

LOOPS = ("plain", "pipelined", "serial")
WAIT_S = 20.0

_INPUT_GROUPS: WeakKeyDictionary[Collectives, Collectives] = WeakKeyDictionary()


def input_collectives(collectives: Collectives) -> Collectives:
    """One group for the input of all models that are built beside one `Collectives`."""
    if collectives not in _INPUT_GROUPS:
        _INPUT_GROUPS[collectives] = collectives.new_group()
    return _INPUT_GROUPS[collectives]


def build(process: RankProcess, case: Case) -> ShardedEmbeddings:
    """The case's tables with the case's weights, and a group of their own for the input."""
    embeddings = ShardedEmbeddings(
        case.plan,
        process.collectives,
        input_collectives=input_collectives(process.collectives),
        ids_mode=case.ids_mode,
    )
    for local in embeddings.local_shards():
        assert case.weights is not None
        part = local.shard
        rows = slice(part.row_offset, part.row_offset + part.num_rows)
        columns = slice(part.col_offset, part.col_offset + part.num_cols)
        local.weights.copy_(case.weights[local.table.name][rows, columns])
    return embeddings


def make_loop(
    kind: str, process: RankProcess, embeddings: ShardedEmbeddings, dense: nn.Module
) -> TrainingLoop:
    parameters = list(dense.parameters())
    optimizer = torch.optim.SGD(parameters, lr=0.25) if parameters else None
    parts = (embeddings, dense, optimizer, process.collectives)
    if kind == "plain":
        return PlainLoop(*parts)
    return PipelinedLoop(*parts, serial=kind == "serial")


# ---- equal numbers -------------------------------------------------------------------------


@dataclass
class Trained:
    """What one rank has after training and evaluation."""

    losses: list[float]
    shards: list[HeldShard]
    dense: list[Tensor]
    logits_N: Tensor
    evaluation_loss: float
    phases: set[str]


def train_with(process: RankProcess, kind: str, cases: Sequence[Case]) -> list[Trained]:
    """Train on each case's batches, evaluate on the first, train on all again."""
    results = []
    for case in cases:
        embeddings = build(process, case)
        dense = DenseHead(embeddings.output_dims, hidden=(6,), seed=3)
        loop = make_loop(kind, process, embeddings, dense)
        batches = [to_batch(batch, case) for batch in case.batches[process.rank]]
        first = loop.train_steps(batches, num_steps=len(batches))
        evaluation = loop.evaluate(batches[:1])
        second = loop.train_steps(batches, num_steps=None)
        results.append(
            Trained(
                losses=first.losses + second.losses,
                shards=[copy_of(shard) for shard in embeddings.local_shards()],
                dense=[p.detach().clone() for p in dense.parameters()],
                logits_N=evaluation.logits_N,
                evaluation_loss=evaluation.loss,
                phases={name for record in first.records for name in record.collectives_ns},
            )
        )
    return results


# ---- which batches are used ----------------------------------------------------------------


class Tracing(nn.Module):
    """Notes the first id of every batch that it sees; has no parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []

    def forward(self, pooled: dict[str, Tensor], batch: TrainingBatch) -> DenseOutput:
        self.seen.extend(batch.sparse.values_L[:1].tolist())
        logits_B = torch.cat(list(pooled.values()), dim=1).sum(1)
        return DenseOutput(logistic_loss(logits_B, batch.labels_B), logits_B)


def numbered(index: int) -> TrainingBatch:
    """A batch of feature f whose only id is its number."""
    return TrainingBatch(JaggedBatch.from_bags({"f": [[index]]}), torch.tensor([float(index % 2)]))


@dataclass
class Counted:
    """An iterator over numbered batches that counts how many were taken."""

    numbers: Iterable[int]
    taken: int = 0

    def __iter__(self) -> Iterator[TrainingBatch]:
        for number in self.numbers:
            self.taken += 1
            yield numbered(number)


@dataclass
class Usage:
    """Which batches a rank saw, and how many had been taken after each call."""

    seen: list[int]
    taken: list[int]
    results: list[LoopResult] = field(default_factory=list)
    progress: list[int] = field(default_factory=list)


def train_in_pieces(process: RankProcess, kind: str, case: Case) -> Usage:
    """Batches 0..9 of one iterator in three calls, with evaluations between them."""
    dense = Tracing()
    loop = make_loop(kind, process, build(process, case), dense)
    source = Counted(range(10))
    iterator = iter(source)
    usage = Usage(dense.seen, [])

    def train(num_steps: int | None, warmup_steps: int = 0) -> None:
        usage.results.append(
            loop.train_steps(
                iterator,
                num_steps=num_steps,
                warmup_steps=warmup_steps,
                progress=usage.progress.append,
            )
        )
        usage.taken.append(source.taken)

    train(3)
    loop.evaluate(Counted(range(20, 22)))
    train(0)
    train(2, warmup_steps=2)
    loop.evaluate(Counted(range(30, 31)))
    train(None)
    return usage


def train_unevenly(
    process: RankProcess, kind: str, case: Case, lengths: Sequence[int], num_steps: int | None
) -> tuple[Usage, EvaluationResult]:
    """Rank r has `lengths[r]` batches, both for training and for evaluation."""
    dense = Tracing()
    loop = make_loop(kind, process, build(process, case), dense)
    batches = [numbered(index) for index in range(lengths[process.rank])]
    result = loop.train_steps(batches, num_steps=num_steps)
    usage = Usage(list(dense.seen), [], [result])
    return usage, loop.evaluate(batches)


class NumberedBatches(Dataset[TrainingBatch]):
    def __len__(self) -> int:
        return 5

    def __getitem__(self, index: int) -> TrainingBatch:
        return numbered(index)


def train_epochs(process: RankProcess, kind: str, case: Case) -> list[list[int]]:
    """Three epochs through one DataLoader whose worker stays; the second ends early."""
    # Under torchrun ranks are ordinary processes; here they are daemons, which may not fork.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    dense = Tracing()
    loop = make_loop(kind, process, build(process, case), dense)
    loader = DataLoader(
        NumberedBatches(), batch_size=None, num_workers=1, persistent_workers=True, timeout=30
    )
    seen = []
    for num_steps in (None, 2, None):
        loop.train_steps(loader, num_steps=num_steps)
        seen.append(list(dense.seen))
        dense.seen.clear()
    return seen


# ---- overlap -------------------------------------------------------------------------------


class Meeting(Tracing):
    """In each step, waits until the next batch's ids have been distributed."""

    def __init__(self, num_steps: int) -> None:
        super().__init__()
        self.distributed = [threading.Event() for _ in range(num_steps)]
        self.met: list[bool] = []
        self.wait_s = WAIT_S

    def forward(self, pooled: dict[str, Tensor], batch: TrainingBatch) -> DenseOutput:
        following = len(self.seen) + 1
        if following < len(self.distributed):
            self.met.append(self.distributed[following].wait(self.wait_s))
        return super().forward(pooled, batch)


def overlap(process: RankProcess, kind: str, case: Case) -> list[bool]:
    """Whether the ids of batch i + 1 were out before the dense layers of step i ran."""
    dense = Meeting(4)
    if kind != "pipelined":
        dense.wait_s = 0.05
    embeddings = build(process, case)
    input_dist = embeddings.input_dist

    def noting(*arguments: Any, **named: Any) -> Any:
        step_input = input_dist(*arguments, **named)
        dense.distributed[embeddings.input_collectives.recorder.step].set()
        return step_input

    embeddings.input_dist = noting  # type: ignore[method-assign]
    loop = make_loop(kind, process, embeddings, dense)
    loop.train_steps(Counted(range(4)), num_steps=4)
    return dense.met


# ---- faults --------------------------------------------------------------------------------


def input_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name == "autoshard-input"]


def faulty(fault: str, position: int) -> Iterator[Any]:
    """Good batches, and at `position` one that is not."""
    for index in range(position):
        yield numbered(index)
    if fault == "source":
        raise ZeroDivisionError("the source broke")
    if fault == "id":
        yield numbered(70)
    if fault == "type":
        yield "text"
    if fault == "feature":
        yield TrainingBatch(JaggedBatch.from_bags({"g": [[1]]}), torch.zeros(1))
    yield numbered(0)


def fault_messages(
    process: RankProcess, kind: str, case: Case, fault: str, evaluating: bool = False
) -> tuple[str, int, list[str]]:
    """Rank 1's batch 2 is bad: this rank's error, its steps before, threads left.

    Afterwards the ranks train on, which shows that they stopped at one point.
    """
    dense = Tracing()
    loop = make_loop(kind, process, build(process, case), dense)
    source: Any = faulty(fault, 2) if process.rank == 1 else Counted(range(5))
    if fault == "iterable":
        source = 3 if process.rank == 1 else source

    def run() -> None:
        if evaluating:
            loop.evaluate(source)
        else:
            loop.train_steps(source, num_steps=5)

    message = message_of(run)
    steps = len(dense.seen)
    loop.train_steps(Counted(range(2)), num_steps=2)
    return message, steps, input_threads()


def hold_the_source(process: RankProcess, kind: str, case: Case) -> None:
    """Rank 1's source never gives its batch 2."""
    held = threading.Event()

    def source() -> Iterator[TrainingBatch]:
        for index in range(5):
            if process.rank == 1 and index == 2:
                held.wait()
            yield numbered(index)

    make_loop(kind, process, build(process, case), Tracing()).train_steps(source(), num_steps=5)


class Failing(Tracing):
    """Fails in step 1, once rank 1's source has been asked for batch 2."""

    def __init__(self, asked: threading.Event) -> None:
        super().__init__()
        self.asked = asked

    def forward(self, pooled: dict[str, Tensor], batch: TrainingBatch) -> DenseOutput:
        if len(self.seen) == 1:
            assert self.asked.wait(WAIT_S)
            raise ZeroDivisionError("the layers broke")
        return super().forward(pooled, batch)


def fail_while_the_source_works(process: RankProcess, case: Case) -> tuple[str, bool, str]:
    """The main thread fails while its input thread is in the source, on both ranks.

    Returns:
        The error, whether the thread was given up on, and the loop's answer to a call
        after the source came back.
    """
    asked, released = threading.Event(), threading.Event()

    def source() -> Iterator[TrainingBatch]:
        yield numbered(0)
        yield numbered(1)
        asked.set()
        released.wait(WAIT_S)
        yield numbered(2)

    loop = make_loop("pipelined", process, build(process, case), Failing(asked))
    message = message_of(lambda: loop.train_steps(source(), num_steps=5))
    left_alone = bool(input_threads())
    released.set()
    dense = Tracing()
    loop._replicas.module = loop.dense = dense
    loop._replicas._layers.module = dense
    loop.train_steps(Counted(range(3)), num_steps=3)
    return message, left_alone, f"{dense.seen} {input_threads()}"


def plan_of_one_table(plan: ShardingPlan) -> Case:
    return Case(plan, [], {}, {"t": torch.zeros(50, 4)})
