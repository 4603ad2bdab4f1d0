"""Bad ids, empty and odd batches: every sharding type alike, on all ranks."""

from __future__ import annotations

import random

import pytest
import torch

from autoshard.problem import Optimizer
from autoshard.runtime.group import WorkerGroup
from autoshard.runtime.ids import IdsMode
from autoshard.tables import PoolingType, Table
from tests.distributed import runtime_cases
from tests.distributed.equality_checks import assembled, check_equal
from tests.distributed.model_cases import (
    CPU_OPTIMIZERS,
    SHARDING_TYPES,
    make_plan,
    random_case,
    reference_of,
    two_table_case,
)
from tests.distributed.runtime_cases import Case, per_case, run_ranks
from tests.reference_trainer import ReferenceBatch

Groups = dict[int, WorkerGroup]


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("bad", [5, 49, -1, 50, 2**40, 2**63 - 1, -(2**63)])
def test_fatal_mode_stops_every_rank_by_name(groups: Groups, world_size: int, bad: int) -> None:
    """5 and 49 are out of range for `small` only, the others for both tables."""
    good = [[[[1, 4]]]] * (world_size - 1)
    cases = [
        two_table_case([other, kind], [*good, [[[3, bad, 4]]]])
        for kind in SHARDING_TYPES
        for other in ("dp", "0")
    ]
    messages = run_ranks(groups, world_size, runtime_cases.messages_of, cases)
    for position in range(len(cases)):
        of_ranks = {own[position] for own in messages}
        assert len(of_ranks) == 1
        message = of_ranks.pop()
        assert message.startswith(
            f"InputError: rank {world_size - 1}, step 0: an id of feature 'f' is out of range"
        )
        assert f"got: {bad};" in message
        if bad in (5, 49):
            assert "table 'small'" in message
            assert "allowed: 0..4" in message


def test_the_last_row_is_in_range(groups: Groups) -> None:
    cases = [two_table_case([kind, kind], [[[[0, 4]]], [[[4]]]]) for kind in SHARDING_TYPES]
    outcomes = per_case(groups[2].run(runtime_cases.train_many, cases))
    for case, of_case in zip(cases, outcomes, strict=True):
        check_equal(case, of_case)


@pytest.mark.parametrize("mode", [IdsMode.WARNING, IdsMode.IGNORE])
def test_other_modes_look_row_0_up(groups: Groups, mode: IdsMode) -> None:
    cases = [two_table_case(["0", kind], [[[[1, 7]]], [[[3, 70, -9]]]]) for kind in SHARDING_TYPES]
    for case in cases:
        case.ids_mode = mode
    for case, outcomes in zip(
        cases, per_case(groups[2].run(runtime_cases.train_many, cases)), strict=True
    ):
        # 70 and -9 are out of range for both tables, 7 for `small` only.
        want = [1, 4] if mode is IdsMode.WARNING else [0, 0]
        assert [outcome.num_out_of_range for outcome in outcomes] == want
        whole = assembled(case.plan, outcomes)
        # SGD with learning rate 1/4 and gradients over 2 ranks: 1/8 per occurrence.
        large, small = whole["large"][0], whole["small"][0]
        assert large[[0, 1, 3, 7], 0].tolist() == [-0.25, -0.125, -0.125, -0.125]
        assert small[[0, 1, 3], 0].tolist() == [-0.75, -0.25, -0.25]
        assert large.count_nonzero() == 16
        assert small.count_nonzero() == 12


@pytest.mark.parametrize("optimizer", CPU_OPTIMIZERS)
def test_empty_batches_are_normal(groups: Groups, optimizer: Optimizer) -> None:
    """One rank without samples, then all ranks; then only empty bags, on one rank and on all."""
    cases = []
    for kind in SHARDING_TYPES:
        rng = random.Random(f"empty/{kind.value}")
        case = random_case(rng, 3, optimizer, kinds=[kind], num_steps=5)
        features = case.batches[0][0].bags
        nothing = ReferenceBatch({f: [] for f in features}, {f: [] for f in features})
        hollow = ReferenceBatch({f: [[], []] for f in features}, {f: [[], []] for f in features})
        case.batches[0][0] = case.batches[2][1] = nothing
        case.batches[1][2] = hollow
        for own in case.batches:
            own[1], own[3] = nothing, hollow
        cases.append(case)
    for case, outcomes in zip(
        cases, per_case(groups[3].run(runtime_cases.train_many, cases)), strict=True
    ):
        check_equal(case, outcomes)


