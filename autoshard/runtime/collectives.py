"""Timed collectives with a time limit; every error names rank, step and phase.

All that ranks exchange in one phase travels in one all-to-all, whichever sharding types
contribute to it. Sizes are known on both sides beforehand: fixed by the plan for the
lengths, by the lengths for everything after. gloo has no all-gather of uneven sizes, so
that, too, is an all-to-all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.errors import WorkerError
from autoshard.runtime.timing import Phase, Recorder

DEFAULT_TIMEOUT_S = 60.0


class CollectiveError(WorkerError):
    """A collective failed here, most often because another rank stopped."""


@dataclass(frozen=True, eq=False)
class Parcel:
    """What one sharding type sends and receives in one all-to-all."""

    send: list[Tensor]
    """Per destination rank, one-dimensional, all of one dtype."""
    receive_sizes: list[int]
    """Per source rank, elements."""


class Collectives:
    """The collectives of one rank."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        *,
        device: torch.device,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        self.rank = rank
        self.world_size = world_size
        self.device = device
        self.timeout_s = timeout_s
        self.recorder = Recorder(device)
        self._kept: dict[str, Tensor] = {}

    def exchange(
        self, phase: Phase, dtype: torch.dtype, parcels: Sequence[Parcel]
    ) -> list[list[Tensor]]:
        """One all-to-all for all parcels together.

        Returns:
            Per parcel, per source rank, what that rank sent; views of one buffer, which
            for gradients is used again in the next step.

        Raises:
            CollectiveError: it failed or did not end within the time limit.
        """
        if self.world_size == 1:
            return [[parcel.send[0]] for parcel in parcels]
        ranks = range(self.world_size)
        outgoing = [parcel.send[rank] for rank in ranks for parcel in parcels]
        send_sizes = [sum(p.send[rank].numel() for p in parcels) for rank in ranks]
        receive_sizes = [sum(p.receive_sizes[rank] for p in parcels) for rank in ranks]
        send = self._buffer(phase, "send", sum(send_sizes), dtype)
        if outgoing:
            torch.cat(outgoing, out=send)
        received = self._buffer(phase, "receive", sum(receive_sizes), dtype)
        with self.recorder.collective(phase):
            try:
                work = dist.all_to_all_single(
                    received, send, receive_sizes, send_sizes, async_op=True
                )
                assert work is not None
                work.wait()
            except RuntimeError as error:
                raise self._failure(phase, error) from error
        pieces = received.split([p.receive_sizes[rank] for rank in ranks for p in parcels])
        return [[pieces[r * len(parcels) + i] for r in ranks] for i in range(len(parcels))]

    def all_reduce_sum(self, phase: Phase, values: Tensor) -> None:
        """Add up `values` over all ranks, in place.

        Raises:
            CollectiveError: it failed or did not end within the time limit.
        """
        if self.world_size == 1 or not values.numel():
            return
        with self.recorder.collective(phase):
            try:
                work = dist.all_reduce(values, op=dist.ReduceOp.SUM, async_op=True)
                assert work is not None
                work.wait()
            except RuntimeError as error:
                raise self._failure(phase, error) from error

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
            dist.all_gather(values, own)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank}: comparing {what} with the other ranks failed or did not "
                f"end within {self.timeout_s:g} s",
                got=_first_line(error),
            ) from error
        for rank, other in enumerate(values):
            if int(other) != value:
                raise CollectiveError(
                    f"rank {self.rank}: rank {rank} was given another {what}",
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
            dist.all_gather_object(gathered, value)
        except RuntimeError as error:
            raise CollectiveError(
                f"rank {self.rank}: gathering {what} failed", got=_first_line(error)
            ) from error
        return gathered

    def release_buffers(self) -> None:
        """Give the buffers that are kept between steps back."""
        self._kept.clear()

    def _buffer(self, phase: Phase, use: str, size: int, dtype: torch.dtype) -> Tensor:
        """Memory for one side of an exchange.

        Gradients are used up within the step, and with replicas they are the largest
        thing that travels, so their buffers are kept: fresh memory costs a page fault
        per 4 KiB. All other phases' results may live on with the caller.
        """
        if phase is not Phase.GRADIENTS:
            return torch.empty(size, dtype=dtype, device=self.device)
        kept = self._kept.get(use)
        if kept is None or kept.numel() < size or kept.dtype != dtype:
            kept = torch.empty(size, dtype=dtype, device=self.device)
            self._kept[use] = kept
        return kept[:size]

    def _where(self, phase: Phase) -> str:
        return f"rank {self.rank}, step {self.recorder.step}, phase {phase.value}"

    def _failure(self, phase: Phase, error: RuntimeError) -> CollectiveError:
        return CollectiveError(
            f"{self._where(phase)}: the collective failed or did not end within "
            f"{self.timeout_s:g} s",
            got=_first_line(error),
            remedy="look for another rank's error, or raise the timeout",
        )


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
