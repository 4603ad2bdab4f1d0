"""The simulated device against arithmetic from its constants, its bound, and its names."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.cost_models.device_specs import (
    A100_80GB,
    DEVICE_SPECS,
    H100_80GB,
    DeviceSpec,
    find_device_spec,
)
from autoshard.cost_models.exported import load_cost_model
from autoshard.cost_models.simulated import SimulatedCostModel
from autoshard.costing import predict_step
from autoshard.errors import ArtifactError, InputError
from autoshard.features import SHARD_FEATURES, traffic_features
from autoshard.objective import CostSource
from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.shards import ShardSlice
from autoshard.tables import DataType, Table
from autoshard.topology import GIB, Topology
from tests.cost_cases import features_of, pool

#: Round numbers: memory delivers 500 bytes a millisecond, the cache holds 1,000 bytes.
SPEC = DeviceSpec(
    name="toy",
    hbm_bytes=2**20,
    hbm_bytes_per_ms=1000.0,
    hbm_efficiency=0.5,
    l2_bytes=1000,
    l2_bytes_per_ms=10_000.0,
    first_launch_ms=0.1,
    next_launch_ms=0.01,
    local_world_size=4,
    local_bytes_per_ms=100.0,
    remote_bytes_per_ms=10.0,
    local_latency_ms=0.5,
    remote_latency_ms=2.0,
)
MODEL = SimulatedCostModel(spec=SPEC)
#: Eight bags of four ids, all the same row of 16 columns (64 bytes).
ONE_ROW = Table(name="t", num_embeddings=1, embedding_dim=16, pooling_factor=4.0)
#: 2 and 12 kernels.
LAUNCHES = np.array([0.1 + 0.01, 0.1 + 0.11])
_COLUMN = {name: index for index, name in enumerate(SHARD_FEATURES)}


def cost(model: SimulatedCostModel, tables: list[Table], batch_size: int = 8) -> np.ndarray:
    encoding_SD = model.encode(features_of(tables, batch_size))
    return model.compute_ms(encoding_SD.sum(axis=0)[None], np.array([len(tables)]))[0]


def row(**values: float) -> np.ndarray:
    """Features of one shard, [1, F]; bags, lookups and rows of both phases, the rest 0."""
    features_SF = np.zeros((1, len(SHARD_FEATURES)))
    for name, value in values.items():
        names = [name] if name in _COLUMN else [f"fwd_{name}", f"bwd_{name}"]
        features_SF[0, [_COLUMN[n] for n in names]] = value
    return features_SF


def work_ms(model: SimulatedCostModel, features_SF: np.ndarray) -> np.ndarray:
    sums = model.encode(features_SF).sum(axis=0)[None]
    return model.compute_ms(sums, np.array([len(features_SF)]))[0]


def test_a_set_that_memory_bounds():
    lookup = (64 + 32 * 8 + 8 * (8 + 64)) / 500  # the row once, ids, offsets and outputs
    # 32 pairs: 1,024 bytes of buffers do not quite fit; one pass moves 1,920 bytes.
    sort = (1000 / 1024 * 1024 + 24 / 1024 * 1920) / 500
    # 8 gradients of 64 bytes, 32 pairs of 12, 8 offsets, and the row and its state both ways.
    update = (8 * 64 + 32 * 12 + 8 * 8 + 2 * (64 + 32)) / 500
    np.testing.assert_allclose(cost(MODEL, [ONE_ROW]), LAUNCHES + np.array([lookup, sort + update]))


def test_a_set_that_the_cache_bounds():
    slow = SimulatedCostModel(spec=dataclasses.replace(SPEC, l2_bytes_per_ms=100.0))
    lookup = (32 * 64 + 32 * 8 + 8 * (8 + 64)) / 100
    sort, update = 1920 / 100, (32 * 64 + 32 * 12 + 8 * 8 + 2 * (64 + 32)) / 100
    np.testing.assert_allclose(cost(slow, [ONE_ROW]), LAUNCHES + np.array([lookup, sort + update]))


@pytest.mark.parametrize(
    ("optimizer", "state_bytes"),
    [
        (Optimizer.SGD, 0),
        (Optimizer.ROWWISE_ADAGRAD, 32),  # 4 bytes, moved as a sector
        (Optimizer.ADAGRAD, 64),
        (Optimizer.ADAM, 128),
    ],
)
def test_optimizer_states_are_read_and_written(optimizer: Optimizer, state_bytes: int):
    costs = [
        cost(SimulatedCostModel(spec=SPEC, optimizer=o), [ONE_ROW])
        for o in (optimizer, Optimizer.SGD)
    ]
    np.testing.assert_allclose(costs[0] - costs[1], [0, 2 * state_bytes / 500], atol=1e-12)


def test_what_a_set_shares_the_cache_with():
    # Four rows of 400 bytes (416 in sectors): 1,664 distinct bytes against a cache of 1,000.
    one = row(lookups=40, unique_rows=4, log_num_rows=np.log1p(4), log_num_cols=np.log1p(100))
    hit = 1000 / 1664
    lookup = hit * 1664 + (1 - hit) * 40 * 416 + 40 * 8
    assert work_ms(MODEL, one)[0] == pytest.approx(LAUNCHES[0] + lookup / 500)
    # Two such shards miss more often than each alone.
    hit = 1000 / 3328
    both = hit * 3328 + (1 - hit) * 80 * 416 + 80 * 8
    assert work_ms(MODEL, np.vstack([one, one]))[0] == pytest.approx(LAUNCHES[0] + both / 500)
    assert both > 2 * lookup


@pytest.mark.parametrize(
    ("num_rows", "passes"),
    [(1, 1), (255, 1), (256, 2), (65_535, 2), (65_536, 3), (2**24, 4), (2**40, 6)],
)
def test_passes_of_the_sort(num_rows: int, passes: int):
    spec = dataclasses.replace(SPEC, l2_bytes=2**40, l2_bytes_per_ms=1.0)  # all from the cache
    features_SF = row(lookups=10, log_num_rows=np.log1p(num_rows), log_num_cols=np.log1p(4))
    # Gradients: no bag is wider than its 32 bytes; pairs are read once more.
    update = 10 * 32 + 10 * 12
    expected = LAUNCHES[1] + 10 * (3 * 8 + 12 + 24 * passes) + update
    assert work_ms(SimulatedCostModel(spec=spec), features_SF)[1] == pytest.approx(expected)


def test_half_precision_and_weights():
    half = dataclasses.replace(ONE_ROW, name="h", data_type=DataType.FP16)
    weighted = dataclasses.replace(ONE_ROW, name="w", weighted=True)
    plain = cost(MODEL, [ONE_ROW])
    # A row of 32 bytes instead of 64: once forward, read and written backward.
    np.testing.assert_allclose(plain - cost(MODEL, [half]), [32 / 500, 64 / 500])
    heavy = cost(MODEL, [weighted])
    assert heavy[0] - plain[0] == pytest.approx(32 * 4 / 500)
    sorts = [
        (1000 + (1 - 1000 / buffers) * traffic) / 500
        for buffers, traffic in ((1024, 1920), (2048, 3840))
    ]
    assert heavy[1] - plain[1] == pytest.approx(sorts[1] - sorts[0] + 32 * 4 / 500)


def test_each_kind_of_kernel_is_launched():
    half = dataclasses.replace(ONE_ROW, name="h", data_type=DataType.FP16)
    fast = dataclasses.replace(
        SPEC, hbm_bytes_per_ms=1e15, l2_bytes_per_ms=1e15, hbm_efficiency=1.0
    )
    model = SimulatedCostModel(spec=fast)
    np.testing.assert_allclose(cost(model, [ONE_ROW, ONE_ROW]), LAUNCHES)
    np.testing.assert_allclose(cost(model, [ONE_ROW, half, half]), [0.1 + 0.03, 0.1 + 0.23])


def test_transfers_inside_and_across_nodes():
    traffic_NC = traffic_features(
        np.array([4, 4, 8, 3, 8, 1]),
        np.array([300.0, 100.0, 700.0, 0.0, 1e-9, 5.0]),
        np.array([100.0, 300.0, 100.0, 0.0, 1e-9, 5.0]),
        np.array([400.0, 400.0, 900.0, 0.0, 1e-9, 5.0]),
    )
    # Of 8 ranks in nodes of 4, three peers are near and four far.
    far = max(700 * 3 / 7 / 100, 700 * 4 / 7 / 10)
    expected = [0.5 + 3, 0.5 + 3, 2 + far, 0, 2, 0]
    np.testing.assert_allclose(MODEL.collective_ms(traffic_NC), expected)
    assert MODEL.collective_lower_bound_ms(8 * 700.0, 8) == pytest.approx(2 + far)


def test_a_step_on_an_a100_by_hand():
    """A table far larger than the cache, one id a bag: every byte comes from memory once."""
    table = Table(name="t", num_embeddings=10**9, embedding_dim=128, pooling_factor=1.0)
    problem = ShardingProblem(
        tables=(table,),
        topology=Topology.uniform(1, 80 * GIB),
        training=TrainingConfig(batch_size=1_000_000, optimizer=Optimizer.SGD),
    )
    model = SimulatedCostModel(spec=A100_80GB, optimizer=Optimizer.SGD)
    step = predict_step(problem, [[ShardSlice.whole(table)]], model)
    # 512 bytes read and written, 8 of an id, 8 of an offset: 1.04 GB at 1.8351 TB/s.
    assert step.fwd_compute_ms[0] == pytest.approx(1040 / 1835.1 + 0.0076, rel=1e-3)
    assert step.source is CostSource.SIMULATED
    assert step.bwd_comms_ms == 0


WORK = st.floats(0, 1e9)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.tuples(WORK, WORK, WORK, WORK, st.integers(1, 2048)), min_size=1, max_size=4),
    st.integers(0, 3),
    st.floats(1.0, 100.0),
    st.sampled_from([SPEC, A100_80GB, H100_80GB]),
)
def test_more_work_never_costs_less(shards, which, factor, spec):
    model = SimulatedCostModel(spec=spec)

    def features(grown: bool) -> np.ndarray:
        rows = []
        for number, (bags, lookups, unique, num_rows, cols) in enumerate(shards):
            values = [bags, max(lookups, unique), unique, num_rows]
            if grown and number == 0:
                values[which] = values[which] * factor + 1
            names = ("bags", "lookups", "unique_rows")
            rows.append(
                row(
                    **dict(zip(names, values, strict=False)),
                    log_num_rows=np.log1p(values[3]),
                    log_num_cols=np.log1p(cols),
                )
            )
        return np.vstack(rows)

    less, more = work_ms(model, features(False)), work_ms(model, features(True))
    assert np.all(more >= less * (1 - 1e-9))
    assert np.all(less > 0)
    # A union takes at least its parts' times on every roof: what the lower bound rests on.
    encoding_SD = model.encode(features(True))
    for together_KN, apart_KN in zip(
        model._roofs_ms(encoding_SD.sum(axis=0)[None]), model._roofs_ms(encoding_SD), strict=True
    ):
        assert np.all(together_KN[:, 0] >= apart_KN.sum(axis=1) * (1 - 1e-9))


@pytest.mark.parametrize("spec", [SPEC, A100_80GB], ids=lambda spec: spec.name)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_no_placement_is_below_the_bound(spec: DeviceSpec, world_size: int):
    model = SimulatedCostModel(spec=spec)
    for first, batch_size in itertools.product((0, 6, 12), (4, 65_536)):
        encoding_SD = model.encode(features_of(pool("test")[first : first + 6], batch_size))
        bound_P = model.compute_lower_bound_ms(encoding_SD, world_size)
        best_P = np.full(2, np.inf)
        for ranks in itertools.product(range(world_size), repeat=len(encoding_SD)):
            sums_RD = np.zeros((world_size, encoding_SD.shape[1]))
            np.add.at(sums_RD, list(ranks), encoding_SD)
            counts = np.bincount(ranks, minlength=world_size)
            best_P = np.minimum(best_P, model.compute_ms(sums_RD, counts).max(axis=0))
        assert np.all(bound_P <= best_P)
        assert np.all(bound_P > 0.3 * best_P)
        if world_size == 1 and spec is A100_80GB and batch_size == 4:
            np.testing.assert_allclose(bound_P, best_P, rtol=0.2)


def problem_on(topology: Topology, **changes) -> tuple[np.ndarray, ShardingProblem]:
    table = dataclasses.replace(ONE_ROW, **changes)
    problem = ShardingProblem(
        tables=(table,), topology=topology, training=TrainingConfig(batch_size=8)
    )
    return features_of([table], 8, topology.world_size), problem


def test_what_the_formulas_do_not_describe_is_extrapolated():
    model = SimulatedCostModel(spec=A100_80GB)
    described = [
        Topology.uniform(1, GIB),
        Topology.uniform(8, 80 * GIB),
        Topology.uniform(64, GIB, local_world_size=8),
    ]
    for topology in described:
        assert not model.is_extrapolated(*problem_on(topology))
    others = [
        Topology.uniform(64, GIB),  # one node of 64
        Topology.uniform(8, GIB, local_world_size=4),
        Topology.uniform(2, 81 * GIB),
    ]
    for topology in others:
        assert model.is_extrapolated(*problem_on(topology))
    one = described[0]
    assert model.is_extrapolated(*problem_on(one, embedding_dim=2052))
    assert model.is_extrapolated(*problem_on(one, num_embeddings=2**31, embedding_dim=128))
    adam = SimulatedCostModel(spec=A100_80GB, optimizer=Optimizer.ADAM)
    assert adam.is_extrapolated(*problem_on(one))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hbm_bytes", 0),
        ("l2_bytes", 1.5),
        ("local_world_size", 0),
        ("hbm_efficiency", 1.1),
        ("hbm_efficiency", 0.0),
        ("l2_bytes_per_ms", 0.0),
        ("remote_bytes_per_ms", float("nan")),
        ("local_latency_ms", -1.0),
        ("name", ""),
    ],
)
def test_a_spec_checks_itself(field: str, value: object):
    with pytest.raises(InputError, match=field.split("_")[0]):
        dataclasses.replace(SPEC, **{field: value})


def test_every_named_spec_loads_and_differs():
    models = [load_cost_model(f"simulated:{name}") for name in DEVICE_SPECS]
    assert [model.name for model in models] == [f"simulated:{name}" for name in DEVICE_SPECS]
    assert len({model.fingerprint for model in models}) == len(DEVICE_SPECS)
    assert all(find_device_spec(name).name == name for name in DEVICE_SPECS)
    same = load_cost_model("simulated:a100-80gb?local_world_size=8&optimizer=rowwise_adagrad")
    assert same.fingerprint == models[0].fingerprint


def test_options_behind_a_name():
    model = load_cost_model("simulated:h100-80gb?optimizer=adam&local_world_size=4")
    assert isinstance(model, SimulatedCostModel)
    assert model.optimizer is Optimizer.ADAM
    assert model.spec == dataclasses.replace(H100_80GB, local_world_size=4)
    assert model.fingerprint != load_cost_model("simulated:h100-80gb").fingerprint


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("simulated:a100", "a100-80gb, h100-80gb.*did you mean 'a100-80gb'"),
        ("simulated:", "a100-80gb, h100-80gb"),
        ("simulated", "simulated:a100-80gb"),
        ("h100-80gb", "simulated:h100-80gb"),
    ],
)
def test_wrong_names_list_the_right_ones(name: str, says: str):
    with pytest.raises(ArtifactError, match=says):
        load_cost_model(name)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("speed=2", "optimizer.*local_world_size"),
        ("optimizer=lamb", "rowwise_adagrad"),
        ("local_world_size=two", "whole number"),
        ("local_world_size=0", ">= 1"),
        ("optimizer", "option=value"),
    ],
)
def test_wrong_options_are_refused(options: str, says: str):
    with pytest.raises(InputError, match=says):
        load_cost_model(f"simulated:a100-80gb?{options}")


def test_a_model_checks_its_fields():
    with pytest.raises(InputError, match="spec"):
        SimulatedCostModel(spec="a100-80gb")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="optimizer"):
        SimulatedCostModel(spec=SPEC, optimizer="adam")  # type: ignore[arg-type]