def test_steps_without_ids_change_nothing(groups: Groups) -> None:
    nothing: list[list[list[int]]] = [[], [[]], [[], []]]
    for optimizer in CPU_OPTIMIZERS:
        cases = [two_table_case([kind, kind], [nothing, nothing]) for kind in SHARDING_TYPES]
        for case in cases:
            tables = [entry.table for entry in case.plan.tables]
            kinds = [entry.sharding_type for entry in case.plan.tables]
            case.plan = make_plan(tables, kinds, 2, optimizer)
            case.weights = {n: torch.ones_like(w) for n, w in (case.weights or {}).items()}
        for case, outcomes in zip(
            cases, per_case(groups[2].run(runtime_cases.train_many, cases)), strict=True
        ):
            for weights, states in assembled(case.plan, outcomes).values():
                assert torch.equal(weights, torch.ones_like(weights))
                assert not any(state.any() for state in states.values())


def test_a_batch_beyond_the_plan_stops_everybody(groups: Groups) -> None:
    cases = [two_table_case([kind, kind], [[[[1]]], [[[1]] * 5]]) for kind in SHARDING_TYPES]
    messages = groups[2].run(runtime_cases.messages_of, cases)
    for first, second in zip(*messages, strict=True):
        assert "rank 0, step 0: rank 1 failed to prepare its batch" in first
        assert second.startswith("InputError: rank 1: the batch is larger than the plan allows")
        assert "got: 5 samples; allowed: 0..4" in second


def test_a_missing_feature_is_named(groups: Groups) -> None:
    cases = [two_table_case([kind, kind], [[[[1]]], [[[1]]]]) for kind in SHARDING_TYPES]
    for case in cases:
        case.batches[0][0] = ReferenceBatch({"other": [[1]]}, {})
    messages = groups[2].run(runtime_cases.messages_of, cases)
    for first, second in zip(*messages, strict=True):
        assert "lacks features of the plan; got: f;" in first
        assert "rank 0 failed" in second


def test_features_may_come_in_any_order_and_more_than_needed(groups: Groups) -> None:
    cases = []
    for kind in SHARDING_TYPES:
        case = random_case(random.Random(f"order/{kind.value}"), 2, Optimizer.SGD, kinds=[kind])
        for own in case.batches:
            for step, batch in enumerate(own):
                names = ["unused", *reversed(batch.bags)]
                bags = {"unused": [[99]] * batch.num_samples, **batch.bags}
                weights = {"unused": [[9.0]] * batch.num_samples, **batch.weights}
                own[step] = ReferenceBatch(
                    {n: bags[n] for n in names}, {n: weights[n] for n in names}
                )
        cases.append(case)
    for case, outcomes in zip(
        cases, per_case(groups[2].run(runtime_cases.train_many, cases)), strict=True
    ):
        check_equal(case, outcomes)


@pytest.mark.parametrize("pooling", list(PoolingType))
def test_rows_that_are_not_numbers_stay_in_their_bags(groups: Groups, pooling: PoolingType) -> None:
    """As in one process: NaN reaches its own sample's output and the rows of its bag."""
    table = Table(
        name="t",
        num_embeddings=6,
        embedding_dim=3,
        pooling_factor=1,
        weighted=True,
        pooling=pooling,
    )
    batch = ReferenceBatch({"t": [[0, 1], [2, 3]]}, {"t": [[1.0, 2.0], [3.0, 1.0]]})
    other = ReferenceBatch({"t": [[4], [0]]}, {"t": [[1.0], [3.0]]})
    initial = torch.ones(6, 3)
    initial[2] = torch.nan
    cases = [
        Case(
            make_plan([table], [kind], 2),
            [[batch, other], [other, other]],
            {"t/t": torch.ones(3), "quadratic": torch.ones(1)},
            {"t": initial},
        )
        for kind in SHARDING_TYPES
    ]
    for case, outcomes in zip(
        cases, per_case(groups[2].run(runtime_cases.train_many, cases)), strict=True
    ):
        trainer = reference_of(case)
        for step in range(2):
            trainer.step([own[step] for own in case.batches], case.coefficients)
        weights, _ = assembled(case.plan, outcomes)["t"]
        assert outcomes[0].outputs[0]["t/t"].isnan().tolist() == [[False] * 3, [True] * 3]
        assert weights.isnan().any(1).tolist() == [False, False, True, True, False, False]
        torch.testing.assert_close(weights, trainer.tables["t"].weights, equal_nan=True)
