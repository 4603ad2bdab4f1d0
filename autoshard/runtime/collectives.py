"""Timed collectives with a time limit; every error names rank, step and phase.

All that ranks exchange in one phase travels in one all-to-all, whichever sharding types
contribute to it. Sizes are known on both sides beforehand: fixed by the plan for the
lengths, by the lengths for everything after. gloo has no all-gather of uneven sizes, so
that, too, is an all-to-all.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.errors import WorkerError
from autoshard.runtime.gloo_threads import GLOO_THREADS
from autoshard.runtime.timing import Phase, Recorder

DEFAULT_TIMEOUT_S = 60.0


def stall_timeout_s(timeout_s: float) -> float:
    """How long a job may stand still where no collective limits it, as while data are read.

    Args:
        timeout_s: of its collectives.
    """
    return max(300.0, 5 * timeout_s)


class CollectiveError(WorkerError):
    """A collective failed here, most often because another rank stopped."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """What one sharding method sends and receives in one all-to-all."""

    send: Tensor
    """One-dimensional: what goes to rank 0, then to rank 1, …"""
    send_sizes: list[int]
    """Per destination rank, elements."""
    receive_sizes: list[int]
    """Per source rank, elements."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing goes out and nothing comes in."""
        return not (any(self.send_sizes) or any(self.receive_sizes))


@dataclass(frozen=True, eq=False)
class Received:
    """What one sharding method got in one all-to-all."""

    pieces: list[Tensor]
    """Per source rank."""
    buffer: Tensor | None = None
    """All pieces, one after the other, where they lie so in memory."""

    def joined(self) -> Tensor:
        """All pieces, one after the other; a copy only where they lie apart."""
        return torch.cat(self.pieces) if self.buffer is None else self.buffer


def empty_parcel(world_size: int, dtype: torch.dtype, device: torch.device) -> Parcel:
    """Nothing to anybody."""
    return Parcel(torch.empty(0, dtype=dtype, device=device), [0] * world_size, [0] * world_size)


