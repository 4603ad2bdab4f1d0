"""Counts what a rank really sends, below all of the runtime's own bookkeeping."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.runtime.worker import RankProcess
from tests.distributed.runtime_cases import Case, build, to_batch
from tests.distributed.step_cases import total_of

#: Every way in which torch sends tensors between ranks.
_OPERATIONS = (
    "all_to_all_single",
    "all_to_all",
    "all_reduce",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "broadcast",
    "broadcast_object_list",
    "gather",
    "scatter",
    "send",
    "isend",
)


@contextmanager
def counted(rank: int) -> Iterator[list[tuple[str, int]]]:
    """The collectives that run inside, as (operation, bytes sent to other ranks).

    Only all-to-alls are measured; others count as -1, since none belongs into a step.
    """
    seen: list[tuple[str, int]] = []
    originals = {name: getattr(dist, name) for name in _OPERATIONS}

    def counting(name: str) -> Any:
        def call(*arguments: Any, **named: Any) -> Any:
            sent = -1
            if name == "all_to_all_single":
                tensor: Tensor = arguments[1]
                sizes = list(arguments[3])
                sent = (sum(sizes) - sizes[rank]) * tensor.element_size()
            seen.append((name, sent))
            return originals[name](*arguments, **named)

        return call

    for name in _OPERATIONS:
        setattr(dist, name, counting(name))
    try:
        yield seen
    finally:
        for name, original in originals.items():
            setattr(dist, name, original)


def traffic(process: RankProcess, cases: Sequence[Case]) -> list[list[tuple[str, int]]]:
    """Per case, the collectives of one training step."""
    sent = []
    for case in cases:
        embeddings = build(process, case)
        batch = to_batch(case.batches[process.rank][0], case).sparse
        with counted(process.rank) as seen:
            total_of(embeddings(batch)).backward()
        sent.append(list(seen))
    return sent


def evaluation_traffic(process: RankProcess, cases: Sequence[Case]) -> list[list[tuple[str, int]]]:
    """Per case, the collectives of one lookup without gradients."""
    sent = []
    for case in cases:
        embeddings = build(process, case)
        batch = to_batch(case.batches[process.rank][0], case).sparse
        with torch.no_grad(), counted(process.rank) as seen:
            embeddings(batch)
        sent.append(list(seen))
    return sent
