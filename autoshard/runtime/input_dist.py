"""Distributes the input of a step: status, sizes and ids, as a rule in one all-to-all.

Both sides of an all-to-all have to know its sizes, and those of ids differ from batch to
batch. So each pair of ranks leaves room for a little more than what it sent last, which
both know. Where every rank's ids fit into their room, they ride on the message that
carries the status; where some do not, which that message tells everybody, a second
all-to-all brings the ids of all.

    status | per method its size and what it announces | ids of each method | unused room

Shapes: R=ranks, M=methods.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor

from autoshard.runtime.collectives import Collectives, Parcel, Received, offsets
from autoshard.runtime.headers import HEADER_SIZE, Header, Status, stop_if_told
from autoshard.runtime.layout import Entry
from autoshard.runtime.sharding import MethodState, ShardingMethod
from autoshard.runtime.timing import Phase


class InputDistributor:
    """The input side of all methods of one rank; used by one thread at a time."""

    def __init__(
        self,
        methods: Sequence[ShardingMethod],
        entries: Sequence[Entry],
        collectives: Collectives,
    ) -> None:
        """Begin without room: the first step takes two all-to-alls."""
        self._methods = methods
        self._entries = entries
        self._collectives = collectives
        self._world_size = collectives.world_size
        self._phase = Phase.IDS if any(m.exchanges_ids for m in methods) else Phase.CONTROL
        starts = offsets([HEADER_SIZE, *(1 + method.num_announced for method in methods)])[1:]
        self._numbers = [slice(*pair) for pair in pairwise(starts)]
        self._head_size = starts[-1]
        self._room_to_R = [0] * self._world_size
        self._room_from_R = [0] * self._world_size

    def __call__(self, header: Header, states: list[MethodState] | None) -> list[Received] | None:
        """Distribute one batch.

        Args:
            header: what this rank has to say.
            states: one per method, with the local ids; None where there is no batch. Their
                `batch_sizes_R` and `announced_RN` are filled in.

        Returns:
            Per method what every rank sent it; None if any rank has no more batches.

        Raises:
            InputError: some rank's batch holds an id out of range.
            CollectiveError: ranks disagree on the step, or another rank failed.
        """
        ranks = range(self._world_size)
        heads: list[list[int]] = [[] for _ in ranks]
        parts: list[list[Tensor]] = [[] for _ in ranks]
        to_R = [0] * self._world_size
        for index, method in enumerate(self._methods):
            if states is None:
                for head in heads:
                    head += [0] * (1 + method.num_announced)
                continue
            for rank, message in enumerate(method.send_ids(states[index])):
                size = sum(part.numel() for part in message.parts)
                heads[rank] += [size, *message.announced]
                parts[rank] += message.parts
                to_R[rank] += size
        fits = all(size <= room for size, room in zip(to_R, self._room_to_R, strict=True))
        header = header._replace(ids_follow=not fits)
        if fits:
            pieces = self._tell(header, heads, parts, to_R)
        else:
            pieces = self._tell(header, heads, [[] for _ in ranks], [0] * self._world_size)
        told = torch.stack([piece[: self._head_size] for piece in pieces]).tolist()
        headers = [Header(*row[:HEADER_SIZE]) for row in told]
        stop_if_told(headers, self._collectives.rank, self._entries)
        if states is None or any(header.status == Status.ENDED for header in headers):
            return None
        sizes_MR: list[list[int]] = []
        for state, numbers in zip(states, self._numbers, strict=True):
            state.batch_sizes_R = [header.batch_size for header in headers]
            state.announced_RN = [row[numbers][1:] for row in told]
            sizes_MR.append([row[numbers.start] for row in told])
        from_R = [sum(sizes) for sizes in zip(*sizes_MR, strict=True)]
        if any(header.ids_follow for header in headers):
            payload = self._send_after(parts, to_R, from_R)
        else:
            payload = [piece[self._head_size :] for piece in pieces]
        self._room_to_R = [_room(*pair) for pair in zip(self._room_to_R, to_R, strict=True)]
        self._room_from_R = [_room(*pair) for pair in zip(self._room_from_R, from_R, strict=True)]
        return [
            Received([payload[rank][first[rank] : first[rank] + sizes[rank]] for rank in ranks])
            for first, sizes in zip(_firsts(sizes_MR), sizes_MR, strict=True)
        ]

    def _tell(
        self, header: Header, heads: list[list[int]], parts: list[list[Tensor]], to_R: list[int]
    ) -> list[Tensor]:
        """Exchange the first message; per source rank, all of it.

        Args:
            header: of this rank.
            heads: per rank, the numbers behind it.
            parts: per rank, ids that fit into its room.
            to_R: how many they are.
        """
        rows = [[*map(int, header), *head] for head in heads]
        heads_RH = torch.tensor(rows, dtype=torch.int64, device=self._collectives.device)
        if self._world_size == 1:
            return [torch.cat([heads_RH[0], *parts[0]])]
        filled: list[Tensor] = []
        left_R = [room - size for room, size in zip(self._room_to_R, to_R, strict=True)]
        unused = heads_RH.new_zeros(max(left_R))
        for head, own, left in zip(heads_RH, parts, left_R, strict=True):
            filled += [head, *own, unused[:left]]
        parcel = Parcel(
            torch.cat(filled),
            [self._head_size + room for room in self._room_to_R],
            [self._head_size + room for room in self._room_from_R],
        )
        (received,) = self._collectives.exchange(self._phase, torch.int64, [parcel])
        return received.pieces

    def _send_after(
        self, parts: list[list[Tensor]], to_R: list[int], from_R: list[int]
    ) -> list[Tensor]:
        """Exchange the ids that did not fit; per source rank, all of them."""
        flat = [part for own in parts for part in own]
        nothing = torch.empty(0, dtype=torch.int64, device=self._collectives.device)
        parcel = Parcel(torch.cat([nothing, *flat]), to_R, from_R)
        (received,) = self._collectives.exchange(Phase.LATE_IDS, torch.int64, [parcel])
        return received.pieces


def _room(room: int, size: int) -> int:
    """The room for the next message, where there was `room` for one of `size`."""
    return room if room // 2 <= size <= room else size + size // 16


def _firsts(sizes_MR: list[list[int]]) -> list[list[int]]:
    """Per method, per source rank, where its part starts."""
    firsts = []
    start_R = [0] * len(sizes_MR[0]) if sizes_MR else []
    for sizes in sizes_MR:
        firsts.append(start_R)
        start_R = [start + size for start, size in zip(start_R, sizes, strict=True)]
    return firsts
