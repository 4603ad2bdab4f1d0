"""What ranks do in the plain loop: uneven data, data loaders, malformed batches."""

from __future__ import annotations

import math
import multiprocessing
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from autoshard.runtime.batch import JaggedBatch
from autoshard.runtime.dense import DenseHead, TrainingBatch
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.loop import LoopResult, PlainLoop
from autoshard.runtime.worker import RankProcess
from tests.distributed.runtime_cases import (
    Case,
    CoefficientLoss,
    Outcome,
    build,
    message_of,
    outcome_of,
    to_batch,
)


@dataclass
class LoopOutcome:
    """What one rank has after a loop."""

    outcome: Outcome
    dense: list[Tensor]
    stopped_early: bool
    unused_batches: int
    unused_is_exact: bool


class _Model:
    """A case in a plain loop, with the reference's loss or with dense layers."""

    def __init__(self, process: RankProcess, case: Case, dense_seed: int | None = None) -> None:
        self.process = process
        self.embeddings: ShardedEmbeddings = build(process, case)
        self.dense: torch.nn.Module = (
            CoefficientLoss(case.plan, case.coefficients)
            if dense_seed is None
            else DenseHead(self.embeddings.output_dims, hidden=(6,), seed=dense_seed)
        )
        optimizer = torch.optim.SGD(self.dense.parameters(), lr=case.plan.training.learning_rate)
        self.loop = PlainLoop(self.embeddings, self.dense, optimizer, process.collectives)

    def outcome(self, result: LoopResult) -> LoopOutcome:
        outputs = getattr(self.dense, "outputs", [])
        recorder = self.process.collectives.recorder
        return LoopOutcome(
            outcome=outcome_of(self.embeddings, result.losses, outputs, recorder),
            dense=[p.detach().clone() for p in self.dense.parameters()],
            stopped_early=result.stopped_early,
            unused_batches=result.unused_batches,
            unused_is_exact=result.unused_is_exact,
        )


def train_in_loop(
    process: RankProcess,
    cases: Sequence[Case],
    dense_seed: int | None = None,
    as_generator: bool = False,
) -> list[LoopOutcome]:
    """Each case's batches, of which ranks may have different numbers."""
    outcomes = []
    for case in cases:
        model = _Model(process, case, dense_seed)
        batches: Iterable[TrainingBatch] = [to_batch(b, case) for b in case.batches[process.rank]]
        source = (batch for batch in batches) if as_generator else batches
        longest = max(len(own) for own in case.batches)
        outcomes.append(model.outcome(model.loop.train_steps(source, num_steps=longest)))
    return outcomes


class CaseBatches(Dataset[TrainingBatch]):
    """One rank's batches of a case, for a DataLoader."""

    def __init__(self, case: Case, rank: int) -> None:
        self.batches = [to_batch(batch, case) for batch in case.batches[rank]]

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, index: int) -> TrainingBatch:
        return self.batches[index]


def train_epochs(process: RankProcess, case: Case, num_epochs: int) -> list[LoopOutcome]:
    """Every epoch through one DataLoader whose worker process stays."""
    # Under torchrun ranks are ordinary processes; here they are daemons, which may not fork.
    multiprocessing.current_process()._config["daemon"] = False  # type: ignore[attr-defined]
    model = _Model(process, case)
    loader = DataLoader(
        CaseBatches(case, process.rank), batch_size=None, num_workers=1, persistent_workers=True
    )
    longest = max(len(own) for own in case.batches)
    return [
        model.outcome(model.loop.train_steps(loader, num_steps=longest)) for _ in range(num_epochs)
    ]


_ONE, _ID = torch.ones(1, 1, dtype=torch.int64), torch.ones(1, dtype=torch.int64)
_WRAPPING = torch.tensor([[2**63 - 1, 2**63 - 1, 2**63 - 1, 2**63 - 1, 7]])  # to 3, in int64
MALFORMED = {
    "lengths do not sum": lambda: JaggedBatch(("f",), 2 * _ONE, _ID),
    "is negative": lambda: JaggedBatch(("f",), torch.tensor([[2, -1]]), _ID),
    "ids are not whole numbers": lambda: JaggedBatch(("f",), _ONE, _ID.float()),
    "lengths are not whole numbers": lambda: JaggedBatch(("f",), _ONE.float(), _ID),
    "lengths do not have one row": lambda: JaggedBatch(("f",), _ONE[0], _ID),
    "ids are not a flat list": lambda: JaggedBatch(("f",), _ONE, _ONE),
    "weights do not match": lambda: JaggedBatch(("f",), _ONE, _ID, torch.zeros(0)),
    "names a feature twice": lambda: JaggedBatch(("f", "f"), _ONE.repeat(2, 1), _ID.repeat(2)),
    "are not a tensor": lambda: JaggedBatch(("f",), _ONE, [1]),  # type: ignore[arg-type]
    "a weight is not finite": lambda: JaggedBatch(("f",), _ONE, _ID, torch.tensor([math.nan])),
    "36893488147419103235 from lengths": lambda: JaggedBatch(("f",), _WRAPPING, _ID.repeat(3)),
}
"""By a part of the message: a batch of feature f, broken in one way."""


def malformed_messages(process: RankProcess, cases: Sequence[Case]) -> list[list[str]]:
    """Rank 1 reads a malformed batch as its second; this rank's error, per case and fault."""

    def source(case: Case, fault: str) -> Iterator[TrainingBatch]:
        good = to_batch(case.batches[process.rank][0], case)
        yield good
        if process.rank == 1:
            MALFORMED[fault]()
        yield good

    return [
        [
            message_of(
                partial(_Model(process, case).loop.train_steps, source(case, fault), num_steps=2)
            )
            for fault in MALFORMED
        ]
        for case in cases
    ]
