"""What every cost model owes its callers: finite costs of sums, zero for nothing, honest bounds."""

from __future__ import annotations

import importlib.metadata
import itertools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from autoshard.artifact_files import shipped_names
from autoshard.cost_models.device_specs import DEVICE_SPECS
from autoshard.cost_models.exported import ANALYTIC, ENTRY_POINTS, load_cost_model
from autoshard.cost_models.simulated import SIMULATED_PREFIX
from autoshard.features import SHARD_FEATURES, WORK_FEATURES, traffic_features
from autoshard.objective import CostSource
from autoshard.problem import ShardingProblem, TrainingConfig
from autoshard.protocols import CostModel
from autoshard.tables import Table
from autoshard.topology import GIB, Topology
from tests.cost_cases import calibrated_folder, exported, features_of, pool

MODELS: dict[str, Callable[[], CostModel]] = {
    **{kind: lambda kind=kind: exported(kind) for kind in ("additive", "autoshard", "neuroshard")},
    "calibrated": lambda: load_cost_model(str(calibrated_folder())),
    **{
        name: lambda name=name: load_cost_model(name)
        for name in (
            ANALYTIC,
            *(SIMULATED_PREFIX + spec for spec in DEVICE_SPECS),
            *shipped_names("cost_models"),
            *(point.name for point in importlib.metadata.entry_points(group=ENTRY_POINTS)),
        )
    },
}
#: Programs compute in float32.
RELATIVE = 2e-6


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> CostModel:
    return MODELS[request.param]()


TABLES = pool("test")


def costs(model: CostModel, tables: list[Table], batch_size: int = 512) -> np.ndarray:
    encoding_SD = model.encode(features_of(tables, batch_size))
    return model.compute_ms(encoding_SD.sum(axis=0)[None], np.array([len(tables)]))[0]


def test_it_says_what_it_is(model: CostModel) -> None:
    assert isinstance(model, CostModel)
    assert model.name
    assert model.source in (CostSource.PREDICTED, CostSource.SIMULATED)
    assert model.fingerprint
    assert model.fingerprint == model.fingerprint


def test_encodings_are_float64_rows(model: CostModel) -> None:
    width = model.encode(features_of(TABLES[:2])).shape[1]
    for num in (0, 1, 5):
        encoding_SD = model.encode(features_of(TABLES[:num]).reshape(num, len(SHARD_FEATURES)))
        assert encoding_SD.shape == (num, width)
        assert encoding_SD.dtype == np.float64
        assert np.all(np.isfinite(encoding_SD))


def test_rows_do_not_depend_on_their_neighbours(model: CostModel) -> None:
    encoding_SD = model.encode(features_of(TABLES[:20]))
    one_by_one = np.concatenate([model.encode(features_of([table])) for table in TABLES[:20]])
    np.testing.assert_allclose(one_by_one, encoding_SD, rtol=1e-4, atol=1e-5)
    counts = np.arange(1, 21)
    sums_ND = np.cumsum(encoding_SD, axis=0)
    together = model.compute_ms(sums_ND, counts)
    alone = np.concatenate(
        [model.compute_ms(sums_ND[i : i + 1], counts[i : i + 1]) for i in range(20)]
    )
    np.testing.assert_allclose(alone, together, rtol=RELATIVE)


def test_costs_are_positive_and_those_of_nothing_are_zero(model: CostModel) -> None:
    encoding_SD = model.encode(features_of(TABLES))
    cost_NP = model.compute_ms(
        np.vstack([encoding_SD, np.zeros_like(encoding_SD[:1])]), np.array([1] * len(TABLES) + [0])
    )
    assert cost_NP.shape == (len(TABLES) + 1, 2)
    assert cost_NP.dtype == np.float64
    assert np.all(cost_NP[:-1] > 0)
    assert np.all(np.isfinite(cost_NP))
    assert np.all(cost_NP[-1] == 0)
    assert model.compute_ms(np.zeros((0, encoding_SD.shape[1])), np.zeros(0, int)).shape == (0, 2)


def test_what_a_search_took_away_leaves_nothing_strange(model: CostModel) -> None:
    encoding_SD = model.encode(features_of(TABLES[:12]))
    rest_D = encoding_SD.sum(axis=0) - encoding_SD[::-1].sum(axis=0)
    left = model.compute_ms(np.stack([rest_D, rest_D - 1e-12]), np.array([0, 1]))
    assert np.all(left[0] == 0)
    assert np.all(np.isfinite(left[1]))
    assert np.all(left[1] >= 0)


def test_the_order_of_shards_does_not_matter(model: CostModel) -> None:
    np.testing.assert_allclose(
        costs(model, TABLES[:15]), costs(model, TABLES[14::-1]), rtol=RELATIVE
    )


def test_it_is_the_same_every_time_and_in_threads(model: CostModel) -> None:
    expected = costs(model, TABLES[:9])
    with ThreadPoolExecutor(4) as threads:
        for found in threads.map(lambda _: costs(model, TABLES[:9]), range(16)):
            np.testing.assert_allclose(found, expected, rtol=RELATIVE)


