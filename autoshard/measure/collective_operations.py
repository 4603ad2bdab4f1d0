"""The collectives themselves: one rank's tensors, the call that is timed, and what must come out.

Between `traffic_sampling`, which says what is exchanged, and `collective_ranks`, which times
it. Inputs are whole numbers that differ by rank and place, small enough for float32 to add
up exactly, so that what comes out is known by arithmetic on every rank without any exchange.

Shapes: R=ranks, E=elements.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autoshard.measure.config import Collective
from autoshard.measure.traffic_sampling import ELEMENT_BYTES, Traffic

#: Element e of rank r is `_RANK_STEP`·(r + 1) + e mod `_PERIOD`. Sums over up to 300 ranks
#: stay below 2^24, and the period divides no usual size, so that a shifted part is seen.
_RANK_STEP = 256
_PERIOD = 251


def fill_input(buffer_E: Tensor, rank: int) -> None:
    """Write the input of a rank; every collective sends a part of it, from the first element."""
    buffer_E.copy_(_places(0, buffer_E.numel(), buffer_E.device) + _RANK_STEP * (rank + 1))


def _places(start: int, count: int, device: torch.device) -> Tensor:
    places_E = torch.arange(start, start + count, device=device) % _PERIOD
    return places_E.to(torch.float32)


class Operation:
    """One rank's part in one collective, to be run over and over."""

    def __init__(
        self, traffic: Traffic, rank: int, given_E: Tensor, taken_E: Tensor, group: Any
    ) -> None:
        """Take what is needed of two buffers.

        Args:
            traffic: which collective.
            rank: of this process.
            given_E: float32, filled by `fill_input` and never written here.
            taken_E: float32, for the output; an all-reduce has its input there, too.
            group: the process group, of `traffic.world_size` ranks.
        """
        self.traffic, self.rank = traffic, rank
        num_given, num_taken = traffic.num_elements(rank)
        self.given, self.taken = given_E[:num_given], taken_E[:num_taken]
        self._sent_RR = traffic.sent_bytes() // ELEMENT_BYTES
        self.run: Callable[[], Any] = self._call(group)

    @property
    def send_sizes(self) -> list[int]:
        """Elements that this rank's traffic to each other rank amounts to."""
        return self._sent_RR[self.rank].tolist()

    @property
    def receive_sizes(self) -> list[int]:
        """The same from each other rank."""
        return self._sent_RR[:, self.rank].tolist()

    def _call(self, group: Any) -> Callable[[], Any]:
        match self.traffic.collective:
            case Collective.ALL_TO_ALL:
                sizes = (self.receive_sizes, self.send_sizes)
                return partial(dist.all_to_all_single, self.taken, self.given, *sizes, group=group)
            # Sums: gloo takes ReduceOp.AVG without a word and returns something else.
            case Collective.REDUCE_SCATTER:
                return partial(dist.reduce_scatter_single, self.taken, self.given, group=group)
            case Collective.ALL_GATHER:
                return partial(dist.all_gather_single, self.taken, self.given, group=group)
            case Collective.ALL_REDUCE:
                return partial(dist.all_reduce, self.taken, group=group)

    def prepare(self) -> None:
        """Make ready for `run`; not part of what is timed."""
        if self.traffic.collective is Collective.ALL_REDUCE:
            self.taken.copy_(self.given)  # or sums of sums would overflow

    def spoil(self) -> None:
        """Write into the output what is no right result, so that an idle `run` is noticed."""
        self.taken.fill_(-1.0)

    def expected(self) -> Tensor:
        """The right output, by arithmetic, float32 [E]."""
        num_ranks, count, device = self.traffic.world_size, self.taken.numel(), self.taken.device
        sum_of_ranks = _RANK_STEP * num_ranks * (num_ranks + 1) // 2
        match self.traffic.collective:
            case Collective.ALL_TO_ALL:
                starts = [_offset(row, self.rank) for row in self._sent_RR.tolist()]
                sizes = self.receive_sizes
            case Collective.ALL_GATHER:
                starts, sizes = [0] * num_ranks, [self.given.numel()] * num_ranks
            case Collective.REDUCE_SCATTER:
                return num_ranks * _places(self.rank * count, count, device) + sum_of_ranks
            case Collective.ALL_REDUCE:
                return num_ranks * _places(0, count, device) + sum_of_ranks
        parts = [
            _places(start, size, device) + _RANK_STEP * (source + 1)
            for source, (start, size) in enumerate(zip(starts, sizes, strict=True))
        ]
        return torch.cat(parts)

    def check(self) -> None:
        """Refuse a wrong output, or an input that was written to.

        Raises:
            RuntimeError: the collective did not do what it is for.
        """
        given = _places(0, self.given.numel(), self.given.device) + _RANK_STEP * (self.rank + 1)
        for what, found, right in (
            ("input", self.given, given),
            ("output", self.taken, self.expected()),
        ):
            if not torch.equal(found, right):
                place = int(torch.nonzero(found != right)[0])
                raise RuntimeError(
                    f"rank {self.rank}: {self.traffic} has a wrong {what}: element {place} of "
                    f"{found.numel()} is {float(found[place])}, not {float(right[place])}"
                )


def _offset(sizes: Sequence[int], rank: int) -> int:
    """Where the part for a rank begins."""
    return [0, *accumulate(sizes)][rank]
