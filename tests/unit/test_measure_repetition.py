import math

import numpy as np
import pytest

from autoshard.errors import InputError
from autoshard.measure.config import (
    Collective,
    CollectiveConfig,
    MeasureConfig,
    TimingConfig,
    measure_config,
    to_plain,
)
from autoshard.measure.repetition import Repetitions, is_settled, median_relative_error


def test_statistics_of_known_values():
    repetitions = Repetitions.of([5.0, 1.0, 4.0, 2.0, 3.0])
    assert repetitions.median_ms == 3.0
    assert repetitions.min_ms == 1.0
    assert repetitions.p20_ms == pytest.approx(1.8)
    assert repetitions.p80_ms == pytest.approx(4.2)


def test_error_of_the_median_is_that_of_repeated_experiments():
    rng = np.random.default_rng(0)
    experiments = np.sort(rng.gamma(4.0, 2.0, size=(2000, 101)), axis=1)
    actual = np.median(experiments, axis=1).std() / np.median(experiments)
    estimated = np.mean([median_relative_error(ordered) for ordered in experiments])
    assert estimated == pytest.approx(actual, rel=0.1)


def test_too_few_repetitions_are_not_trusted():
    assert median_relative_error(np.array([1.0, 1.0])) == math.inf


@pytest.mark.parametrize(
    ("times", "elapsed_s", "settled"),
    [
        ([1.0] * 4, 0.0, False),  # below the minimum, however even
        ([1.0] * 5, 0.0, True),  # even
        ([1.0, 2.0, 3.0, 4.0, 5.0], 0.0, False),  # uneven, time left
        ([1.0, 2.0, 3.0, 4.0, 5.0], 1.0, True),  # uneven, time spent
        ([1.0, 2.0, 3.0, 4.0, 5.0] * 4, 0.0, True),  # uneven, repetitions spent
    ],
)
def test_when_repeating_ends(times, elapsed_s, settled):
    config = TimingConfig(
        min_iterations=5, max_iterations=20, target_relative_error=0.02, time_budget_s=1.0
    )
    assert is_settled([times], elapsed_s, config) is settled


def test_every_series_must_settle():
    config = TimingConfig(min_iterations=5, max_iterations=20, time_budget_s=1.0)
    assert not is_settled([[1.0] * 5, [1.0, 2.0, 3.0, 4.0, 5.0]], 0.0, config)


def test_configuration_survives_plain_values():
    collectives = CollectiveConfig(kinds=(Collective.ALL_GATHER, Collective.ALL_TO_ALL))
    config = MeasureConfig(seed=3, num_sets=7, num_repeated_sets=2, collectives=collectives)
    assert measure_config(to_plain(config)) == config


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"kernels": {"timing": {"warmup_iteration": 1}}}, "kernels.timing.warmup_iteration"),
        ({"kernels": {"cache": "wam"}}, "did you mean 'warm'"),
        ({"kernels": 3}, "kernels is not a mapping"),
        ({"sampling": {"num_samples": 512}}, "sampling.num_samples is not a list"),
        ({"sampling": {"num_samples": [0]}}, "num_samples"),
        ({"sampling": {"split_shares": [0.5, 0.5, 0.5]}}, "sum to 1"),
        ({"collectives": {"world_sizes": [1, 2]}}, "world_sizes"),
        ({"collectives": {"kinds": ["all_to_al"]}}, "collectives: kinds.*mean 'all_to_all'"),
        ({"collectives": {"kinds": []}}, "kinds is not usable; got: none"),
        ({"collectives": {"kinds": ["all_gather", "all_gather"]}}, "each once"),
        ({"collectives": {"kinds": "all_gather"}}, "kinds is not a list"),
        ({"collectives": {"kinds": [3]}}, "not known; got: 3"),
        ({"kernels": {"timing": {"warmup_iterations": 0}}}, "warmup_iterations"),
        ({"num_sets": 3, "num_repeated_sets": 4}, "num_repeated_sets"),
        ({"item_time_limit_s": float("nan")}, "item_time_limit_s"),
        ({"kernels": {"arena_bytes": 2**20}}, "arena_bytes"),
    ],
)
def test_wrong_configurations_are_named(values, message):
    with pytest.raises(InputError, match=message):
        measure_config(values)