@pytest.mark.parametrize("num_everywhere", [0, 1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_placement_is_below_the_compute_bound(
    model: CostModel, world_size: int, num_everywhere: int
) -> None:
    for first in (0, 7, 14, 21):
        encoding_SD = model.encode(features_of(TABLES[first : first + 6]))
        everywhere = TABLES[first + 6 : first + 6 + num_everywhere]
        base_D = model.encode(features_of(everywhere)).sum(axis=0) if everywhere else None
        bound_P = model.compute_lower_bound_ms(encoding_SD, world_size, base_D)
        if bound_P is None:
            pytest.skip(f"{model.name} has no bound")
        best_P = np.full(2, np.inf)
        for ranks in itertools.product(range(world_size), repeat=len(encoding_SD)):
            sums_RD = np.zeros((world_size, encoding_SD.shape[1]))
            sums_RD += 0.0 if base_D is None else base_D
            np.add.at(sums_RD, list(ranks), encoding_SD)
            counts = np.bincount(ranks, minlength=world_size) + num_everywhere
            best_P = np.minimum(best_P, model.compute_ms(sums_RD, counts).max(axis=0))
        assert bound_P.shape == (2,)
        assert np.all(bound_P > 0)
        assert np.all(bound_P <= best_P)
        if base_D is not None:
            alone_P = model.compute_lower_bound_ms(encoding_SD, world_size)
            assert alone_P is not None
            assert np.all(bound_P > alone_P)


def test_the_bound_of_no_shards_is_zero(model: CostModel) -> None:
    width = model.encode(features_of(TABLES[:1])).shape[1]
    bound_P = model.compute_lower_bound_ms(np.zeros((0, width)), 4)
    assert bound_P is None or bound_P.tolist() == [0.0, 0.0]


def random_traffic(num: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(num):
        world_size = int(rng.choice([2, 3, 4, 8, 16, 100]))
        sent = 10 ** rng.uniform(0, 8, world_size)
        received = rng.permutation(sent)
        rows.append((world_size, sent.max(), received.max(), sent.sum()))
    return traffic_features(*(np.array(column) for column in zip(*rows, strict=True)))


def test_collectives_cost_time_unless_nothing_moves(model: CostModel) -> None:
    traffic_NC = random_traffic(50)
    cost_N = model.collective_ms(traffic_NC)
    assert cost_N.shape == (50,)
    assert cost_N.dtype == np.float64
    assert np.all(np.isfinite(cost_N))
    assert np.all(cost_N > 0)
    silent, alone = traffic_NC.copy(), traffic_NC.copy()
    silent[:, 1:] = 0
    alone[:, 0] = 1
    assert np.all(model.collective_ms(silent) == 0)
    assert np.all(model.collective_ms(alone) == 0)
    assert model.collective_ms(np.zeros((0, 4))).shape == (0,)
    np.testing.assert_allclose(model.collective_ms(traffic_NC[:1]), cost_N[:1], rtol=RELATIVE)


def test_no_spread_of_bytes_is_below_the_collective_bound(model: CostModel) -> None:
    for world_size, sent, received, total in random_traffic(300):
        bound = model.collective_lower_bound_ms(total, int(world_size))
        if bound is None:
            pytest.skip(f"{model.name} has no bound")
        for busiest in ((sent, received), (total / world_size, total / world_size)):
            row = np.array([[world_size, *busiest, total]])
            assert 0 < bound <= model.collective_ms(row)[0]
        assert model.collective_lower_bound_ms(0.0, int(world_size)) == 0
        assert model.collective_lower_bound_ms(total, 1) == 0


def test_absurd_tables_cost_a_finite_time(model: CostModel) -> None:
    absurd = [
        Table(name="huge", num_embeddings=2**62, embedding_dim=2**20, pooling_factor=1e6),
        Table(name="tiny", num_embeddings=1, embedding_dim=1, pooling_factor=0.0),
    ]
    features_SF = features_of(absurd, batch_size=2**31 - 1, world_size=65_536)
    features_SF = np.vstack([features_SF, features_SF[:1]])
    features_SF[2, : len(WORK_FEATURES)] = 1e300
    encoding_SD = model.encode(features_SF)
    assert np.all(np.isfinite(encoding_SD))
    for counts in (1, 100_000):
        cost_NP = model.compute_ms(encoding_SD * counts, np.full(3, counts))
        assert np.all(np.isfinite(cost_NP))
        assert np.all(cost_NP >= 0)
    traffic = traffic_features(np.array([65_536]), *(np.array([1e18]) for _ in range(3)))
    assert np.all(np.isfinite(model.collective_ms(traffic)))


def test_what_was_not_measured_is_extrapolated(model: CostModel) -> None:
    strange = Table(name="huge", num_embeddings=2**40, embedding_dim=4096, pooling_factor=500.0)
    problem = ShardingProblem(
        tables=(strange,),
        topology=Topology(world_size=1000, hbm_bytes=(GIB,) * 1000),
        training=TrainingConfig(batch_size=100_000),
    )
    found = model.is_extrapolated(features_of([strange], 100_000, 1000), problem)
    assert found is True
