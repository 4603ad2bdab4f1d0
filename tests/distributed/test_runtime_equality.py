"""W ranks give what one process on the concatenated batch gives, for every sharding type."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from autoshard.problem import Optimizer
from autoshard.runtime.group import WorkerGroup
from autoshard.shards import Shard, ShardingType
from autoshard.tables import DataType, PoolingType, Table
from tests.distributed import runtime_cases
from tests.distributed.equality_checks import assembled, check_equal, check_exact
from tests.distributed.model_cases import (
    CPU_OPTIMIZERS,
    EPS,
    LEARNING_RATE,
    SHARDING_TYPES,
    make_plan,
    random_case,
    reference_of,
    tables_of_every_pooling,
)
from tests.distributed.runtime_cases import Case, Outcome, run_ranks
from tests.reference_trainer import ReferenceBatch

Groups = dict[int, WorkerGroup]
WORLD_SIZES = (1, 2, 3, 4)
KINDS = [*([kind] for kind in SHARDING_TYPES), list(SHARDING_TYPES)]

each_kind = pytest.mark.parametrize(
    "kinds", KINDS, ids=lambda kinds: kinds[0].value if len(kinds) == 1 else "mixed"
)
each_world_size = pytest.mark.parametrize("world_size", WORLD_SIZES)


def run_cases(groups: Groups, world_size: int, cases: list[Case]) -> list[list[Outcome]]:
    """What every rank has, per case; one call for all cases."""
    per_rank = run_ranks(groups, world_size, runtime_cases.train_many, cases)
    return [list(of_case) for of_case in zip(*per_rank, strict=True)]


@each_kind
@each_world_size
def test_every_optimizer_and_pooling_agrees(
    groups: Groups, kinds: list[ShardingType], world_size: int
) -> None:
    cases = []
    for optimizer in CPU_OPTIMIZERS:
        rng = random.Random(f"{kinds[0].value}/{len(kinds)}/{world_size}/{optimizer.value}")
        tables = tables_of_every_pooling(rng, DataType.FP32)
        cases.append(random_case(rng, world_size, optimizer, kinds=kinds, tables=tables))
    for case, outcomes in zip(cases, run_cases(groups, world_size, cases), strict=True):
        check_equal(case, outcomes)


@each_kind
@each_world_size
def test_exact_values_are_equal_to_the_last_bit(
    groups: Groups, kinds: list[ShardingType], world_size: int
) -> None:
    """SGD entirely; Adagrad's state, which sums squares of gradients that are exact."""
    rng = random.Random(f"exact/{kinds[0].value}/{len(kinds)}/{world_size}")
    cases = [
        random_case(rng, world_size, optimizer, exact=True, kinds=kinds)
        for optimizer in (Optimizer.SGD, Optimizer.SGD, Optimizer.ADAGRAD)
    ]
    outcomes = run_cases(groups, world_size, cases)
    check_exact(cases[0], outcomes[0])
    check_exact(cases[1], outcomes[1])
    trainer = reference_of(cases[2])
    for step in range(len(cases[2].batches[0])):
        trainer.step([own[step] for own in cases[2].batches], cases[2].coefficients)
    for name, (_, states) in assembled(cases[2].plan, outcomes[2]).items():
        assert torch.equal(states["sum"], trainer.tables[name].states["sum"])


@each_kind
@each_world_size
def test_half_precision_weights_agree(
    groups: Groups, kinds: list[ShardingType], world_size: int
) -> None:
    cases = []
    for optimizer in CPU_OPTIMIZERS:
        rng = random.Random(f"half/{kinds[0].value}/{len(kinds)}/{world_size}/{optimizer.value}")
        cases.append(random_case(rng, world_size, optimizer, kinds=kinds, data_type=None))
    for case, outcomes in zip(cases, run_cases(groups, world_size, cases), strict=True):
        # One unit in the last place of fp16 per step.
        check_equal(case, outcomes, rtol=4e-3, atol=4e-3)


