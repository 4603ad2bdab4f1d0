"""The plain loop's data: ranks with different numbers of batches, data loaders, faults in them."""

from __future__ import annotations

import copy
import random
from collections.abc import Sequence

import pytest
import torch

from autoshard.problem import Optimizer
from autoshard.runtime.dense import DenseHead
from autoshard.runtime.group import WorkerGroup
from autoshard.runtime.layout import layout_of
from autoshard.tables import Table
from tests.distributed import loop_cases
from tests.distributed.equality_checks import assembled, check_equal
from tests.distributed.model_cases import SHARDING_TYPES, make_plan, random_case, reference_of
from tests.distributed.runtime_cases import Case, run_ranks
from tests.reference_trainer import ReferenceBatch

Groups = dict[int, WorkerGroup]


def shortened(case: Case, num_steps: int) -> Case:
    """The case as far as all ranks have data."""
    short = copy.copy(case)
    short.batches = [own[:num_steps] for own in case.batches]
    return short


@pytest.mark.parametrize("as_generator", [False, True])
def test_uneven_data_stop_all_ranks_at_the_shortest(groups: Groups, as_generator: bool) -> None:
    cases = []
    for kind in SHARDING_TYPES:
        case = random_case(random.Random(kind.value), 3, Optimizer.SGD, kinds=[kind], num_steps=5)
        case.batches[1] = case.batches[1][:3]
        case.batches[2] = case.batches[2][:4]
        cases.append(case)
    ranks = groups[3].run(loop_cases.train_in_loop, cases, None, as_generator)
    for position, case in enumerate(cases):
        of_ranks = [own[position] for own in ranks]
        for rank, unused in enumerate([2, 0, 1]):
            assert of_ranks[rank].stopped_early
            # A generator does not tell how many are left, only that one was drawn in vain.
            assert of_ranks[rank].unused_batches == (min(unused, 1) if as_generator else unused)
        assert of_ranks[0].unused_is_exact is not as_generator
        for outcome in of_ranks:
            outcome.outcome.outputs = outcome.outcome.outputs[:3]
        check_equal(shortened(case, 3), [o.outcome for o in of_ranks])


def test_a_rank_without_any_batch_stops_all(groups: Groups) -> None:
    case = random_case(random.Random(4), 2, Optimizer.ADAGRAD, num_steps=2)
    case.batches[1] = []
    for outcome in groups[2].run(loop_cases.train_in_loop, [case]):
        assert outcome[0].stopped_early
        assert outcome[0].outcome.losses == []


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_second_epoch_with_persistent_workers(groups: Groups, world_size: int) -> None:
    """The loader's process stays; both epochs start at the first batch, on every rank."""
    case = random_case(random.Random(6), world_size, Optimizer.ADAGRAD, num_steps=3)
    if world_size > 1:
        case.batches[1] = case.batches[1][:2]
    shortest = min(len(own) for own in case.batches)
    twice = shortened(case, shortest)
    twice.batches = [own * 2 for own in twice.batches]
    ranks = run_ranks(groups, world_size, loop_cases.train_epochs, case, 2)
    for epoch in range(2):
        unused = [own[epoch].unused_batches for own in ranks]
        assert unused == [len(own) - shortest for own in case.batches]
    seconds = [own[1].outcome for own in ranks]
    for own, second in zip(ranks, seconds, strict=True):
        second.losses = own[0].outcome.losses + second.losses
    check_equal(twice, seconds)


def test_a_malformed_batch_stops_everybody_and_says_why(groups: Groups) -> None:
    table = Table(name="f", num_embeddings=5, embedding_dim=4, pooling_factor=1)
    batch = ReferenceBatch({"f": [[1]]}, {})
    cases = [
        Case(make_plan([table], [kind], 2), [[batch], [batch]], {"f/f": torch.ones(4)})
        for kind in SHARDING_TYPES
    ]
    others, owns = groups[2].run(loop_cases.malformed_messages, cases)
    for other, own in zip(others, owns, strict=True):
        for fault, message, echo in zip(loop_cases.MALFORMED, own, other, strict=True):
            assert message.startswith("InputError: "), fault
            assert fault in message
            assert "rank 0, step 1: rank 1 failed to prepare its batch" in echo, fault


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_dense_layers_are_averaged_over_ranks(groups: Groups, world_size: int) -> None:
    cases = [
        random_case(random.Random(f"dense/{kind.value}"), world_size, Optimizer.SGD, kinds=[kind])
        for kind in SHARDING_TYPES
    ]
    ranks = run_ranks(groups, world_size, loop_cases.train_in_loop, cases, 3)
    for position, case in enumerate(cases):
        _compare_dense(case, [own[position] for own in ranks])


def _compare_dense(case: Case, outcomes: Sequence[loop_cases.LoopOutcome]) -> None:
    dims = layout_of(case.plan).output_dims
    head = DenseHead(dims, hidden=(6,), seed=3)
    layers = [layer for layer in head.layers if isinstance(layer, torch.nn.Linear)]
    trainer = reference_of(case, [(layer.weight.detach(), layer.bias.detach()) for layer in layers])
    losses = [
        trainer.step([own[step] for own in case.batches], {})
        for step in range(len(case.batches[0]))
    ]
    of_ranks = zip(*(o.outcome.losses for o in outcomes), strict=True)
    assert [sum(step) / len(outcomes) for step in of_ranks] == pytest.approx(losses, rel=1e-5)
    want = [p.detach() for layer in trainer.dense for p in layer]
    for outcome in outcomes:
        for got, value in zip(outcome.dense, want, strict=True):
            torch.testing.assert_close(got, value, rtol=2e-5, atol=2e-6)
    for name, (weights, _) in assembled(case.plan, [o.outcome for o in outcomes]).items():
        torch.testing.assert_close(weights, trainer.tables[name].weights, rtol=2e-5, atol=2e-6)
