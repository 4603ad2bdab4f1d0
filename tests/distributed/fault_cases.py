"""Ranks that are killed, fail or fall silent, at a phase of a step that the test names."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from autoshard.errors import WorkerError
from autoshard.runtime.clocks import measure_offsets_ns
from autoshard.runtime.collectives import Collectives
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.timing import Phase
from autoshard.runtime.worker import RankProcess
from tests.distributed.runtime_cases import Case, message_of, to_batch, train


def at_phase(collectives: Collectives, phase: Phase, step: int, act: Callable[[], None]) -> None:
    """Let `act` run before entering the collective of `phase` in step number `step`.

    Every rank must have asked for the input's collectives before.
    """
    for own in (collectives, collectives.input()):
        exchange = own.exchange

        def acting(entered: Phase, *arguments: Any, exchange: Any = exchange, **named: Any) -> Any:
            if entered is phase and collectives.recorder.step == step:
                act()
            return exchange(entered, *arguments, **named)

        own.exchange = acting  # type: ignore[method-assign, assignment]


def _die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def stop_at(process: RankProcess, case: Case, ranks: Sequence[int], step: int) -> None:
    """Each of `ranks` is stopped, not ended, as it distributes the ids of step `step`."""
    process.report(f"step {step} of 20")
    time.sleep(0.15)  # the report must be out
    process.collectives.input()
    if process.rank in ranks:
        at_phase(process.collectives, Phase.IDS, step, _stop)
    train(process, case)


def kill_at(process: RankProcess, case: Case, rank: int, phase: Phase | None, step: int) -> None:
    """Rank `rank` is killed as it enters `phase`; where that is None, while others build."""
    process.report(f"step {step} of 20")
    time.sleep(0.15)  # the report must be out
    process.collectives.input()
    if process.rank == rank:
        if phase is None:
            _die()
        else:
            at_phase(process.collectives, phase, step, _die)
    train(process, case)


def stall_at(
    process: RankProcess, case: Case, rank: int, phases: Sequence[Phase], timeout_s: float
) -> list[str]:
    """Rank `rank` falls silent for longer than the time limit before each of `phases`.

    Every failure leaves a process group unusable, so each time the ranks use one of their
    own, with a short limit; the group that they started with stays as it was.
    """
    own = process.collectives
    messages = []
    for phase in phases:
        brief = Collectives(
            own.rank, own.world_size, device=own.device, timeout_s=timeout_s
        ).new_group()
        brief_input = brief.input()
        if process.rank == rank:
            at_phase(brief, phase, 1, partial(_fall_silent, 1.3 * timeout_s))
        stalling = RankProcess(brief, process.oversubscribed, process.report)
        messages.append(message_of(partial(train, stalling, case)))
        own.gather_objects("who is back", process.rank)
        _close(brief_input, brief)
    return messages


def skip_a_backward(process: RankProcess, case: Case, rank: int, timeout_s: float) -> str:
    """Rank `rank` leaves out the backward of step 1, as for a loss that is NaN there only."""
    own = process.collectives
    brief = Collectives(
        own.rank, own.world_size, device=own.device, timeout_s=timeout_s
    ).new_group()
    embeddings = ShardedEmbeddings(case.plan, brief)

    def train_steps() -> None:
        for step, batch in enumerate(case.batches[own.rank]):
            brief.recorder.start_step(step)
            pooled = embeddings(to_batch(batch, case).sparse)
            if (own.rank, step) != (rank, 1):
                sum(value.sum() for value in pooled.values()).backward()

    message = message_of(train_steps)
    own.gather_objects("who is back", own.rank)
    _close(brief.input(), brief)
    return message


def _close(*collectives: Collectives) -> None:
    for each in collectives:
        torch.distributed.destroy_process_group(each.group)


def _fall_silent(seconds: float) -> None:
    time.sleep(seconds)
    raise WorkerError("this rank was silent")


def fail(process: RankProcess, rank: int) -> None:
    """Rank `rank` has a fault of its own while the others wait for it."""
    if process.rank == rank:
        raise ZeroDivisionError("a fault of this rank")
    torch.distributed.all_reduce(torch.zeros(1))


def clock_offsets(process: RankProcess) -> list[int]:
    return measure_offsets_ns(process.collectives)