@each_kind
@pytest.mark.parametrize(
    ("optimizer", "factor"),
    [
        (Optimizer.SGD, 2.0**-9),
        (Optimizer.SGD, 4097 * 2.0**-9),
        (Optimizer.ADAGRAD, 4097 * 2.0**-9),
    ],
    ids=("weights", "steps", "adagrad's steps"),
)
def test_half_precision_rounds_as_documented(
    groups: Groups, kinds: list[ShardingType], optimizer: Optimizer, factor: float
) -> None:
    """Sums that are exact in fp32: only roundings to fp16 are left.

    With the small factor, of weights, steps being exact; with the large one, of steps, too.
    """
    rng = random.Random(f"rounding/{kinds[0].value}/{len(kinds)}")
    cases = [
        random_case(rng, 2, optimizer, exact=True, kinds=kinds, data_type=DataType.FP16)
        for _ in range(3)
    ]
    for case in cases:
        case.coefficients = {name: c * factor for name, c in case.coefficients.items()}
    for case, outcomes in zip(cases, run_cases(groups, 2, cases), strict=True):
        if optimizer is Optimizer.SGD:
            check_exact(case, outcomes)
        else:  # square roots and quotients round in fp32
            check_equal(case, outcomes, rtol=2.0**-10, atol=1e-6)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_replicas_stay_equal_to_the_last_bit(groups: Groups, world_size: int) -> None:
    """`assembled` compares them; values here are of the kind that rounds."""
    cases = [
        random_case(random.Random(7), world_size, optimizer, kinds="dp", num_steps=6)
        for optimizer in CPU_OPTIMIZERS
    ]
    for case, outcomes in zip(cases, run_cases(groups, world_size, cases), strict=True):
        assembled(case.plan, outcomes)


@each_kind
def test_every_width_agrees(groups: Groups, kinds: list[ShardingType]) -> None:
    """Columns that the kernels pad by 0 to 3, in slices that are padded on their own."""
    rng = random.Random("widths")
    for start in (1, 8, 15):
        tables = [
            Table(
                name=f"t{dim}",
                num_embeddings=5,
                embedding_dim=dim,
                pooling_factor=2,
                weighted=dim % 3 == 0,
                pooling=PoolingType.MEAN if dim % 2 else PoolingType.SUM,
            )
            for dim in range(start, start + 7)
        ]
        case = random_case(rng, 3, Optimizer.ROWWISE_ADAGRAD, kinds=kinds, tables=tables)
        check_equal(case, run_cases(groups, 3, [case])[0])


@each_kind
def test_more_ranks_than_rows_and_columns(groups: Groups, kinds: list[ShardingType]) -> None:
    tables = [
        Table(name="one", num_embeddings=1, embedding_dim=1, pooling_factor=1),
        Table(name="row", num_embeddings=1, embedding_dim=9, pooling_factor=1),
        Table(name="column", num_embeddings=9, embedding_dim=1, pooling_factor=1),
    ]
    rng = random.Random("tiny")
    cases = [
        random_case(rng, 4, optimizer, kinds=kinds, tables=tables) for optimizer in CPU_OPTIMIZERS
    ]
    for case, outcomes in zip(cases, run_cases(groups, 4, cases), strict=True):
        check_equal(case, outcomes)


def test_blocks_of_no_rows_are_normal(groups: Groups) -> None:
    """Rank 1 holds all rows; the blocks before and after it are empty."""
    table = Table(name="t", num_embeddings=4, embedding_dim=3, pooling_factor=1)
    shards = [Shard(2, 0, 0, 0, 3), Shard(1, 0, 0, 4, 3), Shard(0, 4, 0, 0, 3)]
    rng = random.Random("empty blocks")
    for optimizer in CPU_OPTIMIZERS:
        case = random_case(rng, 3, optimizer, tables=[table])
        case.plan = make_plan(
            [table], [shards], 3, optimizer, sharding_types=[ShardingType.ROW_WISE]
        )
        check_equal(case, run_cases(groups, 3, [case])[0])


