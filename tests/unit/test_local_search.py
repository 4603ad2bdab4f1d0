"""Local search: exact re-costing, legality at every step, budgets, and known optima."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.costing import predict_step
from autoshard.placement import PlacementTask, prepare_task
from autoshard.placement_costs import (
    Changes,
    PlacementCosts,
    largest_except,
    placement_objective_ms,
)
from autoshard.protocols import SearchBudget
from autoshard.sharders import local_search as module
from autoshard.sharders.heuristics import place_randomly
from autoshard.sharders.local_search import local_search
from autoshard.sharders.meter import Meter
from autoshard.shards import ShardingType, ShardSlice
from tests.placement_cases import make_problem, random_tables


@dataclass(frozen=True, kw_only=True)
class TwoWayCostModel(AnalyticCostModel):
    """All-to-alls cost what the busiest sender *and* the busiest receiver have to do."""

    def collective_ms(self, traffic_NC: np.ndarray) -> np.ndarray:
        _, sent_N, received_N, _ = np.asarray(traffic_NC).T
        return (3.0 * sent_N + received_N) / self.bytes_per_ms


#: Communication and overheads weigh as much as compute, so that every term is searched over.
COST_MODEL = TwoWayCostModel(bytes_per_ms=8e5, overhead_ms_P=(0.3, 0.7))


def split_task(seed: int, world_size: int = 3, num_tables: int = 4) -> PlacementTask:
    """A table in columns, one in rows, one replica, the rest whole."""
    tables = random_tables(num_tables, seed=seed)
    cols, rows, copied, *whole = tables
    half = cols.embedding_dim // 2
    first = rows.num_embeddings // 3
    slices = [
        ShardSlice(cols, ShardingType.COLUMN_WISE, 0, 0, cols.num_embeddings, half),
        ShardSlice(cols, ShardingType.COLUMN_WISE, 0, half, cols.num_embeddings, half),
        ShardSlice(rows, ShardingType.ROW_WISE, 0, 0, first, rows.embedding_dim),
        ShardSlice(
            rows, ShardingType.ROW_WISE, first, 0, rows.num_embeddings - first, rows.embedding_dim
        ),
        ShardSlice.whole(copied, ShardingType.DATA_PARALLEL),
        *map(ShardSlice.whole, whole),
    ]
    return prepare_task(make_problem(tables, world_size), COST_MODEL, slices)


def tight_task(seed: int, num_tables: int = 6, world_size: int = 3) -> PlacementTask:
    """Ranks with 1.25 times an equal share of memory, but room for the largest table."""
    tables = random_tables(num_tables, seed=seed)
    roomy = prepare_task(make_problem(tables, world_size, 2**33), COST_MODEL)
    fixed = 2**33 - int(roomy.capacity_bytes_R[0])
    need = roomy.memory_bytes_S
    room = max(int(1.25 * need.sum() / world_size), int(need.max()))
    return prepare_task(make_problem(tables, world_size, room + fixed), COST_MODEL)


def is_legal(task: PlacementTask, ranks: Sequence[int]) -> bool:
    """Memory kept on every rank, and no two slices of one table together."""
    used = [0] * task.world_size
    places = set()
    for slice_, need, rank in zip(task.slices, task.memory_bytes_S.tolist(), ranks, strict=True):
        used[rank] += need
        places.add((slice_.table.name, rank))
    fits = all(use <= have for use, have in zip(used, task.capacity_bytes_R.tolist(), strict=True))
    return fits and len(places) == len(ranks)


def objective_ms(task: PlacementTask, ranks: Sequence[int]) -> float:
    """By the code that costs finished plans."""
    held: list[list[ShardSlice]] = [list(task.replicas) for _ in range(task.world_size)]
    for slice_, rank in zip(task.slices, ranks, strict=True):
        held[rank].append(slice_)
    return predict_step(task.problem, held, COST_MODEL).step_ms


def legal_placements(task: PlacementTask) -> list[tuple[int, ...]]:
    return [
        ranks
        for ranks in itertools.product(range(task.world_size), repeat=task.num_slices)
        if is_legal(task, ranks)
    ]


def search(
    task: PlacementTask, start: Sequence[int], budget: SearchBudget | None = None, seed: int = 0
) -> tuple[tuple[int, ...], float, Meter]:
    meter = Meter(budget or SearchBudget(num_evaluations=20_000))
    ranks, ms = local_search(task, COST_MODEL, start, meter=meter, seed=seed)
    return ranks, ms, meter


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("make", [split_task, tight_task])
def test_tiny_instances_end_at_the_optimum_from_the_worst_start(
    make: Callable[..., PlacementTask], seed: int
) -> None:
    task = make(seed)
    placements = legal_placements(task)
    costs = [placement_objective_ms(task, COST_MODEL, ranks) for ranks in placements]
    for index in np.random.default_rng(seed).integers(0, len(costs), size=5):
        assert costs[index] == pytest.approx(objective_ms(task, placements[index]), rel=1e-12)
    worst = placements[int(np.argmax(costs))]
    ranks, ms, _ = search(task, worst)
    assert ms == pytest.approx(min(costs), rel=1e-9)
    assert ms == pytest.approx(objective_ms(task, ranks), rel=1e-12)
    assert is_legal(task, ranks)


@pytest.mark.parametrize("world_size", [2, 3, 5])
@pytest.mark.parametrize("seed", range(3))
def test_every_change_costs_what_it_costs_from_scratch(seed: int, world_size: int) -> None:
    task = split_task(seed, world_size, num_tables=7)
    start = place_randomly(task, seed)
    placement = PlacementCosts(task, COST_MODEL, start)
    generator = np.random.default_rng(seed)
    for source in range(world_size):
        for changes in (
            module._moves(placement, source),
            module._swaps(placement, source, generator),
        ):
            legal_K = placement.legal_K(changes)
            objective_K = placement.objective_K(changes)
            for k in range(len(changes)):
                ranks = list(start)
                ranks[changes.out_K[k]] = int(changes.target_K[k])
                if changes.in_K[k] >= 0:
                    ranks[changes.in_K[k]] = int(changes.source_K[k])
                assert legal_K[k] == is_legal(task, ranks)
                if k % 3 == 0:
                    assert objective_K[k] == pytest.approx(objective_ms(task, ranks), rel=1e-9)


@pytest.mark.parametrize("make", [split_task, tight_task])
def test_every_step_is_legal_and_costed_from_scratch(
    make: Callable[..., PlacementTask], monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make(1, num_tables=9, world_size=4)
    seen: list[tuple[tuple[int, ...], float]] = []
    apply = PlacementCosts.apply

    def watched(placement: PlacementCosts, changes: Changes, index: int) -> None:
        apply(placement, changes, index)
        seen.append((tuple(placement.rank_S.tolist()), placement.objective_ms))

    monkeypatch.setattr(PlacementCosts, "apply", watched)
    start = place_randomly(task, 0)
    _, best_ms, _ = search(task, start, SearchBudget(num_evaluations=4000))
    assert len(seen) > 20
    for ranks, ms in seen:
        assert is_legal(task, ranks)
        assert ms >= best_ms * (1 - 1e-12)
    for ranks, ms in seen[::7]:
        assert ms == pytest.approx(objective_ms(task, ranks), rel=1e-12)


@pytest.mark.parametrize("budget", [0, 1, 2, 10, 100, 3000])
def test_never_worse_than_the_start_nor_over_budget(budget: int) -> None:
    task = split_task(2, 4, num_tables=12)
    start = place_randomly(task, 3)
    ranks, ms, meter = search(task, start, SearchBudget(num_evaluations=budget))
    assert meter.num_evaluations <= budget
    assert ms <= objective_ms(task, start) * (1 + 1e-12)
    assert is_legal(task, ranks)
    assert not meter.cut_short
    if budget == 0:
        assert ranks == start


def test_more_budget_is_never_worse() -> None:
    task = split_task(5, 4, num_tables=12)
    start = place_randomly(task, 0)
    costs = [search(task, start, SearchBudget(num_evaluations=n))[1] for n in (50, 500, 5000)]
    assert costs == sorted(costs, reverse=True)
    assert costs[2] < costs[0]


def test_equal_seeds_give_equal_searches() -> None:
    task = split_task(4, 4, num_tables=12)
    start = place_randomly(task, 0)
    first, second = (search(task, start, SearchBudget(num_evaluations=2000), 9) for _ in range(2))
    assert first[:2] == second[:2]
    assert first[2].num_evaluations == second[2].num_evaluations


def test_a_time_limit_cuts_short_and_says_so() -> None:
    task = split_task(2, 4, num_tables=12)
    start = place_randomly(task, 3)
    ranks, _, meter = search(task, start, SearchBudget(time_limit_s=0.0))
    assert ranks == start
    assert meter.cut_short
    assert meter.num_evaluations == 0


def test_the_clock_is_read_between_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    task = split_task(2, 4, num_tables=12)
    start = place_randomly(task, 3)
    ticks = itertools.count()
    monkeypatch.setattr("autoshard.sharders.meter.time.monotonic", lambda: float(next(ticks)))
    ranks, ms, meter = search(task, start, SearchBudget(num_evaluations=10**9, time_limit_s=30.0))
    assert meter.cut_short
    assert 0 < meter.num_evaluations < 10**6
    assert ms == pytest.approx(objective_ms(task, ranks), rel=1e-12)


def test_a_reached_target_ends_the_search() -> None:
    task = split_task(2, 4, num_tables=12)
    start = place_randomly(task, 3)
    goal = objective_ms(task, start)
    meter = Meter(SearchBudget())
    ranks, _ = local_search(task, COST_MODEL, start, meter=meter, seed=0, target_ms=goal)
    assert (ranks, meter.num_evaluations) == (start, 0)


def test_an_exhausted_problem_ends_before_a_huge_budget() -> None:
    task = tight_task(0, num_tables=4, world_size=2)
    start = place_randomly(task, 0)
    _, ms, meter = search(task, start, SearchBudget(num_evaluations=10**12))
    assert meter.num_evaluations < 10**6
    assert not meter.cut_short
    assert ms == pytest.approx(
        min(objective_ms(task, ranks) for ranks in legal_placements(task)), rel=1e-9
    )


def test_one_rank_no_slice_and_no_legal_change() -> None:
    alone = tight_task(0, num_tables=3, world_size=1)
    assert search(alone, (0, 0, 0))[0] == (0, 0, 0)
    tables = random_tables(2)
    replicas = [ShardSlice.whole(table, ShardingType.DATA_PARALLEL) for table in tables]
    empty = prepare_task(make_problem(tables, 3), COST_MODEL, replicas)
    ranks, ms, meter = search(empty, ())
    assert ranks == ()
    assert ms == pytest.approx(objective_ms(empty, ()), rel=1e-12)
    assert meter.num_evaluations <= 1000
    full = tight_task(0, num_tables=2, world_size=2)
    full.capacity_bytes_R[:] = full.memory_bytes_S
    assert search(full, (0, 1), SearchBudget(num_evaluations=500))[0] == (0, 1)


def test_largest_except_leaves_out_two_ranks() -> None:
    values = np.array([5.0, 9.0, 1.0, 9.0])
    first, second = (grid.ravel() for grid in np.meshgrid(np.arange(4), np.arange(4)))
    expected = [
        max(value for rank, value in enumerate(values) if rank not in (one, other))
        for one, other in zip(first, second, strict=True)
    ]
    np.testing.assert_array_equal(largest_except(values, first, second, -1.0), expected)
    np.testing.assert_array_equal(
        largest_except(values[:2], np.array([0, 1]), np.array([1, 1]), -1.0), [-1.0, 5.0]
    )


def test_a_meter_tells_spent_budget_from_spent_time() -> None:
    meter = Meter(SearchBudget(num_evaluations=3))
    assert meter.may_go_on()
    meter.spend(3)
    assert not meter.may_go_on()
    assert (meter.remaining, meter.cut_short) == (0, False)
    assert meter.deadline_s is None
    done = Meter(SearchBudget(num_evaluations=0, time_limit_s=0.0))
    assert not done.may_go_on()
    assert not done.cut_short  # nothing was left that time could have cut
