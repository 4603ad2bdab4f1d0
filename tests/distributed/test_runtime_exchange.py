"""What travels: one collective per phase, and bytes that follow the batch, not the tables."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch

from autoshard.problem import Optimizer
from autoshard.runtime.group import WorkerGroup
from autoshard.runtime.headers import HEADER_SIZE
from autoshard.shards import ShardingType, replica_exchange
from autoshard.tables import Table
from tests.distributed import runtime_cases, traffic_cases
from tests.distributed.model_cases import SHARDING_TYPES, make_plan, random_case
from tests.distributed.runtime_cases import Case
from tests.reference_trainer import ReferenceBatch

Groups = dict[int, WorkerGroup]


#: Rank 0 touches 3 distinct rows with 4 ids in 4 bags, rank 1 one row in one, rank 2 nothing.
BAGS = ([[1, 2], [3], [], [1]], [[2]], [])
UNIQUE, IDS, SAMPLES = (3, 1, 0), (4, 1, 0), (4, 1, 0)
DIM = 8


def one_table_case(
    kind: ShardingType, num_embeddings: int, *, pooling_factor: float = 1.0, weighted: bool = False
) -> Case:
    table = Table(
        name="t",
        num_embeddings=num_embeddings,
        embedding_dim=DIM,
        pooling_factor=pooling_factor,
        weighted=weighted,
    )
    batches = [
        [ReferenceBatch({"t": bags}, {"t": [[0.5] * len(bag) for bag in bags]})] for bags in BAGS
    ]
    return Case(make_plan([table], [kind], 3), batches)


def replica_case(num_embeddings: int, *, by_bag: bool, weighted: bool = False) -> Case:
    """Replicas that exchange bags, as many ids per bag make it worth while, or rows."""
    case = one_table_case(
        ShardingType.DATA_PARALLEL,
        num_embeddings,
        pooling_factor=16.0 if by_bag else 1.0,
        weighted=weighted,
    )
    table, training = case.plan.tables[0].table, case.plan.training
    assert replica_exchange(table, training, 3).by_bag is by_bag
    return case


@pytest.mark.parametrize("weighted", [False, True])
def test_replicas_send_only_what_the_step_touched(groups: Groups, weighted: bool) -> None:
    """To each of two others: rows as int64 and their sums as fp32, or ids and bags."""
    sizes = (1_000, 30_000)
    cases = [
        replica_case(size, by_bag=by_bag, weighted=weighted)
        for by_bag in (False, True)
        for size in sizes
    ]
    ranks = groups[3].run(traffic_cases.traffic, cases)
    # Beside the status, the size of the ids; by row, the number of touched rows as well.
    status = 2 * 8 * (HEADER_SIZE + 1)
    status_and_rows = status + 2 * 8
    for rank, (by_row, by_row_large, by_bag, by_bag_large) in enumerate(ranks):
        assert [operation for operation, _ in by_row] == ["all_to_all_single"] * 2
        assert [sent for _, sent in by_row] == [status_and_rows, 2 * UNIQUE[rank] * (8 + 4 * DIM)]
        # Two fp32 weights fit into one int64.
        packed = (IDS[rank] + 1) // 2 if weighted else 0
        ids = 2 * 8 * (SAMPLES[rank] + IDS[rank] + packed)
        assert [operation for operation, _ in by_bag] == ["all_to_all_single"] * 3
        assert [sent for _, sent in by_bag] == [status, ids, 2 * SAMPLES[rank] * 4 * DIM]
        assert by_row_large == by_row
        assert by_bag_large == by_bag


def test_replicas_send_nothing_but_the_step_status_without_gradients(groups: Groups) -> None:
    cases = [replica_case(1_000, by_bag=by_bag) for by_bag in (False, True)]
    by_row = [("all_to_all_single", 2 * 8 * (HEADER_SIZE + 2))]
    by_bag = [("all_to_all_single", 2 * 8 * (HEADER_SIZE + 1))]
    for own in groups[3].run(traffic_cases.evaluation_traffic, cases):
        assert own == [by_row, by_bag]


def test_a_whole_table_gets_ids_and_returns_sums(groups: Groups) -> None:
    """`spread_shards` puts it on rank 2, which sends 8 columns to ranks with 4 and 1 samples."""
    case = one_table_case(ShardingType.TABLE_WISE, 1_000)
    for rank, own in enumerate(groups[3].run(traffic_cases.traffic, [case])):
        of_phase = [sent for _, sent in own[0]]
        is_owner = rank == 2
        assert of_phase[1:] == [
            0 if is_owner else 8 * (SAMPLES[rank] + IDS[rank]),
            4 * DIM * (4 + 1) if is_owner else 0,
            0 if is_owner else 4 * DIM * SAMPLES[rank],
        ]


def test_slices_of_rows_get_their_own_ids(groups: Groups) -> None:
    """Row 0 lies on rank 2, row 1 on rank 1, all others on rank 0; sums of whole rows return."""
    case = one_table_case(ShardingType.ROW_WISE, 1_000)
    ids, outputs, gradients = zip(
        *([sent for _, sent in own[0]][1:] for own in groups[3].run(traffic_cases.traffic, [case])),
        strict=True,
    )
    # Lengths go to both others; of rank 0's ids, row 1 twice to rank 1; rank 1's to rank 0.
    assert ids == (8 * (2 * 4 + 2), 8 * (2 * 1 + 1), 0)
    assert outputs == (4 * DIM * 1, 4 * DIM * 4, 4 * DIM * (4 + 1))
    assert gradients == (2 * 4 * DIM * 4, 2 * 4 * DIM * 1, 0)


def test_no_exchange_grows_with_the_tables(groups: Groups) -> None:
    kinds = list(SHARDING_TYPES)
    small = [one_table_case(kind, 50) for kind in kinds]
    large = [one_table_case(kind, 30_000) for kind in kinds]
    for own in groups[3].run(traffic_cases.traffic, small + large):
        assert own[: len(kinds)] == own[len(kinds) :]
        for collectives in own:
            assert {operation for operation, _ in collectives} == {"all_to_all_single"}


def test_each_step_has_one_collective_per_phase(groups: Groups) -> None:
    """However many tables, types and features there are."""
    rng = random.Random("phases")
    tables = [
        Table(
            name=f"t{i}", num_embeddings=9, embedding_dim=6, pooling_factor=1, weighted=i % 2 == 0
        )
        for i in range(12)
    ]
    mixed = random_case(rng, 3, Optimizer.ADAGRAD, tables=tables)
    mixed.plan = make_plan(tables, SHARDING_TYPES * 2, 3, Optimizer.ADAGRAD)
    replicas = replica_case(50, by_bag=False)
    replicas.coefficients = {"t/t": torch.ones(DIM)}
    for outcome in groups[3].run(runtime_cases.train_many, [mixed, replicas]):
        # Ids ride on the status once ranks know how much room to leave for them.
        assert outcome[0].phases[0] == {"ids", "late_ids", "outputs", "gradients"}
        assert [phases - {"late_ids"} for phases in outcome[0].phases] == [
            {"ids", "outputs", "gradients"}
        ] * 3
        assert outcome[1].phases == [{"control", "gradients"}]
    for own in groups[3].run(traffic_cases.traffic, [mixed]):
        assert [operation for operation, _ in own[0]] == ["all_to_all_single"] * 4


def test_bytes_held_follow_from_the_plan(groups: Groups) -> None:
    """Fp32 columns padded to multiples of 4, and one fp32 state per row and shard."""
    tables = [
        Table(name=name, num_embeddings=rows, embedding_dim=dim, pooling_factor=1)
        for name, rows, dim in (("a", 1000, 8), ("b", 500, 6), ("c", 100, 4), ("d", 40, 9))
    ]
    kinds = ["0", "1", "dp", ShardingType.COLUMN_WISE]
    plan = make_plan(tables, kinds, 2, Optimizer.ROWWISE_ADAGRAD)
    case = Case(plan, [[], []])
    outcomes = groups[2].run(runtime_cases.train, case)
    assert [set(outcome.held_tables) for outcome in outcomes] == [set("acd"), set("bcd")]
    replica = 100 * (4 * 4 + 4)
    # Of `d`, rank 1 holds one column, padded to 4, and rank 0 the other eight.
    want = [
        1000 * (8 * 4 + 4) + replica + 40 * (8 * 4 + 4),
        500 * (8 * 4 + 4) + replica + 40 * (4 * 4 + 4),
    ]
    assert [outcome.allocated_bytes for outcome in outcomes] == want


def test_a_table_with_several_features_is_sent_one_stream_each(groups: Groups) -> None:
    """Two slices of columns on one rank need the ids of each feature once, not twice."""
    table = Table(
        name="t", num_embeddings=9, embedding_dim=8, pooling_factor=1, feature_names=("f", "g")
    )
    whole = make_plan([table], ["1"], 2)
    entry = whole.tables[0]
    halves = tuple(replace(entry.shards[0], num_cols=4, col_offset=offset) for offset in (0, 4))
    split = replace(
        whole, tables=(replace(entry, sharding_type=ShardingType.COLUMN_WISE, shards=halves),)
    )
    batch = ReferenceBatch({"f": [[1, 2]], "g": [[3]]}, {})
    cases = [Case(plan, [[batch], [batch]]) for plan in (whole, split)]
    first, second = groups[2].run(traffic_cases.traffic, cases)[0]
    assert first == second
    assert first[1] == ("all_to_all_single", 8 * (2 * 1 + 3))