def test_one_duplicated_id_is_updated_once(groups: Groups) -> None:
    """Row 1 four times with gradient 1 each: the state is 4² = 16, not 4 · 1²."""
    table = Table(
        name="t", num_embeddings=3, embedding_dim=4, pooling_factor=1, feature_names=("f",)
    )
    batch = ReferenceBatch({"f": [[1, 1, 1, 1]]}, {})
    cases = [
        Case(
            make_plan([table], [kind], 2, Optimizer.ADAGRAD),
            [[batch], [batch]],
            {"t/f": torch.ones(4)},
            {"t": torch.zeros(3, 4)},
        )
        for kind in SHARDING_TYPES
    ]
    # Two ranks with 4 each, divided by 2 ranks.
    want = torch.full((4,), -LEARNING_RATE * 4 / (4 + EPS))
    for case, outcomes in zip(cases, run_cases(groups, 2, cases), strict=True):
        weights, states = assembled(case.plan, outcomes)["t"]
        assert torch.equal(states["sum"][1], torch.full((4,), 16.0))
        torch.testing.assert_close(weights[1], want)
        assert torch.equal(weights[0], torch.zeros(4))


def test_row_states_of_cut_columns_are_means_of_their_part(groups: Groups) -> None:
    """Gradients 1, 2, 3, 4, 5 over columns [0, 1), [1, 5): means of squares 1 and 54 / 4."""
    table = Table(name="t", num_embeddings=2, embedding_dim=5, pooling_factor=1)
    plan = make_plan([table], [ShardingType.COLUMN_WISE], 2, Optimizer.ROWWISE_ADAGRAD)
    batch = ReferenceBatch({"t": [[1]]}, {})
    coefficients = {"t/t": torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0])}
    case = Case(plan, [[batch], [batch]], coefficients, {"t": torch.zeros(2, 5)})
    outcomes = run_cases(groups, 2, [case])[0]
    weights, states = assembled(plan, outcomes)["t"]
    torch.testing.assert_close(states["sum"][1], torch.tensor([1, 13.5, 13.5, 13.5, 13.5]))
    assert not states["sum"][0].any()
    scale = LEARNING_RATE / (torch.tensor([1, 13.5, 13.5, 13.5, 13.5]).sqrt() + EPS)
    torch.testing.assert_close(weights[1], -scale * coefficients["t/t"])


@each_world_size
def test_initial_weights_do_not_depend_on_the_plan(groups: Groups, world_size: int) -> None:
    rng = random.Random(3)
    case = random_case(rng, world_size, Optimizer.SGD)
    tables = [entry.table for entry in case.plan.tables]
    cases = [
        random_case(rng, world_size, Optimizer.SGD, tables=tables, kinds=kinds, num_steps=0)
        for kinds in KINDS
    ]
    for other in cases:
        other.weights = None
    whole = [
        assembled(other.plan, outcomes)
        for other, outcomes in zip(cases, run_cases(groups, world_size, cases), strict=True)
    ]
    for table in tables:
        first = whole[0][table.name][0]
        assert 0 < first.abs().max() <= table.num_embeddings**-0.5
        for other_whole in whole[1:]:
            assert torch.equal(other_whole[table.name][0], first)


def test_integer_types_make_no_difference(groups: Groups) -> None:
    case = random_case(random.Random(9), 2, Optimizer.SGD)
    variants = []
    for ids in (torch.int32, torch.int64):
        for lengths in (torch.int32, torch.int64):
            variant = copy.copy(case)
            variant.id_dtype, variant.length_dtype = ids, lengths
            variants.append(variant)
    first, *others = run_cases(groups, 2, variants)
    want = assembled(case.plan, first)
    for outcomes in others:
        for name, (weights, _) in assembled(case.plan, outcomes).items():
            assert torch.equal(weights, want[name][0])
