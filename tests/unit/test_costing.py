"""A plan's cost against arithmetic by hand, and the lower bound against every placement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest

from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.costing import lower_bound_ms, predict_plan, predict_step
from autoshard.distributions import IdDistribution
from autoshard.objective import CostSource
from autoshard.plan import plan_from_slices
from autoshard.problem import ShardingProblem, TrainingConfig
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import Table
from autoshard.topology import Topology

Held = list[list[ShardSlice]]

MODEL = AnalyticCostModel(
    coefficients_ms_KP=(
        *((c, 0.0) for c in (3e-4, 2e-5, 7e-4, 4e-5, 1e-3, 6e-5)),
        *((0.0, c) for c in (1e-4, 5e-5, 1e-3, 9e-5, 2e-3, 3e-5, 4e-4, 7e-5)),
    ),
    shard_ms_P=(0.01, 0.03), overhead_ms_P=(0.2, 0.5), latency_ms=0.07, bytes_per_ms=4e3,
)  # fmt: skip
BATCH_SIZE = 5


def random_tables(num: int, generator: np.random.Generator) -> list[Table]:
    """Tables with equally likely ids, whose distinct rows have a closed form."""
    return [
        Table(
            name=f"t{index}",
            num_embeddings=int(generator.integers(8, 300)),
            embedding_dim=int(generator.choice([8, 12, 22])),
            pooling_factor=float(generator.choice([0.0, 0.5, 4.0, 11.0])),
            feature_names=("a", "b") if generator.random() < 0.3 else (),
            weighted=bool(generator.random() < 0.4),
        )
        for index in range(num)
    ]


def problem_of(tables: Sequence[Table], world_size: int) -> ShardingProblem:
    return ShardingProblem(
        tables=tuple(tables),
        topology=Topology.uniform(world_size, 2**40),
        training=TrainingConfig(batch_size=BATCH_SIZE),
    )


def cut(table: Table, how: str) -> list[ShardSlice]:
    rows, dim = table.num_embeddings, table.embedding_dim
    if how == "columns":
        kind = ShardingType.COLUMN_WISE
        return [
            ShardSlice(table, kind, 0, 0, rows, 4),
            ShardSlice(table, kind, 0, 4, rows, dim - 4),
        ]
    if how == "rows":
        kind = ShardingType.ROW_WISE
        return [ShardSlice(table, kind, 0, 0, 3, dim), ShardSlice(table, kind, 3, 0, rows - 3, dim)]
    if how == "replica":
        return [ShardSlice.whole(table, ShardingType.DATA_PARALLEL)]
    return [ShardSlice.whole(table)]


def random_slices(
    num_tables: int, world_size: int, seed: int
) -> tuple[ShardingProblem, list[ShardSlice]]:
    generator = np.random.default_rng(seed)
    tables = random_tables(num_tables, generator)
    kinds = ["whole", "replica"] + (["columns", "rows"] if world_size > 1 else [])
    slices = [s for table in tables for s in cut(table, str(generator.choice(kinds)))]
    return problem_of(tables, world_size), slices


def placements(slices: Sequence[ShardSlice], world_size: int) -> Iterator[Held]:
    """Every way to place the slices, with parts of one table on different ranks."""
    replicas = [s for s in slices if s.sharding_type is ShardingType.DATA_PARALLEL]
    placed = [s for s in slices if s.sharding_type is not ShardingType.DATA_PARALLEL]
    for ranks in itertools.product(range(world_size), repeat=len(placed)):
        names = [(s.table.name, rank) for s, rank in zip(placed, ranks, strict=True)]
        if len(set(names)) == len(names):
            held: Held = [list(replicas) for _ in range(world_size)]
            for slice_, rank in zip(placed, ranks, strict=True):
                held[rank].append(slice_)
            yield held


def rows_are_exchanged(table: Table, bags: int) -> bool:
    """Whether a replica's own rows and sums take fewer bytes than its bags and their ids."""
    lookups = bags * table.pooling_factor
    unique = table.num_embeddings * (1 - math.exp(-lookups / table.num_embeddings))
    by_row = unique * (8 + 4 * table.embedding_dim)
    return by_row <= bags * (8 + 4 * table.embedding_dim) + lookups * (12 if table.weighted else 8)


