"""Costs of many placements at once are those of each plan by itself; a move costs two ranks."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from autoshard import plan_batch
from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.cost_models.exported import load_cost_model
from autoshard.costing import predict_step
from autoshard.errors import InputError
from autoshard.objective import StepCost
from autoshard.placement import PlacementTask, prepare_task
from autoshard.placement_costs import PlacementCosts
from autoshard.plan_batch import cost_assignments
from autoshard.protocols import CostModel
from autoshard.shards import ShardingType, ShardSlice
from cost_net.dataset import MeasuredData, collective_data, kernel_data
from cost_net.pipeline import MODEL_FOLDER, train_cost_model
from tests.cost_cases import collective_rows, kernel_rows, quick_config
from tests.placement_cases import make_problem, random_tables
from tests.synthetic_measurements import FACTS


@cache
def briefly_trained() -> CostModel:
    """A trained network, exported and loaded again. That it predicts well does not matter here."""
    sizes = {"train": 40, "validation": 10, "test": 15}
    data = MeasuredData(
        kernels=kernel_data(pd.DataFrame(kernel_rows(sizes))),
        collectives=collective_data(pd.DataFrame(collective_rows(45))),
        facts=FACTS,
    )
    with tempfile.TemporaryDirectory() as folder:
        train_cost_model(data, quick_config(num_epochs=3, collective_epochs=20), Path(folder))
        return load_cost_model(Path(folder) / MODEL_FOLDER)


MODELS: dict[str, Callable[[], CostModel]] = {
    "analytic": AnalyticCostModel,
    "simulated": lambda: load_cost_model("simulated:a100-80gb"),
    "trained": briefly_trained,
}


@cache
def make_task(model: str, world_size: int, num_tables: int = 9) -> PlacementTask:
    """Two replicas, a table in columns, one in rows, the rest whole."""
    tables = random_tables(num_tables, seed=world_size)
    first, second, cols, rows, *whole = tables
    half = cols.embedding_dim // 2
    third = rows.num_embeddings // 3
    width = rows.embedding_dim
    slices = [
        ShardSlice.whole(first, ShardingType.DATA_PARALLEL),
        ShardSlice.whole(second, ShardingType.DATA_PARALLEL),
        ShardSlice(cols, ShardingType.COLUMN_WISE, 0, 0, cols.num_embeddings, half),
        ShardSlice(cols, ShardingType.COLUMN_WISE, 0, half, cols.num_embeddings, half),
        ShardSlice(rows, ShardingType.ROW_WISE, 0, 0, third, width),
        ShardSlice(rows, ShardingType.ROW_WISE, third, 0, rows.num_embeddings - third, width),
        *map(ShardSlice.whole, whole),
    ]
    return prepare_task(make_problem(tables, world_size), MODELS[model](), slices)


def plain_task(model: str, world_size: int) -> PlacementTask:
    """Whole tables only, so that a rank can be empty."""
    return prepare_task(make_problem(random_tables(6), world_size), MODELS[model]())


def from_scratch(task: PlacementTask, model: CostModel, ranks: Sequence[int]) -> StepCost:
    held: list[list[ShardSlice]] = [list(task.replicas) for _ in range(task.world_size)]
    for slice_, rank in zip(task.slices, ranks, strict=True):
        held[rank].append(slice_)
    return predict_step(task.problem, held, model)


def draw(task: PlacementTask, num: int, seed: int = 0) -> np.ndarray:
    shape = (num, task.num_slices)
    ranks_NS = np.random.default_rng(seed).integers(0, task.world_size, shape)
    ranks_NS[:1] = task.world_size - 1  # all on one rank: the others are empty
    return ranks_NS


def assert_same(cost: StepCost, expected: StepCost) -> None:
    assert cost.fwd_compute_ms == pytest.approx(expected.fwd_compute_ms, rel=1e-6)
    assert cost.bwd_compute_ms == pytest.approx(expected.bwd_compute_ms, rel=1e-6)
    assert cost.fwd_comms_ms == pytest.approx(expected.fwd_comms_ms, rel=1e-6)
    assert cost.bwd_comms_ms == pytest.approx(expected.bwd_comms_ms, rel=1e-6)
    assert cost.step_ms == pytest.approx(expected.step_ms, rel=1e-6)
    assert (cost.source, cost.extrapolated) == (expected.source, expected.extrapolated)


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("make", [make_task, plain_task])
@pytest.mark.parametrize("model", MODELS)
def test_a_batch_costs_what_its_plans_cost(
    model: str, make: Callable[..., PlacementTask], world_size: int
) -> None:
    task, cost_model = make(model, world_size), MODELS[model]()
    ranks_NS = draw(task, 12)
    costs = cost_assignments(task, cost_model, ranks_NS)
    assert len(costs) == 12
    assert costs.compute_ms_NRP.shape == (12, world_size, 2)
    assert costs.step_ms_N.dtype == np.float64
    for index, ranks in enumerate(ranks_NS.tolist()):
        expected = from_scratch(task, cost_model, ranks)
        assert costs.step_ms_N[index] == pytest.approx(expected.step_ms, rel=1e-6)
        assert_same(costs.step_cost(index), expected)
    if make is plain_task and world_size > 1:
        assert not costs.compute_ms_NRP[0, :-1].any()


@pytest.mark.parametrize("model", MODELS)
def test_many_placements_are_costed_in_several_calls_alike(
    model: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    task, cost_model = make_task(model, 3), MODELS[model]()
    ranks_NS = draw(task, 25)
    whole = cost_assignments(task, cost_model, ranks_NS)
    monkeypatch.setattr(plan_batch, "MAX_RANKS_PER_CALL", 10)
    parts = cost_assignments(task, cost_model, ranks_NS)
    np.testing.assert_allclose(parts.step_ms_N, whole.step_ms_N, rtol=1e-6)
    np.testing.assert_allclose(parts.compute_ms_NRP, whole.compute_ms_NRP, rtol=1e-6)


@pytest.mark.parametrize("nothing", [[], np.zeros((0, 9), dtype=np.int64)])
@pytest.mark.parametrize("model", MODELS)
def test_no_placement_costs_nothing(model: str, nothing: Any) -> None:
    costs = cost_assignments(make_task(model, 2), MODELS[model](), nothing)
    assert len(costs) == 0
    assert costs.step_ms_N.shape == (0,)
    assert costs.compute_ms_NRP.shape == (0, 2, 2)


@pytest.mark.parametrize("model", MODELS)
def test_replicas_alone_cost_the_same_however_they_are_placed(model: str) -> None:
    tables = random_tables(2)
    replicas = [ShardSlice.whole(table, ShardingType.DATA_PARALLEL) for table in tables]
    cost_model = MODELS[model]()
    task = prepare_task(make_problem(tables, 2), cost_model, replicas)
    costs = cost_assignments(task, cost_model, np.zeros((2, 0), dtype=np.int64))
    for index in range(2):
        assert_same(costs.step_cost(index), from_scratch(task, cost_model, []))
    assert PlacementCosts(task, cost_model, []).objective_ms == pytest.approx(costs.step_ms_N[0])


BAD: list[tuple[Any, str]] = [
    ([[0] * 8], r"got: \[1, 8\]; allowed: \[N, 9\]"),
    ([0] * 9, r"got: \[9\]"),
    ([[0] * 8 + [2]], r"does not exist; got: 2; allowed: 0\.\.1"),
    ([[0] * 8 + [-1]], "got: -1"),
    ([[0.0] * 9], "not whole numbers; got: float64"),
    ([[True] * 9], "not whole numbers; got: bool"),
    ([[0] * 9, [0] * 8], "not a table of numbers"),
]


@pytest.mark.parametrize(("ranks", "message"), BAD)
def test_ranks_that_are_no_placement_are_refused(ranks: Any, message: str) -> None:
    task = make_task("analytic", 2, 9)
    assert task.num_slices == 9
    with pytest.raises(InputError, match=message):
        cost_assignments(task, AnalyticCostModel(), ranks)


@dataclass(frozen=True, kw_only=True)
class Counting(AnalyticCostModel):
    """Remembers how many sets each call costs."""

    def compute_ms(self, encoding_sum_ND: np.ndarray, num_shards_N: np.ndarray) -> np.ndarray:
        self.__dict__.setdefault("seen", []).append(len(encoding_sum_ND))
        return super().compute_ms(encoding_sum_ND, num_shards_N)


def test_a_batch_is_one_call_and_a_move_two_sets() -> None:
    cost_model = Counting()
    task = prepare_task(make_problem(random_tables(6), 5), cost_model)
    seen = cost_model.__dict__["seen"]
    seen.clear()
    cost_assignments(task, cost_model, draw(task, 7))
    assert seen == [35]
    costs = PlacementCosts(task, cost_model, [0, 1, 2, 3, 4, 0])
    seen.clear()
    for rank in (1, 4, 4, 0):
        costs.move(3, rank)
    # The third move leads nowhere.
    assert seen == [2, 2, 2]


@pytest.mark.parametrize("world_size", [1, 2, 8])
@pytest.mark.parametrize("model", MODELS)
def test_moves_cost_what_the_plans_cost_that_they_lead_to(model: str, world_size: int) -> None:
    task, cost_model = make_task(model, world_size), MODELS[model]()
    generator = np.random.default_rng(world_size)
    ranks = draw(task, 2)[1].tolist()
    costs = PlacementCosts(task, cost_model, ranks)
    for _ in range(12):
        slice_index = int(generator.integers(task.num_slices))
        ranks[slice_index] = int(generator.integers(world_size))
        objective_ms = costs.move(slice_index, ranks[slice_index])
        expected = from_scratch(task, cost_model, ranks)
        assert objective_ms == costs.objective_ms == pytest.approx(expected.step_ms, rel=1e-6)
        assert costs.compute_RP[:, 0] == pytest.approx(expected.fwd_compute_ms, rel=1e-6)
        assert costs.compute_RP[:, 1] == pytest.approx(expected.bwd_compute_ms, rel=1e-6)
        assert costs.rank_S.tolist() == ranks
    free_R = task.capacity_bytes_R - np.bincount(
        ranks, weights=task.memory_bytes_S, minlength=world_size
    )
    np.testing.assert_array_equal(costs.free_R, free_R)


def test_where_a_slice_may_go() -> None:
    """Not to a part of its own table, nor where memory is short."""
    task = make_task("analytic", 3)
    parts = [i for i, s in enumerate(task.slices) if s.sharding_type is ShardingType.COLUMN_WISE]
    ranks = [0] * task.num_slices
    ranks[parts[1]] = 2
    costs = PlacementCosts(task, AnalyticCostModel(), ranks)
    assert costs.legal_R(parts[0]).tolist() == [True, True, False]
    need = int(task.memory_bytes_S[parts[0]])
    costs.free_R[1] = need - 1
    assert costs.legal_R(parts[0]).tolist() == [True, False, False]
    costs.free_R[1] = need
    assert costs.legal_R(parts[0]).tolist() == [True, True, False]


@pytest.mark.parametrize(
    ("slice_index", "rank", "message"),
    [
        (9, 0, r"no such slice; got: 9; allowed: 0\.\.8"),
        (-1, 0, "no such slice; got: -1"),
        (1.5, 0, "no such slice"),
        (True, 0, "no such slice"),
        (0, 2, r"does not exist; got: 2; allowed: 0\.\.1"),
        (0, -1, "got: -1"),
        (0, 0.5, "not whole numbers"),
    ],
)
def test_moves_that_cannot_be_are_refused_and_change_nothing(
    slice_index: Any, rank: Any, message: str
) -> None:
    task = make_task("analytic", 2)
    costs = PlacementCosts(task, AnalyticCostModel(), [0] * 9)
    before = costs.objective_ms
    with pytest.raises(InputError, match=message):
        costs.move(slice_index, rank)
    assert costs.objective_ms == before
    assert not costs.rank_S.any()
