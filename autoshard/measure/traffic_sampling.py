"""Draws the collectives that are measured, with traffic as plans cause it.

Under a plan, rank r sends the same pooled outputs to each other rank (`FROM_OWNERS`), and
each other rank sends rank r the same share of ids and output gradients (`TO_OWNERS`). So
one number per rank, the bytes per peer, gives the whole traffic (see `autoshard.traffic`).
The other collectives are even. They are described by the bytes that a ring moves, which no
algorithm without switches that add up can go below (Patarasuk and Yuan, "Bandwidth optimal
all-reduce algorithms for clusters of workstations", 2009): of an output of n bytes per rank,
R − 1 parts of n for a reduce-scatter and an all-gather; an all-reduce is one after the other.

Shapes: R=ranks, C=traffic features.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InputError, listed
from autoshard.features import traffic_features
from autoshard.measure.config import Collective

#: Traffic is whole fp32 elements.
ELEMENT_BYTES = 4
_TRAFFIC_STREAM = 4
_EVEN_SHARE = 0.15
_ONE_RANK_SHARE = 0.15
_SPARSE_SHARE = 0.25
_ZERO_PROBABILITY = 0.3
_CONCENTRATION = (0.1, 30.0)


class Direction(Enum):
    """Whether the ranks that hold shards send or receive."""

    FROM_OWNERS = "from_owners"
    """Forward: pooled outputs. Rank r sends bytes_per_peer[r] to each other rank."""
    TO_OWNERS = "to_owners"
    """Ids, and in the backward output gradients: each other rank sends rank r as much."""


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """One collective."""

    index: int
    bytes_per_peer: tuple[int, ...]
    """Of each rank, [R], multiples of `ELEMENT_BYTES`: what it exchanges with each other rank
    one way. Equal but for an all-to-all; of an all-reduce in two halves, one to add up and one
    to tell, so multiples of twice as much."""
    direction: Direction = Direction.FROM_OWNERS
    """Says nothing where all ranks are alike."""
    collective: Collective = Collective.ALL_TO_ALL

    def __post_init__(self) -> None:
        unit = ELEMENT_BYTES * (2 if self.collective is Collective.ALL_REDUCE else 1)
        uneven = self.collective is Collective.ALL_TO_ALL
        if (
            self.world_size < 2
            or any(size < 0 or size % unit for size in self.bytes_per_peer)
            or not (uneven or (len(set(self.bytes_per_peer)) == 1 and self.bytes_per_peer[0]))
        ):
            raise InputError(
                f"the sizes of {self} are not usable",
                got=listed(self.bytes_per_peer),
                allowed=f"of at least two ranks, multiples of {unit}"
                + ("" if uneven else ", all equal and above 0"),
            )

    def __str__(self) -> str:
        name = self.collective.value.replace("_", "-")
        return f"{name} {self.index} on {self.world_size} ranks"

    @property
    def world_size(self) -> int:
        """R."""
        return len(self.bytes_per_peer)

    def sent_bytes(self) -> NDArray[np.int64]:
        """What each rank sends to each other rank, int64 [R, R], 0 to itself."""
        per_peer_R = np.array(self.bytes_per_peer, dtype=np.int64)
        sent_RR = np.repeat(per_peer_R[:, None], self.world_size, axis=1)
        np.fill_diagonal(sent_RR, 0)
        return sent_RR if self.direction is Direction.FROM_OWNERS else sent_RR.T.copy()

    def num_elements(self, rank: int) -> tuple[int, int]:
        """Elements of a rank's input and output."""
        per_peer = self.bytes_per_peer[0] // ELEMENT_BYTES
        match self.collective:
            case Collective.ALL_TO_ALL:
                sent_RR = self.sent_bytes() // ELEMENT_BYTES
                return int(sent_RR[rank].sum()), int(sent_RR[:, rank].sum())
            case Collective.REDUCE_SCATTER:
                return self.world_size * per_peer, per_peer
            case Collective.ALL_GATHER:
                return per_peer, self.world_size * per_peer
            case Collective.ALL_REDUCE:
                return self.world_size * per_peer // 2, self.world_size * per_peer // 2

    def features(self) -> NDArray[np.float64]:
        """As in `autoshard.features.TRAFFIC_FEATURES`, float64 [C]."""
        sent_RR = self.sent_bytes().astype(np.float64)
        return traffic_features(
            np.array([self.world_size]),
            sent_RR.sum(axis=1).max(keepdims=True),
            sent_RR.sum(axis=0).max(keepdims=True),
            sent_RR.sum(keepdims=True).ravel(),
        )[0]


def draw_traffic(
    index: int,
    world_size: int,
    max_rank_bytes: int,
    *,
    seed: int,
    collective: Collective = Collective.ALL_TO_ALL,
) -> Traffic:
    """Collective number `index` of its kind: the same for equal arguments.

    The busiest rank's bytes are log-uniform from one element per peer up to
    `max_rank_bytes`; the others' in an all-to-all from as many as that down to nothing at
    all, in other collectives the same.
    """
    if collective is not Collective.ALL_TO_ALL:
        return _draw_even(index, world_size, max_rank_bytes, seed, collective)
    rng = np.random.default_rng([_TRAFFIC_STREAM, seed, world_size, index])
    direction = list(Direction)[int(rng.integers(2))]
    largest = max_rank_bytes / (world_size - 1) / ELEMENT_BYTES
    elements = math.exp(rng.uniform(0.0, math.log(max(largest, 1.0))))
    chance = rng.random()
    if chance < _EVEN_SHARE:
        weights_R = np.ones(world_size)
    elif chance < _EVEN_SHARE + _ONE_RANK_SHARE:
        weights_R = np.zeros(world_size)
        weights_R[rng.integers(world_size)] = 1.0
    else:
        low, high = np.log(_CONCENTRATION)
        weights_R = rng.dirichlet(np.full(world_size, math.exp(rng.uniform(low, high))))
        if rng.random() < _SPARSE_SHARE:
            idle_R = rng.random(world_size) < _ZERO_PROBABILITY
            idle_R[np.argmax(weights_R)] = False
            weights_R[idle_R] = 0.0
    elements_R = np.floor(weights_R / weights_R.max() * elements).astype(np.int64)
    return Traffic(
        index=index,
        direction=direction,
        bytes_per_peer=tuple((elements_R * ELEMENT_BYTES).tolist()),
    )


def _draw_even(
    index: int, world_size: int, max_rank_bytes: int, seed: int, collective: Collective
) -> Traffic:
    stream = [_TRAFFIC_STREAM, seed, world_size, index, list(Collective).index(collective)]
    unit = ELEMENT_BYTES * (2 if collective is Collective.ALL_REDUCE else 1)
    largest = max(max_rank_bytes / (world_size - 1) / unit, 1.0)
    elements = int(math.exp(np.random.default_rng(stream).uniform(0.0, math.log(largest))))
    return Traffic(
        index=index, collective=collective, bytes_per_peer=(elements * unit,) * world_size
    )