def work_by_hand(slice_: ShardSlice, world_size: int) -> tuple[list[float], list[float]]:
    """Bags, lookups and distinct rows, each with their elements, of both phases."""
    table, cols = slice_.table, math.ceil(slice_.num_cols / 4) * 4

    def distinct(lookups: float) -> float:
        return slice_.num_rows * (1 - math.exp(-lookups / table.num_embeddings))

    def with_elements(*counts: float) -> list[float]:
        return [amount for count in counts for amount in (count, count * cols)]

    own = BATCH_SIZE * table.num_features
    bags = own * world_size
    whole = bags * table.pooling_factor
    lookups = whole * slice_.num_rows / table.num_embeddings
    sharded = with_elements(bags, lookups, distinct(whole))
    if slice_.sharding_type is not ShardingType.DATA_PARALLEL:
        return sharded, [*sharded, 0.0, 0.0]
    mine = own * table.pooling_factor
    fwd = with_elements(own, mine, distinct(mine))
    if world_size == 1 or not rows_are_exchanged(table, own):
        return fwd, [*sharded, 0.0, 0.0]
    rows = world_size * distinct(mine)
    return fwd, with_elements(rows, rows, distinct(whole), mine)


def compute_by_hand(held: Sequence[ShardSlice], world_size: int, phase: int) -> float:
    if not held:
        return 0.0
    own = MODEL.coefficients_ms_KP[:6] if phase == 0 else MODEL.coefficients_ms_KP[6:]
    return MODEL.overhead_ms_P[phase] + sum(
        MODEL.shard_ms_P[phase]
        + sum(
            amount * coefficients[phase]
            for amount, coefficients in zip(
                work_by_hand(slice_, world_size)[phase], own, strict=True
            )
        )
        for slice_ in held
    )


def all_to_all_by_hand(sent: list[list[float]]) -> float:
    """`sent[a][b]` bytes go from rank a to rank b; what a rank keeps is no traffic."""
    ranks = range(len(sent))
    out = [sum(sent[a][b] for b in ranks if b != a) for a in ranks]
    into = [sum(sent[a][b] for a in ranks if a != b) for b in ranks]
    return MODEL.latency_ms + max(out + into) / MODEL.bytes_per_ms if sum(out) else 0.0


def cost_by_hand(held: Held) -> tuple[list[float], list[float], float, float]:
    world_size = len(held)
    ranks = range(world_size)
    ids, outputs, replicas = ([[0.0] * world_size for _ in ranks] for _ in range(3))
    for a, b in itertools.product(ranks, ranks):
        for slice_ in held[b]:
            table = slice_.table
            bags = BATCH_SIZE * table.num_features
            if slice_.sharding_type is ShardingType.DATA_PARALLEL:
                lookups = bags * table.pooling_factor
                unique = slice_.num_rows * (1 - math.exp(-lookups / slice_.num_rows))
                by_row = unique * (8 + 4 * slice_.num_cols)
                of_ids = bags * 8 + lookups * (12 if table.weighted else 8)
                by_bag = bags * 4 * slice_.num_cols
                ids[a][b] += of_ids if of_ids + by_bag < by_row else 0.0
                replicas[a][b] += by_bag if of_ids + by_bag < by_row else by_row
                continue
            lookups = bags * table.pooling_factor * slice_.num_rows / table.num_embeddings
            ids[a][b] += bags * 8 + lookups * (12 if table.weighted else 8)
            outputs[b][a] += bags * slice_.num_cols * 4
    gradients = [list(column) for column in zip(*outputs, strict=True)]
    return (
        [compute_by_hand(held[rank], world_size, 0) for rank in ranks],
        [compute_by_hand(held[rank], world_size, 1) for rank in ranks],
        all_to_all_by_hand(ids) + all_to_all_by_hand(outputs),
        all_to_all_by_hand(gradients) + all_to_all_by_hand(replicas),
    )


