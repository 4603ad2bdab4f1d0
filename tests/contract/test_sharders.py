"""What every registered sharder owes its callers: whole, legal, repeatable plans, or one error."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest

from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.errors import ArtifactError, InfeasibleError, InputError
from autoshard.files import canonical_json
from autoshard.planning import POLICY_SHARDERS, compare_sharders, make_plan
from autoshard.policies import Policy, load_policy
from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.protocols import Assignment, SearchBudget, Sharder
from autoshard.sharders.registry import make_sharder, sharder_names
from autoshard.shards import ShardingType, ShardSlice, fixed_rank_bytes, shard_load
from autoshard.tables import DataType, Table
from autoshard.topology import Topology
from tests.placement_cases import random_tables

COST_MODEL = AnalyticCostModel()
TRAINING = TrainingConfig(batch_size=64)
BUDGET = SearchBudget(num_evaluations=3000)


@cache
def shipped_policy() -> Policy:
    try:
        return load_policy("default")
    except ArtifactError as error:
        pytest.skip(f"no usable policy is shipped: {error}")


@pytest.fixture(params=sharder_names())
def sharder(request: pytest.FixtureRequest) -> Sharder:
    if request.param in POLICY_SHARDERS:
        return make_sharder(request.param, policy=shipped_policy())
    return make_sharder(request.param)


def problem_of(
    tables: Sequence[Table], rooms: Sequence[int], training: TrainingConfig = TRAINING
) -> ShardingProblem:
    """Ranks that have `rooms` bytes for shards."""
    roomless = ShardingProblem(
        tables=tuple(tables), topology=Topology.uniform(1, 0), training=training
    )
    fixed = sum(fixed_rank_bytes(roomless).values())
    topology = Topology(world_size=len(rooms), hbm_bytes=tuple(room + fixed for room in rooms))
    return dataclasses.replace(roomless, topology=topology)


def needs(
    tables: Sequence[Table], world_size: int, training: TrainingConfig = TRAINING
) -> list[int]:
    return [
        shard_load(ShardSlice.whole(table), training, world_size).memory_bytes for table in tables
    ]


def table(name: str, rows: int, dim: int, pooling_factor: float = 3.0) -> Table:
    return Table(name=name, num_embeddings=rows, embedding_dim=dim, pooling_factor=pooling_factor)


def roomy(tables: Sequence[Table], world_size: int) -> ShardingProblem:
    return problem_of(tables, [sum(needs(tables, world_size))] * world_size)


SMALL = [table(f"s{i}", 50 * (i + 1), 8, i + 1.0) for i in range(5)]


def uneven() -> ShardingProblem:
    tables = random_tables(10, seed=3)
    need = needs(tables, 4)
    return problem_of(tables, [sum(need), 0, max(need), sum(need) // 2])


def wider_than_any_rank() -> ShardingProblem:
    tables = [table("wide", 20_000, 64), *SMALL]
    return problem_of(tables, [needs(tables, 4)[0] // 2 + 200_000] * 4)


def deeper_than_any_rank() -> ShardingProblem:
    tables = [table("deep", 400_000, 4), *SMALL]
    return problem_of(tables, [needs(tables, 4)[0] // 2 + 200_000] * 4)


def two_giants() -> ShardingProblem:
    tables = [table("a", 50_000, 32), table("b", 50_000, 32), table("c", 10, 8)]
    return problem_of(tables, [int(max(needs(tables, 4)) * 0.9)] * 4)


def of_every_kind() -> ShardingProblem:
    training = TrainingConfig(batch_size=16, optimizer=Optimizer.ADAM, batches_in_flight=3)
    tables = [
        Table(
            name=f"k{i}", num_embeddings=10 + 100 * i, embedding_dim=1 + 5 * i,
            pooling_factor=i / 2, feature_names=tuple(f"k{i}f{j}" for j in range(1 + i % 3)),
            data_type=DataType.FP16 if i % 2 else DataType.FP32, weighted=i % 3 == 0,
        )
        for i in range(9)
    ]  # fmt: skip
    return problem_of(tables, [sum(needs(tables, 3, training))] * 3, training)


PROBLEMS: dict[str, Callable[[], ShardingProblem]] = {
    "12 tables on 3 ranks": lambda: roomy(random_tables(12), 3),
    "one rank": lambda: roomy(random_tables(5), 1),
    "one table": lambda: roomy(random_tables(1), 4),
    "one table on one rank, to the byte": lambda: problem_of(
        random_tables(1), needs(random_tables(1), 1)
    ),
    "more ranks than tables": lambda: roomy(random_tables(3), 9),
    "equal tables": lambda: roomy([table(f"e{i}", 100, 8) for i in range(7)], 3),
    "no lookups": lambda: roomy([table(f"z{i}", 100 + i, 8, 0.0) for i in range(5)], 2),
    "uneven memory, one rank without any": uneven,
    "split by columns": wider_than_any_rank,
    "split by rows": deeper_than_any_rank,
    "two split tables": two_giants,
    "every kind of table": of_every_kind,
}


def check(problem: ShardingProblem, assignment: Assignment) -> None:
    """Whole tables, ranks that exist, siblings apart, memory kept."""
    world_size = problem.topology.world_size
    assert len(assignment.slices) == len(assignment.ranks)
    held: dict[str, list[tuple[ShardSlice, int]]] = defaultdict(list)
    used = [0] * world_size
    for slice_, rank in zip(assignment.slices, assignment.ranks, strict=True):
        assert type(rank) is int
        assert 0 <= rank < world_size
        held[slice_.table.name].append((slice_, rank))
        used[rank] += shard_load(slice_, problem.training, world_size).memory_bytes
    assert set(held) == {entry.name for entry in problem.tables}
    for entry in problem.tables:
        parts = [slice_ for slice_, _ in held[entry.name]]
        ranks = [rank for _, rank in held[entry.name]]
        assert len(set(ranks)) == len(ranks), f"siblings of {entry.name} share a rank"
        # Each cell once: no two parts begin alike, and the areas add up along one axis.
        assert all(part.table == entry for part in parts)
        rows = sorted({(part.row_offset, part.num_rows) for part in parts})
        cols = sorted({(part.col_offset, part.num_cols) for part in parts})
        assert len(parts) == max(len(rows), len(cols))
        assert min(len(rows), len(cols)) == 1
        for spans, total in ((rows, entry.num_embeddings), (cols, entry.embedding_dim)):
            end = 0
            for offset, length in spans:
                assert (offset, length > 0) == (end, True)
                end += length
            assert end == total
    fixed = sum(fixed_rank_bytes(problem).values())
    for rank in range(world_size):
        if used[rank]:
            assert used[rank] + fixed <= problem.topology.hbm_bytes[rank]


@pytest.mark.parametrize("case", PROBLEMS)
def test_everything_is_placed_within_memory(sharder: Sharder, case: str) -> None:
    problem = PROBLEMS[case]()
    assignment = sharder.assign(problem, COST_MODEL, seed=0, budget=BUDGET)
    check(problem, assignment)
    assert not assignment.cut_short  # nothing limits the time
    assert assignment.num_evaluations >= 0


def test_oversized_tables_are_split(sharder: Sharder) -> None:
    for case, expected in (
        ("split by columns", ShardingType.COLUMN_WISE),
        ("split by rows", ShardingType.ROW_WISE),
    ):
        problem = PROBLEMS[case]()
        assignment = sharder.assign(problem, COST_MODEL, seed=0, budget=BUDGET)
        types = [s.sharding_type for s in assignment.slices if s.table is problem.tables[0]]
        assert types == [expected] * len(types)
        assert len(types) >= 2


@pytest.mark.parametrize("seed", range(6))
def test_random_problems_with_little_memory_are_solved_legally_or_refused(
    sharder: Sharder, seed: int
) -> None:
    generator = np.random.default_rng(seed)
    world_size = int(generator.integers(2, 6))
    tables = random_tables(int(generator.integers(3, 20)), seed=seed)
    share = sum(needs(tables, world_size)) / world_size
    problem = problem_of(
        tables, [int(share * generator.uniform(0.7, 1.8)) for _ in range(world_size)]
    )
    try:
        assignment = sharder.assign(problem, COST_MODEL, seed=seed, budget=BUDGET)
    except InfeasibleError:
        return
    check(problem, assignment)


def test_the_seed_decides_everything(sharder: Sharder) -> None:
    problem = PROBLEMS["12 tables on 3 ranks"]()
    options = {"policy": shipped_policy()} if sharder.name in POLICY_SHARDERS else {}
    for seed in (0, 7):
        first = sharder.assign(problem, COST_MODEL, seed=seed, budget=BUDGET)
        second = sharder.assign(problem, COST_MODEL, seed=seed, budget=BUDGET)
        fresh = make_sharder(sharder.name, **options).assign(
            problem, COST_MODEL, seed=seed, budget=BUDGET
        )
        assert first == second == fresh


def test_plans_are_equal_byte_for_byte(sharder: Sharder) -> None:
    problem = PROBLEMS["two split tables"]()
    policy = shipped_policy() if sharder.name in POLICY_SHARDERS else "default"
    texts = {
        canonical_json(
            make_plan(
                problem, sharder=sharder.name, cost_model=COST_MODEL, budget=BUDGET, policy=policy
            ).to_json()
        )
        for _ in range(2)
    }
    assert len(texts) == 1


@pytest.mark.parametrize(
    "budget",
    [
        SearchBudget(num_evaluations=1),
        SearchBudget(num_evaluations=0),
        SearchBudget(time_limit_s=0.0),
    ],
)
def test_the_smallest_budget_still_gives_a_whole_plan(
    sharder: Sharder, budget: SearchBudget
) -> None:
    problem = PROBLEMS["12 tables on 3 ranks"]()
    assignment = sharder.assign(problem, COST_MODEL, seed=0, budget=budget)
    check(problem, assignment)
    if sharder.name == "autoshard":
        assert assignment.cut_short == (budget.time_limit_s is not None)


def test_no_room_for_the_last_table_is_said_with_name_and_bytes(sharder: Sharder) -> None:
    tables = [table(f"block{i}", 30_000, 64) for i in range(3)]
    one = needs(tables, 2)[0]
    problem = problem_of(tables, [one + one // 4] * 2)
    with pytest.raises(InfeasibleError, match=r"'?block\d'?.*0\.00\d GiB needed") as caught:
        sharder.assign(problem, COST_MODEL, seed=0, budget=BUDGET)
    message = str(caught.value)
    assert f"{one / 2**30:.3f} GiB needed" in message
    assert "free on rank" in message
    assert f"{3 * one / 2**30:.3f} of {2 * (one + one // 4) / 2**30:.3f} GiB" in message
    assert "remedy: give more memory or ranks, or a smaller batch size" in message


def test_tables_that_no_split_fits_are_all_named(sharder: Sharder) -> None:
    tables = [table("giant", 10**9, 128), table("small", 10, 4), table("titan", 2 * 10**9, 128)]
    problem = problem_of(tables, [10**9] * 3)
    with pytest.raises(InfeasibleError, match=r"2 table\(s\).*giant \(480\..*titan \(961\."):
        sharder.assign(problem, COST_MODEL, seed=0, budget=BUDGET)


def test_inputs_are_left_as_they_were(sharder: Sharder) -> None:
    problem = PROBLEMS["split by columns"]()
    before = (problem, problem.topology.fingerprint, hash(problem.tables))
    sharder.assign(problem, COST_MODEL, seed=0, budget=BUDGET)
    assert (problem, problem.topology.fingerprint, hash(problem.tables)) == before


def test_comparing_shares_the_best_and_bounds_it(sharder: Sharder) -> None:
    policy = shipped_policy() if sharder.name in POLICY_SHARDERS else "default"
    results = compare_sharders(
        PROBLEMS["12 tables on 3 ranks"](),
        cost_model=COST_MODEL,
        sharders=("random", sharder.name),
        budget=BUDGET,
        policy=policy,
    )
    assert [result.sharder for result in results] == ["random", sharder.name]
    costs = [result.plan.cost for result in results if result.plan and result.plan.cost]
    assert len(costs) == 2
    best = min(cost.step.step_ms for cost in costs)
    assert {cost.best_known_ms for cost in costs} == {best}
    for cost in costs:
        assert cost.lower_bound_ms is not None
        assert 0 < cost.lower_bound_ms <= best * (1 + 1e-9)


def test_unknown_names_are_refused_with_the_nearest() -> None:
    with pytest.raises(InputError, match="did you mean 'cost_greedy'"):
        make_sharder("cost-greedy")


def test_random_takes_the_seed() -> None:
    problem = PROBLEMS["12 tables on 3 ranks"]()
    ranks = {
        make_sharder("random").assign(problem, COST_MODEL, seed=seed, budget=BUDGET).ranks
        for seed in range(5)
    }
    assert len(ranks) == 5