class Collectives:
    """The collectives of one rank in one process group."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        device: torch.device,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        group: dist.ProcessGroup | None = None,
        name: str | None = None,
        recorder: Recorder | None = None,
    ) -> None:
        """Wrap a process group that is open, and set the policy of gloo's threads.

        Args:
            rank: in the group.
            world_size: ranks of the group.
            device: where tensors live.
            timeout_s: what its collectives may take.
            group: None for the default group.
            name: of this rank in error messages.
            recorder: of its collectives; one of its own if None.
        """
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout_s = timeout_s
        self.group = group
        self.name = name or f"rank {rank}"
        self.recorder = recorder or Recorder(device)
        self._nodes: dict[int, Collectives] = {}
        self._input: Collectives | None = None
        if device.type == "cpu":
            GLOO_THREADS.refresh()

    def new_group(self) -> Collectives:
        """The same ranks on a process group of their own, for another thread or for DDP.

        Every rank must call it, and in the same order.

        Raises:
            CollectiveError: the other ranks did not join within the time limit.
        """
        return self._on(self._open_group(None) if self.world_size > 1 else None, None)

    def input(self) -> Collectives:
        """The same ranks and recorder, for distributing the input in the same thread.

        Every rank must call it, and in the same order. With gloo, it has a process group of
        its own: a rank that skips a backward starts the next step's input while others
        still send gradients, and gloo ends a process that gets a message of another size
        than it expects. In two groups, all of them wait until the time limit, and say where.

        Raises:
            CollectiveError: the other ranks did not join within the time limit.
        """
        if self._input is None:
            self._input = self
            if self.world_size > 1 and self.device.type == "cpu":
                self._input = self._on(self._open_group(None), self.recorder)
        return self._input

    def node(self, local_world_size: int) -> Collectives:
        """The ranks of this rank's node: each `local_world_size` in turn make one.

        Every rank must call it, and in the same order. Shares this group's recorder.

        Raises:
            CollectiveError: the other ranks did not join within the time limit.
        """
        if local_world_size not in self._nodes:
            node, number = divmod(self.rank, local_world_size)
            groups = [
                self._open_group(list(range(first, first + local_world_size)))
                for first in range(0, self.world_size, local_world_size)
            ]
            self._nodes[local_world_size] = Collectives(
                number,
                local_world_size,
                device=self.device,
                timeout_s=self.timeout_s,
                group=groups[node],
                name=self.name,
                recorder=self.recorder,
            )
        return self._nodes[local_world_size]

    def _on(self, group: dist.ProcessGroup | None, recorder: Recorder | None) -> Collectives:
        return Collectives(
            self.rank,
            self.world_size,
            device=self.device,
            timeout_s=self.timeout_s,
            group=group,
            name=self.name,
            recorder=recorder,
        )

    def _open_group(self, ranks: list[int] | None) -> dist.ProcessGroup:
        try:
            return dist.new_group(ranks, timeout=timedelta(seconds=self.timeout_s))
        except (RuntimeError, ValueError) as error:
            raise CollectiveError(
                f"{self.name}: opening a process group failed or did not end within "
                f"{self.timeout_s:g} s",
                got=_first_line(error),
            ) from error

    def exchange(
        self, phase: Phase, dtype: torch.dtype, parcels: Sequence[Parcel], *, joined: bool = False
    ) -> list[Received]:
        """One all-to-all for all parcels together.

        Every rank must pass the same parcels in the same order; empty ones cost nothing.

        Args:
            phase: for the recorder and for errors.
            dtype: of all parcels.
            parcels: one per sharding method.
            joined: whether the pieces will be wanted one after the other in one tensor.

        Returns:
            Per parcel, what every rank sent; views of one buffer, and for what this rank
            sends itself possibly of the parcel.

        Raises:
            CollectiveError: it failed or did not end within the time limit.
        """
        if self.world_size == 1:
            return [Received([parcel.send], parcel.send) for parcel in parcels]
        filled = [parcel for parcel in parcels if not parcel.is_empty]
        if len(filled) == 1:
            mine = self._exchange_one(phase, dtype, filled[0], joined=joined)
            return [mine if parcel is filled[0] else _nothing(parcel) for parcel in parcels]
        ranks = range(self.world_size)
        outgoing = [parcel.send.split(parcel.send_sizes) for parcel in parcels]
        send = torch.cat([pieces[rank] for rank in ranks for pieces in outgoing])
        buffer = self._all_to_all(
            phase,
            dtype,
            send,
            [sum(p.send_sizes[rank] for p in parcels) for rank in ranks],
            [sum(p.receive_sizes[rank] for p in parcels) for rank in ranks],
        )
        pieces = buffer.split([p.receive_sizes[rank] for rank in ranks for p in parcels])
        return [Received(list(pieces[i :: len(parcels)])) for i in range(len(parcels))]

    def _exchange_one(
        self, phase: Phase, dtype: torch.dtype, parcel: Parcel, *, joined: bool
    ) -> Received:
        own = self.rank
        is_inner = 0 < own < self.world_size - 1
        if joined or is_inner:
            sizes = parcel.receive_sizes
            buffer = self._all_to_all(phase, dtype, parcel.send, parcel.send_sizes, sizes)
            return Received(list(buffer.split(sizes)), buffer)
        # What is for this rank itself stays where it is: a good part of all where ranks are
        # few. For inner ranks the rest would lie in two pieces, which the collective refuses.
        start = offsets(parcel.send_sizes)
        kept = parcel.send[start[own] : start[own + 1]]
        sent = parcel.send[start[1] :] if own == 0 else parcel.send[: start[own]]
        sizes = _without(parcel.receive_sizes, own)
        buffer = self._all_to_all(phase, dtype, sent, _without(parcel.send_sizes, own), sizes)
        pieces = list(buffer.split(sizes))
        pieces[own] = kept
        return Received(pieces)

    def _all_to_all(
        self,
        phase: Phase,
        dtype: torch.dtype,
        send: Tensor,
        send_sizes: list[int],
        receive_sizes: list[int],
    ) -> Tensor:
        received = torch.empty(sum(receive_sizes), dtype=dtype, device=self.device)
        with self._running(phase):
            work = dist.all_to_all_single(
                received, send, receive_sizes, send_sizes, group=self.group, async_op=True
            )
            assert work is not None
            work.wait()
        return received

    def all_reduce_sum(self, phase: Phase, values: Tensor) -> None:
        """Add up `values` over all ranks, in place.

        Raises:
            CollectiveError: it failed or did not end within the time limit.
        """
        if self.world_size == 1 or not values.numel():
            return
        with self._running(phase):
            work = dist.all_reduce(values, op=dist.ReduceOp.SUM, group=self.group, async_op=True)
            assert work is not None
            work.wait()

    def check_equal(self, what: str, value: int) -> None:
        """Make sure that every rank was given the same `value`; for checks before a run.

        Raises:
            CollectiveError: a rank has another one, or did not answer in time.
        """
        if self.world_size == 1:
            return
        own = torch.tensor([value], dtype=torch.int64, device=self.device)
        values = [torch.empty_like(own) for _ in range(self.world_size)]
        try:
            dist.all_gather(values, own, group=self.group)
        except RuntimeError as error:
            raise CollectiveError(
                f"{self.name}: comparing {what} with the other ranks failed or did not "
                f"end within {self.timeout_s:g} s",
                got=_first_line(error),
            ) from error
        for rank, other in enumerate(values):
            if int(other) != value:
                raise CollectiveError(
                    f"{self.name}: rank {rank} was given another {what}",
                    remedy=f"give every rank the same {what}",
                )

    def gather_objects(self, what: str, value: Any) -> list[Any]:
        """`value` of every rank, on every rank; for results, outside the measured steps.

        Raises:
            CollectiveError: it failed or did not end within the time limit.
        """
        if self.world_size == 1:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        try:
            dist.all_gather_object(gathered, value, group=self.group)
        except RuntimeError as error:
            raise CollectiveError(
                f"{self.name}: gathering {what} failed", got=_first_line(error)
            ) from error
        return gathered

    @contextmanager
    def _running(self, phase: Phase) -> Iterator[None]:
        """Around a collective: its times, gloo's threads, and its error."""
        watched = GLOO_THREADS.exchange() if self.device.type == "cpu" else nullcontext()
        try:
            with watched, self.recorder.collective(phase):
                yield
        except RuntimeError as error:
            raise self._failure(phase, error) from error

    def _where(self, phase: Phase) -> str:
        return f"{self.name}, step {self.recorder.step}, phase {phase.value}"

    def _failure(self, phase: Phase, error: RuntimeError) -> CollectiveError:
        return CollectiveError(
            f"{self._where(phase)}: the collective failed or did not end within "
            f"{self.timeout_s:g} s",
            got=_first_line(error),
            remedy="look for another rank's error, or raise the timeout",
        )


