"""What collectives must put out, against numpy's simulation of all ranks together."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from autoshard.errors import InputError
from autoshard.measure.collective_operations import Operation, fill_input
from autoshard.measure.config import Collective
from autoshard.measure.traffic_sampling import Direction, Traffic

EVEN = [kind for kind in Collective if kind is not Collective.ALL_TO_ALL]
CASES = [
    Traffic(index=0, bytes_per_peer=(1200, 0, 4), direction=Direction.FROM_OWNERS),
    Traffic(index=0, bytes_per_peer=(1200, 0, 4), direction=Direction.TO_OWNERS),
    *(
        Traffic(index=0, bytes_per_peer=(size,) * ranks, collective=kind)
        for kind in EVEN
        for ranks, size in ((2, 8), (3, 1200), (5, 80))
    ),
]


def operations(traffic: Traffic) -> list[Operation]:
    """One per rank, with buffers larger than needed."""
    made = []
    for rank in range(traffic.world_size):
        given = torch.empty(5000)
        fill_input(given, rank)
        made.append(Operation(traffic, rank, given, torch.zeros(5000), group=None))
    return made


def simulated(traffic: Traffic, ranks: list[Operation]) -> list[np.ndarray]:
    """What each rank gets, from what all ranks give."""
    given = [operation.given.numpy().astype(np.float64) for operation in ranks]
    everyone = range(traffic.world_size)
    match traffic.collective:
        case Collective.ALL_TO_ALL:
            sent = traffic.sent_bytes() // 4
            pieces = [np.split(given[r], np.cumsum(sent[r])[:-1]) for r in everyone]
            return [np.concatenate([pieces[q][r] for q in everyone]) for r in everyone]
        case Collective.REDUCE_SCATTER:
            return np.split(np.sum(given, axis=0), traffic.world_size)
        case Collective.ALL_GATHER:
            return [np.concatenate(given)] * traffic.world_size
        case Collective.ALL_REDUCE:
            return [np.sum(given, axis=0)] * traffic.world_size


@pytest.mark.parametrize("traffic", CASES, ids=str)
def test_the_right_output_is_that_of_a_simulation_and_others_are_refused(traffic):
    ranks = operations(traffic)
    for operation, right in zip(ranks, simulated(traffic, ranks), strict=True):
        values = torch.tensor(right, dtype=torch.float32)
        np.testing.assert_array_equal(operation.expected().numpy(), right)
        operation.taken.copy_(values)
        operation.check()
        if not len(right):
            continue
        mean = values / traffic.world_size
        for wrong in (mean, values.roll(1), values + 256, operation.taken * 0):
            if torch.equal(wrong, values):
                continue  # rolled by one, a single element is the same
            operation.taken.copy_(wrong)
            with pytest.raises(RuntimeError, match=f"{traffic} has a wrong output: element 0"):
                operation.check()
        operation.spoil()
        with pytest.raises(RuntimeError, match="wrong output"):
            operation.check()


def test_an_input_that_was_written_to_is_refused():
    operation = operations(CASES[-1])[1]
    operation.taken.copy_(operation.expected())
    operation.given[3] += 1
    with pytest.raises(RuntimeError, match=r"rank 1.*wrong input: element 3"):
        operation.check()


def test_an_all_reduce_starts_from_its_input_each_time():
    reduce = operations(Traffic(index=0, bytes_per_peer=(8, 8), collective=Collective.ALL_REDUCE))
    for _ in range(3):
        reduce[0].prepare()
        reduce[0].taken += reduce[1].given  # the sum of both, in place
    reduce[0].check()


@pytest.mark.parametrize(
    ("kind", "per_peer", "sizes"),
    [
        # Of 3 ranks: 3 parts in and one out; one in and 3 out; 3 halves in and out.
        (Collective.REDUCE_SCATTER, 40, (30, 10)),
        (Collective.ALL_GATHER, 40, (10, 30)),
        (Collective.ALL_REDUCE, 40, (15, 15)),
    ],
)
def test_sizes_by_hand(kind, per_peer, sizes):
    traffic = Traffic(index=0, bytes_per_peer=(per_peer,) * 3, collective=kind)
    assert traffic.num_elements(1) == sizes
    # A ring of 3 moves two parts per rank; an all-reduce of 15 elements two of 5, twice.
    assert traffic.features().tolist() == [3, 80, 80, 240]


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        (Collective.ALL_TO_ALL, (8, 6)),
        (Collective.ALL_TO_ALL, (8,)),
        (Collective.ALL_TO_ALL, (8, -4)),
        (Collective.ALL_GATHER, (8, 4)),
        (Collective.REDUCE_SCATTER, (0, 0)),
        (Collective.ALL_REDUCE, (12, 12)),
    ],
)
def test_sizes_that_a_collective_cannot_have_are_refused(kind, sizes):
    with pytest.raises(InputError, match="sizes of"):
        Traffic(index=0, bytes_per_peer=sizes, collective=kind)