@pytest.mark.parametrize("world_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(5))
def test_the_four_terms_by_hand(seed: int, world_size: int) -> None:
    problem, slices = random_slices(5, world_size, seed)
    everything = list(placements(slices, world_size))
    for index in np.random.default_rng(seed).integers(0, len(everything), size=6):
        held = everything[index]
        cost = predict_step(problem, held, MODEL)
        fwd, bwd, fwd_comms, bwd_comms = cost_by_hand(held)
        np.testing.assert_allclose(cost.fwd_compute_ms, fwd, rtol=1e-12)
        np.testing.assert_allclose(cost.bwd_compute_ms, bwd, rtol=1e-12)
        assert cost.fwd_comms_ms == pytest.approx(fwd_comms, rel=1e-12)
        assert cost.bwd_comms_ms == pytest.approx(bwd_comms, rel=1e-12)
        assert cost.step_ms == pytest.approx(max(fwd) + fwd_comms + bwd_comms + max(bwd))
        assert cost.source is CostSource.PREDICTED
        assert cost.extrapolated  # no measurement stands behind the coefficients


def test_a_plan_costs_what_its_slices_cost() -> None:
    problem, slices = random_slices(5, 3, 1)
    held = next(placements(slices, 3))
    placed = [(slice_, rank) for rank, here in enumerate(held) for slice_ in here]
    plan = plan_from_slices(problem, placed)
    in_plan, direct = predict_plan(plan, MODEL), predict_step(problem, held, MODEL)
    np.testing.assert_allclose(in_plan.fwd_compute_ms, direct.fwd_compute_ms, rtol=1e-12)
    assert in_plan.step_ms == pytest.approx(direct.step_ms, rel=1e-12)


def test_ranks_without_anything_cost_nothing() -> None:
    (table,) = random_tables(1, np.random.default_rng(0))
    cost = predict_step(problem_of([table], 3), [[], [ShardSlice.whole(table)], []], MODEL)
    assert cost.fwd_compute_ms[0] == cost.bwd_compute_ms[2] == 0.0
    assert cost.fwd_compute_ms[1] > 0.0
    nothing = predict_step(problem_of([table], 2), [[], []], MODEL)
    assert nothing.step_ms == 0.0


@pytest.mark.parametrize("seed", range(25))
def test_no_placement_costs_less_than_the_bound(seed: int) -> None:
    world_size = 1 + seed % 4
    problem, slices = random_slices(3 if world_size == 4 else 4, world_size, 100 + seed)
    bound = lower_bound_ms(problem, slices, MODEL)
    costs = [predict_step(problem, held, MODEL).step_ms for held in placements(slices, world_size)]
    assert bound is not None
    assert 0 <= bound <= min(costs) * (1 + 1e-12)
    assert bound > min(costs) / 3  # it says something


def test_the_bound_is_reached_where_equal_tables_balance() -> None:
    tables = [
        Table(name=f"e{i}", num_embeddings=100, embedding_dim=8, pooling_factor=4.0)
        for i in range(6)
    ]
    problem = problem_of(tables, 3)
    slices = [ShardSlice.whole(table) for table in tables]
    balanced = predict_step(problem, [slices[:2], slices[2:4], slices[4:]], MODEL).step_ms
    assert lower_bound_ms(problem, slices, MODEL) == pytest.approx(balanced, rel=1e-9)


def test_one_rank_is_its_own_bound() -> None:
    tables = random_tables(5, np.random.default_rng(2))
    slices = [ShardSlice.whole(table) for table in tables]
    problem = problem_of(tables, 1)
    cost = predict_step(problem, [slices], MODEL).step_ms
    assert lower_bound_ms(problem, slices, MODEL) == pytest.approx(cost, rel=1e-9)


def test_replicas_alone_are_their_own_bound() -> None:
    problem = problem_of(random_tables(3, np.random.default_rng(1)), 3)
    replicas = [ShardSlice.whole(t, ShardingType.DATA_PARALLEL) for t in problem.tables]
    cost = predict_step(problem, [replicas] * 3, MODEL).step_ms
    assert lower_bound_ms(problem, replicas, MODEL) == pytest.approx(cost, rel=1e-5)
    assert lower_bound_ms(problem, [], MODEL) == 0.0


def test_the_bound_is_reached_beside_replicas() -> None:
    """Equal tables balance; everything that replicas cost is in the bound."""
    tables = [
        Table(name=f"e{i}", num_embeddings=100, embedding_dim=8, pooling_factor=4.0)
        for i in range(8)
    ]
    problem = problem_of(tables, 3)
    slices = [ShardSlice.whole(table) for table in tables[:6]]
    replicas = [ShardSlice.whole(table, ShardingType.DATA_PARALLEL) for table in tables[6:]]
    held = [[*slices[2 * rank : 2 * rank + 2], *replicas] for rank in range(3)]
    balanced = predict_step(problem, held, MODEL).step_ms
    for given in (replicas, replicas * 3):
        bound = lower_bound_ms(problem, slices + given, MODEL)
        assert bound is not None
        assert bound == pytest.approx(balanced, rel=1e-5)
        assert bound <= balanced


def test_a_model_without_bounds_has_none() -> None:
    class Boundless(AnalyticCostModel):
        def compute_lower_bound_ms(self, *_: object) -> None:  # type: ignore[override]
            return None

    (table,) = random_tables(1, np.random.default_rng(0))
    assert lower_bound_ms(problem_of([table], 2), [ShardSlice.whole(table)], Boundless()) is None


def test_sizes_beyond_int64_are_costed() -> None:
    huge = Table(
        name="huge", num_embeddings=2**61, embedding_dim=2**20, pooling_factor=2.0,
        ids=IdDistribution(zipf_exponent=1.2),
    )  # fmt: skip
    cost = predict_step(problem_of([huge], 2), [[ShardSlice.whole(huge)], []], MODEL)
    assert 0 < cost.step_ms < float("inf")