def _nothing(parcel: Parcel) -> Received:
    nothing = parcel.send[:0]
    return Received([nothing] * len(parcel.receive_sizes), nothing)


def _without(sizes: Sequence[int], rank: int) -> list[int]:
    return [*sizes[:rank], 0, *sizes[rank + 1 :]]


def offsets(sizes: Sequence[int]) -> list[int]:
    """Where each of consecutive pieces starts, and the end."""
    return [0, *accumulate(sizes)]


def open_process_group(
    rank: int,
    world_size: int,
    *,
    init_method: str,
    device: torch.device,
    timeout_s: float = DEFAULT_TIMEOUT_S,
) -> Collectives:
    """Join the process group (gloo on CPU, NCCL on CUDA).

    Raises:
        CollectiveError: the other ranks did not join within the time limit.
    """
    backend = "nccl" if device.type == "cuda" else "gloo"
    try:
        dist.init_process_group(
            backend,
            init_method=init_method,
            rank=rank,
            world_size=world_size,
            timeout=timedelta(seconds=timeout_s),
        )
    except (RuntimeError, ValueError) as error:
        raise CollectiveError(
            f"rank {rank}: the ranks did not find each other within {timeout_s:g} s",
            got=_first_line(error),
            remedy="check that all ranks were started and reach the rendezvous address",
        ) from error
    return Collectives(rank, world_size, device=device, timeout_s=timeout_s)


def close_process_group() -> None:
    """Leave the process group, if this process is in one."""
    if dist.is_initialized():
        dist.destroy_process_group()


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
