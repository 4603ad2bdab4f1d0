"""What every cost model keeps to: the analytic one and an exported network, by the same tests."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.cost_models.bounds import makespan_lower_bound
from autoshard.cost_models.exported import load_cost_model
from autoshard.cost_models.ranges import MeasuredRange
from autoshard.errors import ArtifactError, InputError
from autoshard.features import NUM_SHARD_FEATURES, SHARD_FEATURES, shard_features
from autoshard.objective import CostSource
from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.protocols import CostModel
from autoshard.shards import ShardSlice
from autoshard.topology import GIB, Topology
from cost_net.pipeline import MODEL_FOLDER, train_cost_model
from cost_net.training import CostNetConfig, NetworkKind
from tests.synthetic_measurements import measured, pool

NAMES = ("analytic", "network", "sum_network")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CostModel]:
    data, folder = measured(200), tmp_path_factory.mktemp("models")
    config = CostNetConfig(num_epochs=8, collective_epochs=40, learning_rate=1e-2)
    train_cost_model(data, config, folder / "a")
    train_cost_model(data, replace(config, network=NetworkKind.NEUROSHARD), folder / "b")
    return {
        "analytic": AnalyticCostModel(),
        "network": load_cost_model(folder / "a" / MODEL_FOLDER),
        "sum_network": load_cost_model(folder / "b" / MODEL_FOLDER),
    }


@pytest.fixture(params=NAMES)
def model(request: pytest.FixtureRequest, models: dict[str, CostModel]) -> CostModel:
    return models[request.param]


def features(num: int, seed: int = 1) -> np.ndarray:
    tables = pool(num, seed)
    return shard_features([ShardSlice.whole(t) for t in tables], TrainingConfig(batch_size=512), 1)


def cost_of(model: CostModel, encoding_SD: np.ndarray) -> np.ndarray:
    return model.compute_ms(encoding_SD.sum(axis=0)[None], np.array([len(encoding_SD)]))[0]


def test_it_keeps_to_the_protocol(model: CostModel) -> None:
    assert isinstance(model, CostModel)
    assert model.source in (CostSource.PREDICTED, CostSource.SIMULATED)
    assert model.name
    assert len(model.fingerprint) >= 16


@pytest.mark.parametrize("num", [0, 1, 2, 3, 500])
def test_shapes_and_types_for_any_number_of_rows(model: CostModel, num: int) -> None:
    encoding = model.encode(features(500)[:num])
    assert encoding.shape == (num, model.encode(features(2)).shape[1])
    cost = model.compute_ms(encoding, np.ones(num, dtype=np.int64))
    assert (cost.shape, encoding.dtype, cost.dtype) == ((num, 2), np.float64, np.float64)
    assert (cost > 0).all()
    traffic = np.tile([[4.0, 1e6, 1e6, 4e6]], (num, 1))
    times = model.collective_ms(traffic)
    assert (times.shape, times.dtype) == ((num,), np.float64)
    assert (times > 0).all()


def test_the_order_of_shards_and_of_rows_does_not_matter(model: CostModel) -> None:
    rows, order = features(40), np.random.default_rng(0).permutation(40)
    encoding = model.encode(rows)
    np.testing.assert_allclose(model.encode(rows[order]), encoding[order], rtol=1e-6, atol=1e-9)
    np.testing.assert_allclose(cost_of(model, encoding[order]), cost_of(model, encoding), rtol=1e-6)
    alone = model.compute_ms(encoding, np.ones(40, dtype=np.int64))
    one_by_one = np.stack([cost_of(model, encoding[i : i + 1]) for i in range(40)])
    np.testing.assert_allclose(alone, one_by_one, rtol=1e-6)


def test_an_empty_set_costs_nothing(model: CostModel) -> None:
    width = model.encode(features(2)).shape[1]
    cost = model.compute_ms(np.zeros((3, width)), np.array([0, 1, 0]))
    assert cost[[0, 2]].tolist() == [[0.0, 0.0], [0.0, 0.0]]
    assert (cost[1] >= 0).all()


def test_nothing_sent_and_a_rank_alone_cost_nothing(model: CostModel) -> None:
    times = model.collective_ms(np.array([[4.0, 0, 0, 0], [1.0, 5.0, 5.0, 5.0], [2.0, 1, 1, 2]]))
    assert times[:2].tolist() == [0.0, 0.0]
    assert times[2] > 0


@pytest.mark.parametrize("scale", [0.0, 1e-6, 1e4, 1e9, 1e15])
def test_extreme_inputs_stay_finite_and_not_negative(model: CostModel, scale: float) -> None:
    rows = features(6) * scale
    encoding = model.encode(rows)
    assert np.isfinite(encoding).all()
    cost = model.compute_ms(encoding, np.ones(6, dtype=np.int64))
    many = model.compute_ms(encoding.sum(axis=0)[None] * 1000, np.array([6000]))
    for value in (cost, many):
        assert np.isfinite(value).all()
        assert (value >= 0).all()
    times = model.collective_ms(np.array([[65_536.0, scale, scale, scale]]))
    assert np.isfinite(times).all()
    assert (times >= 0).all()


def test_a_search_that_subtracts_what_it_added_sees_no_negative_cost(model: CostModel) -> None:
    encoding = model.encode(features(2))
    left_over = encoding[0] + encoding[1] - encoding[0] - encoding[1] - 1e-12
    assert (model.compute_ms(left_over[None], np.array([1])) >= 0).all()


@pytest.mark.parametrize("world_size", [2, 3, 5, 16, 1000])
def test_more_bytes_and_unseen_world_sizes(model: CostModel, world_size: int) -> None:
    sizes = np.array([1e3, 1e5, 1e7, 1e9])
    traffic = np.stack([np.full(4, float(world_size)), sizes, sizes, sizes * world_size], axis=1)
    times = model.collective_ms(traffic)
    assert np.isfinite(times).all()
    assert times[-1] > times[0] > 0


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num", [1, 2, 5, 7])
def test_no_placement_is_below_the_bound(model: CostModel, world_size: int, num: int) -> None:
    for seed in range(4):
        encoding = model.encode(features(num, seed=seed + 10))
        bound = model.compute_lower_bound_ms(encoding, world_size)
        if bound is None:
            return  # a model may have none
        held = np.array(list(itertools.product((0, 1), repeat=num)))  # every set of shards
        cost_of_set = dict(
            zip(
                map(tuple, held.tolist()),
                model.compute_ms(held @ encoding, held.sum(axis=1)),
                strict=True,
            )
        )
        slowest = [
            np.max(
                [cost_of_set[tuple(int(r == rank) for r in ranks)] for rank in range(world_size)],
                axis=0,
            )
            for ranks in itertools.product(range(world_size), repeat=num)
        ]
        least = np.min(slowest, axis=0)
        assert (bound <= least * (1 + 1e-9)).all()
        assert (bound > 0.3 * least).all()  # and it says something


def test_which_models_have_a_bound(models: dict[str, CostModel]) -> None:
    rows = features(3)
    has = {
        name: model.compute_lower_bound_ms(model.encode(rows), 2) is not None
        for name, model in models.items()
    }
    assert has == {"analytic": True, "network": True, "sum_network": False}


@pytest.mark.parametrize("world_size", [2, 3, 8])
def test_no_all_to_all_is_below_its_bound(model: CostModel, world_size: int) -> None:
    generator = np.random.default_rng(world_size)
    assert model.collective_lower_bound_ms(0.0, world_size) == 0.0
    assert model.collective_lower_bound_ms(1e6, 1) == 0.0
    for _ in range(200):
        share = generator.dirichlet(np.full(world_size, 10 ** generator.uniform(-1, 2)))
        total = 10 ** generator.uniform(2, 9)
        sent, received = total * share.max(), total * generator.uniform(1 / world_size, 1.0)
        (time,) = model.collective_ms(np.array([[world_size, sent, received, total]]))
        bound = model.collective_lower_bound_ms(total, world_size)
        assert bound is not None
        assert bound <= time * (1 + 1e-9)


def problem(
    world_size: int = 2, optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD
) -> ShardingProblem:
    return ShardingProblem(
        tables=tuple(pool(3)),
        topology=Topology.uniform(world_size, GIB),
        training=TrainingConfig(batch_size=512, optimizer=optimizer),
    )


def test_what_was_not_measured_is_extrapolated(models: dict[str, CostModel]) -> None:
    network, seen = models["network"], measured(200).kernels.features_SF
    assert not network.is_extrapolated(seen, problem())
    assert not network.is_extrapolated(seen, problem(world_size=6))  # between 2 and 8
    assert not network.is_extrapolated(seen, problem(world_size=1))  # no collectives
    assert network.is_extrapolated(seen, problem(world_size=9))
    assert network.is_extrapolated(seen, problem(optimizer=Optimizer.SGD))
    assert not network.is_extrapolated(np.zeros((0, NUM_SHARD_FEATURES)), problem())
    beyond = seen[:1].copy()
    beyond[0, SHARD_FEATURES.index("lookups")] *= 1000
    assert network.is_extrapolated(beyond, problem())
    assert models["analytic"].is_extrapolated(seen, problem())  # nothing was measured


def test_ranges_name_what_lies_outside() -> None:
    rows = np.ones((2, NUM_SHARD_FEATURES))
    rows[1] = 2.0
    found = MeasuredRange.of(rows, world_sizes=(4, 2, 4), optimizers=(Optimizer.SGD,))
    assert found.world_sizes == (2, 4)
    assert MeasuredRange.from_json(found.to_json()) == found
    far = rows.copy()
    far[0, SHARD_FEATURES.index("log_bags")] = 2.1
    far[0, SHARD_FEATURES.index("lookup_share_reuse_3")] = 9.0  # shares are not compared
    outside = found.outside(far, problem(world_size=8))
    assert outside == ("log_bags", "world_size", "optimizer")
    for broken in (None, {}, {**found.to_json(), "optimizers": ["magic"]}, {"features": 3}):
        with pytest.raises(ArtifactError):
            MeasuredRange.from_json(broken)


def test_the_analytic_model_is_the_sum_that_it_says() -> None:
    model = AnalyticCostModel(
        coefficients_ms_KP=((1, 2), (0, 0), (3, 0), (0, 0), (0, 0.5), (0, 0)),
        shard_ms_P=(10, 20),
        overhead_ms_P=(100, 200),
        latency_ms=0.5,
        bytes_per_ms=10,
    )
    rows = np.zeros((2, NUM_SHARD_FEATURES))
    rows[:, :6] = [[1, 9, 2, 9, 4, 9], [0, 9, 1, 9, 2, 9]]
    # Forward 1·1 + 3·2 + 10 and 3·1 + 10; backward 2·1 + 0.5·4 + 20 and 0.5·2 + 20.
    assert model.encode(rows).tolist() == [[17.0, 24.0], [13.0, 21.0]]
    assert cost_of(model, model.encode(rows)).tolist() == [130.0, 245.0]
    assert model.collective_ms(np.array([[2.0, 30.0, 70.0, 100.0]])).tolist() == [7.5]
    assert AnalyticCostModel.from_json(model.to_json()) == model
    assert AnalyticCostModel.from_json(model.to_json()).fingerprint == model.fingerprint
    assert model.fingerprint != AnalyticCostModel().fingerprint


@pytest.mark.parametrize(
    "change",
    [
        {"bytes_per_ms": 0.0},
        {"latency_ms": -1.0},
        {"latency_ms": float("nan")},
        {"shard_ms_P": (1.0,)},
        {"overhead_ms_P": (1.0, float("inf"))},
        {"coefficients_ms_KP": ((1.0, 1.0),)},
    ],
)
def test_unusable_coefficients_are_refused(change: dict[str, object]) -> None:
    with pytest.raises(InputError):
        AnalyticCostModel(**change)  # type: ignore[arg-type]
    with pytest.raises(ArtifactError):
        AnalyticCostModel.from_json({**AnalyticCostModel().to_json(), **change})


@pytest.mark.parametrize("value", [None, [], {"colour": 1}, {"latency_ms": "fast"}])
def test_other_json_is_no_analytic_model(value: object) -> None:
    with pytest.raises(ArtifactError):
        AnalyticCostModel.from_json(value)


def test_models_are_found_by_name_or_not(tmp_path: Path) -> None:
    assert load_cost_model("analytic") == AnalyticCostModel()
    with pytest.raises(ArtifactError, match="does not exist"):
        load_cost_model(tmp_path / "nowhere")


def test_the_makespan_bound_against_enumeration() -> None:
    generator = np.random.default_rng(0)
    for _ in range(60):
        num, ranks = int(generator.integers(1, 8)), int(generator.integers(1, 4))
        costs = generator.choice([0.0, 1.0, 1.5, 7.0, generator.random()], num)
        best = min(
            max(
                sum(c for c, r in zip(costs, placed, strict=True) if r == rank)
                for rank in range(ranks)
            )
            for placed in itertools.product(range(ranks), repeat=num)
        )
        bound = makespan_lower_bound(costs, ranks)
        assert bound <= best + 1e-12
        assert bound >= max(costs.max(), costs.sum() / ranks) - 1e-9
    # Three equal shards on two ranks: one rank has two of them.
    assert makespan_lower_bound([4.0, 4.0, 4.0], 2) == pytest.approx(8.0)
    assert makespan_lower_bound([], 5) == 0.0
