"""The error report against arithmetic, and the baselines where their answer is known."""

from __future__ import annotations

import dataclasses
import io
import itertools

import numpy as np
import pytest
from rich.console import Console

from autoshard.features import WORK_FEATURES
from cost_net.analytic_fit import fit_analytic
from cost_net.baselines import BASELINES, linear, linear_weights, lookups_times_dim, sum_of_single
from cost_net.errors import MIN_GROUP, error_table, grouped_tau, noise_floor, score
from tests.cost_cases import kernels, measurements, trained

WORK = slice(0, len(WORK_FEATURES))


def test_errors_by_hand():
    measured = np.array([[10.0, 10.0], [10.0, 30.0], [20.0, 20.0]])
    predicted = np.array([[11.0, 10.0], [10.0, 15.0], [10.0, 30.0]])
    scores = score(predicted, measured, np.array([1, 1, 1]))
    assert scores["fwd"]["median"] == pytest.approx(0.1)
    assert scores["fwd"]["mean"] == pytest.approx((0.1 + 0 + 0.5) / 3)
    assert scores["bwd"]["median"] == pytest.approx(0.5)
    assert scores["total"]["median"] == pytest.approx(0.05)  # 21/20, 25/40, 40/40
    assert scores["total"]["mean"] == pytest.approx((0.05 + 0.375 + 0) / 3)
    assert scores["total"]["tau"] is None


def test_tau_counts_pairs_within_groups_only():
    rng = np.random.default_rng(0)
    groups = np.array([1] * 6 + [2] * 9 + [3] * (MIN_GROUP - 1))
    measured, predicted = rng.random(len(groups)), rng.random(len(groups))
    agree = []
    for group in (1, 2):  # the third is too small
        rows = np.flatnonzero(groups == group)
        agree += [
            np.sign((measured[a] - measured[b]) * (predicted[a] - predicted[b]))
            for a, b in itertools.combinations(rows, 2)
        ]
    assert grouped_tau(predicted, measured, groups) == pytest.approx(np.mean(agree))


def test_the_noise_floor_compares_repeats_with_each_other():
    data = kernels()
    times = data.time_ms_NP.copy()
    seen: set[int] = set()
    for row, number in enumerate(data.index_N):
        times[row] = 11.0 if number in seen else 10.0
        seen.add(number)
    floor = noise_floor(dataclasses.replace(data, time_ms_NP=times))
    assert floor is not None
    assert floor["num_pairs"] == data.num_sets - len(np.unique(data.index_N))
    assert floor["total"]["median"] == pytest.approx(0.1)
    unique = dataclasses.replace(data, index_N=np.arange(data.num_sets))
    assert noise_floor(unique) is None


def with_times(times_NP):
    return dataclasses.replace(kernels(), time_ms_NP=times_NP)


def test_the_linear_baseline_finds_a_linear_machine():
    weights_KP = np.linspace(1e-6, 2e-5, 2 * (len(WORK_FEATURES) + 2)).reshape(-1, 2)
    weights_KP[-2:] = [[0.3, 0.2], [0.1, 0.4]]
    data = kernels()
    inputs = np.hstack([data.summed(WORK), data.num_shards_N[:, None], np.ones((data.num_sets, 1))])
    linear_data = with_times(inputs @ weights_KP)
    predict = linear(linear_data.split("train"))
    unseen = linear_data.split("test")
    np.testing.assert_allclose(predict(unseen), unseen.time_ms_NP, rtol=1e-5)
    assert np.all(linear_weights(data.split("train")) >= 0)


def test_lookups_times_dim_is_one_coefficient():
    data = kernels()
    columns = [WORK_FEATURES.index(f"{phase}_lookup_elements") for phase in ("fwd", "bwd")]
    elements = data.summed(np.array(columns))
    predict = lookups_times_dim(with_times(elements * np.array([[2e-6, 5e-6]])).split("train"))
    np.testing.assert_allclose(predict(data), elements * np.array([[2e-6, 5e-6]]))


def test_sum_of_single_adds_what_tables_cost_alone():
    data = kernels()
    bags = data.summed(np.array([0]))
    times = np.repeat(bags * 1e-3 + data.num_shards_N[:, None] * 0.5, 2, axis=1)
    times[data.num_shards_N > 1] *= 7.0  # what sets cost together must not be looked at
    alone = data.num_shards_N == 1
    assert alone[data.split_N == "train"].sum() >= 2 * len(WORK_FEATURES)
    predict = sum_of_single(with_times(times).split("train"))
    expected = np.repeat(bags * 1e-3 + data.num_shards_N[:, None] * 0.5, 2, axis=1)
    np.testing.assert_allclose(predict(data), expected, rtol=0.02)


def test_the_fitted_analytic_model_is_the_linear_baseline():
    data = measurements()
    model = fit_analytic(data)
    test = data.kernels.split("test")
    encoding_SD = model.encode(test.features_SF)
    sums_ND = np.zeros((test.num_sets, 2))
    np.add.at(sums_ND, test.set_S, encoding_SD)
    np.testing.assert_allclose(
        model.compute_ms(sums_ND, test.num_shards_N),
        linear(data.kernels.split("train"))(test),
        rtol=1e-9,
    )
    predicted = model.collective_ms(data.collectives.traffic_MC)
    assert np.median(np.abs(predicted / data.collectives.time_ms_M - 1)) < 0.25
    assert model.measured_range is not None


def test_the_table_shows_every_predictor_beside_the_noise():
    out = io.StringIO()
    console = Console(width=160, file=out)
    console.print(error_table(trained().errors))
    text = out.getvalue()
    for name in (*BASELINES, "network (additive)", "a second measurement"):
        assert name in text
    assert "165 shard sets" in text
