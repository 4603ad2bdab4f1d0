"""The analytic cost model against arithmetic, and the measured range that models carry."""

from __future__ import annotations

import json

import numpy as np
import pytest

from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.cost_models.ranges import MeasuredRange
from autoshard.errors import ArtifactError, InputError
from autoshard.features import SHARD_FEATURES, WORK_FEATURES, traffic_features
from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.tables import Table
from autoshard.topology import GIB, Topology
from tests.cost_cases import features_of

TABLE = Table(name="t", num_embeddings=1000, embedding_dim=16, pooling_factor=4.0)
COEFFICIENTS = tuple((0.001 * k, 0.002 * k) for k in range(1, len(WORK_FEATURES) + 1))
MODEL = AnalyticCostModel(
    coefficients_ms_KP=COEFFICIENTS,
    shard_ms_P=(0.5, 0.25),
    overhead_ms_P=(10.0, 20.0),
    latency_ms=3.0,
    bytes_per_ms=100.0,
)


def test_a_shard_costs_its_work_times_the_coefficients():
    features_SF = features_of([TABLE], batch_size=32)
    bags, lookups = 32, 128
    unique = features_SF[0, WORK_FEATURES.index("fwd_unique_rows")]
    counts = [bags, bags * 16, lookups, lookups * 16, unique, unique * 16]
    work = [*counts, *counts, 0, 0]  # both kernels see the same; nothing is replicated
    forward = sum(0.001 * (k + 1) * amount for k, amount in enumerate(work)) + 0.5
    backward = sum(0.002 * (k + 1) * amount for k, amount in enumerate(work)) + 0.25
    np.testing.assert_allclose(MODEL.encode(features_SF), [[forward, backward]])
    np.testing.assert_allclose(
        MODEL.compute_ms(np.array([[forward, backward], [0.0, 0.0]]), np.array([1, 0])),
        [[forward + 10, backward + 20], [0, 0]],
    )


def test_the_defaults_are_of_the_documented_size():
    tables = [
        Table(name=f"t{i}", num_embeddings=10_000_000, embedding_dim=64, pooling_factor=20.0)
        for i in range(8)
    ]
    model = AnalyticCostModel()
    encoding_SD = model.encode(features_of(tables, batch_size=2048))
    forward, backward = model.compute_ms(encoding_SD.sum(axis=0)[None], np.array([8]))[0]
    assert forward == pytest.approx(13, rel=0.05)
    assert backward == pytest.approx(130, rel=0.05)


def test_bounds_worked_out_by_hand():
    encoding_SD = np.array([[3.0, 1.0], [3.0, 1.0], [3.0, 7.0]])
    np.testing.assert_allclose(MODEL.compute_lower_bound_ms(encoding_SD, 2), [16.0, 27.0])
    # Three ranks for three shards: each holds one, and pays the overhead.
    np.testing.assert_allclose(MODEL.compute_lower_bound_ms(encoding_SD, 8), [13.0, 27.0])
    assert MODEL.collective_lower_bound_ms(800.0, 4) == pytest.approx(3.0 + 2.0)
    assert MODEL.collective_lower_bound_ms(800.0, 1) == 0.0


def test_collectives_wait_for_the_busier_direction():
    traffic_NC = traffic_features(
        np.array([2, 2]), np.array([100.0, 0.0]), np.array([400.0, 0.0]), np.array([500.0, 0.0])
    )
    assert MODEL.collective_ms(traffic_NC).tolist() == [7.0, 0.0]


def problem(world_size=1, optimizer=Optimizer.SGD):
    return ShardingProblem(
        tables=(TABLE,),
        topology=Topology(world_size=world_size, hbm_bytes=(GIB,) * world_size),
        training=TrainingConfig(batch_size=32, optimizer=optimizer),
    )


def test_without_measurements_everything_is_extrapolated():
    features_SF = features_of([TABLE])
    assert MODEL.is_extrapolated(features_SF, problem()) is True
    measured = MeasuredRange.of(features_SF, world_sizes=(4, 2), optimizers=(Optimizer.SGD,))
    fitted = AnalyticCostModel(measured_range=measured)
    assert fitted.is_extrapolated(features_SF, problem()) is False
    assert fitted.is_extrapolated(features_SF, problem(world_size=3)) is False


def test_the_range_names_what_is_outside():
    low, high = features_of([TABLE], 32), features_of([TABLE], 64)
    measured = MeasuredRange.of(
        np.vstack([low, high]), world_sizes=(2, 4), optimizers=(Optimizer.SGD,)
    )
    assert measured.outside(low, problem()) == ()
    assert measured.outside(features_of([TABLE], 48), problem(world_size=4)) == ()
    assert measured.outside(low, problem(world_size=8)) == ("world_size",)
    assert measured.outside(low, problem(optimizer=Optimizer.ADAM)) == ("optimizer",)
    outside = measured.outside(features_of([TABLE], 4096), problem())
    assert {"fwd_bags", "log_fwd_bags", "bwd_lookups", "log_bwd_lookups"} <= set(outside)
    assert "log_num_rows" not in outside
    flagged = low.copy()
    flagged[0, SHARD_FEATURES.index("is_weighted")] = 1.0
    assert measured.outside(flagged, problem()) == ("is_weighted",)
    assert measured.outside(low[:0], problem()) == ()
    unmeasured = MeasuredRange.of(low, optimizers=(Optimizer.SGD,))
    assert unmeasured.outside(low, problem(world_size=2)) == ("world_size",)


def test_models_and_ranges_survive_json():
    measured = MeasuredRange.of(features_of([TABLE]), world_sizes=(2,), optimizers=(Optimizer.SGD,))
    model = AnalyticCostModel(coefficients_ms_KP=COEFFICIENTS, measured_range=measured)
    again = AnalyticCostModel.from_json(json.loads(json.dumps(model.to_json())))
    assert again == model
    assert again.fingerprint == model.fingerprint
    assert model.fingerprint != AnalyticCostModel(coefficients_ms_KP=COEFFICIENTS).fingerprint


@pytest.mark.parametrize(
    "changes",
    [
        {"coefficients_ms_KP": ((1.0, 1.0),)},
        {"coefficients_ms_KP": ((-1.0, 1.0), *COEFFICIENTS[1:])},
        {"coefficients_ms_KP": ((float("nan"), 1.0), *COEFFICIENTS[1:])},
        {"coefficients_ms_KP": "many"},
        {"shard_ms_P": (1.0,)},
        {"overhead_ms_P": (float("inf"), 1.0)},
        {"latency_ms": -1.0},
        {"latency_ms": "soon"},
        {"bytes_per_ms": 0.0},
    ],
)
def test_unusable_values_are_refused(changes):
    with pytest.raises(InputError, match=f"{next(iter(changes))} is not usable"):
        AnalyticCostModel(**changes)


@pytest.mark.parametrize(
    "value", [None, [], {"speed": 1}, {"latency_ms": -1}, {"measured_range": {"features": 3}}]
)
def test_malformed_json_is_refused(value):
    with pytest.raises(ArtifactError):
        AnalyticCostModel.from_json(value)
