"""Normalising and combining passes, on rows whose true times are known."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from autoshard.measure.normalising import (
    Response,
    combine_passes,
    normalise_by_references,
    repeat_spread,
)
from autoshard.measure.references import PHASES, REFERENCE_COLUMNS

SUFFIXES = ("ms", "p20_ms", "p80_ms", "min_ms", "wall_ms")


def measured(
    num_sets: int = 80, num_passes: int = 2, num_repeats: int = 2, noise: float = 0.0, seed: int = 0
) -> tuple[pd.DataFrame, np.ndarray]:
    """Rows of a moody machine, and what each row would take at its median mood, [rows].

    Large sets follow memory, small ones the caches; the forward by powers 0.8 and 0.3 of the
    references' own slowdown, the backward by half of that.
    """
    rng = np.random.default_rng(seed)
    rows, exact = [], []
    sizes = np.exp(rng.uniform(-3, 3, num_sets))
    z = (np.log(sizes) - np.log(sizes).mean()) / np.log(sizes).std()
    for repeat in range(num_repeats):
        for pass_ in range(num_passes):
            for index in range(num_sets):
                moods = rng.uniform(0.0, 0.7, len(REFERENCE_COLUMNS))  # logs of slowdowns
                response = 0.8 * moods[2] * (1 + 0.3 * z[index]) + 0.3 * moods[0]
                row = {
                    "hardware_fingerprint": "h",
                    "protocol": "p",
                    "index": index,
                    "repeat": repeat,
                    "pass": pass_,
                    "split": "test",
                    **dict(zip(REFERENCE_COLUMNS, 0.05 * np.exp(moods), strict=True)),
                }
                for phase, share in zip(PHASES, (1.0, 0.5), strict=True):
                    time_ms = sizes[index] * np.exp(share * response + noise * rng.normal())
                    row |= {f"{phase}_{suffix}": time_ms for suffix in SUFFIXES}
                rows.append(row)
                exact.append(sizes[index])
    return pd.DataFrame(rows), np.array(exact)


def test_moods_are_taken_out_up_to_one_common_factor() -> None:
    rows, exact = measured()
    raw = np.log(rows["fwd_ms"] / exact)
    found = normalise_by_references(rows)
    for phase in PHASES:
        # What is left is the response at the run's median mood, which depends on the size.
        left = np.log(found[f"{phase}_ms"] / exact)
        assert left.groupby(rows["index"]).std().max() < 0.02 < 0.1 < raw.std()
    for suffix in SUFFIXES:
        pd.testing.assert_series_equal(found[f"fwd_{suffix}"], found["fwd_ms"], check_names=False)
    pd.testing.assert_frame_equal(rows, measured()[0])  # the argument is as it was


def test_references_that_sets_do_not_follow_change_nothing() -> None:
    rows, exact = measured()
    for phase in PHASES:
        for suffix in SUFFIXES:
            rows[f"{phase}_{suffix}"] = exact
    np.testing.assert_allclose(normalise_by_references(rows)["bwd_ms"], exact)


@pytest.mark.parametrize("num_sets", [2, 10])
def test_a_response_is_not_guessed_from_too_few_repeats(num_sets: int) -> None:
    rows, _ = measured(num_sets)
    pd.testing.assert_frame_equal(normalise_by_references(rows), rows)
    alone, _ = measured(500, num_passes=1, num_repeats=1)
    pd.testing.assert_frame_equal(normalise_by_references(alone), alone)


def test_machines_have_responses_of_their_own() -> None:
    first, exact = measured()
    second, _ = measured()
    second["hardware_fingerprint"] = "other"
    for phase in PHASES:
        for suffix in SUFFIXES:
            second[f"{phase}_{suffix}"] = exact
    found = normalise_by_references(pd.concat([first, second], ignore_index=True))
    expected = normalise_by_references(first)["fwd_ms"].to_numpy()
    np.testing.assert_allclose(found["fwd_ms"][: len(first)], expected)
    np.testing.assert_allclose(found["fwd_ms"][len(first) :], exact)


def test_a_measurement_is_the_geometric_mean_of_its_passes() -> None:
    rows, _ = measured(3, num_passes=2, num_repeats=2)
    rows["fwd_ms"] = [1.0, 2.0, 3.0, 4.0, 8.0, 3.0, 5.0, 6.0, 7.0, 5.0, 6.0, 7.0]
    rows["bwd_ms"] = 1.0
    found = combine_passes(rows.sample(frac=1.0, random_state=0))
    assert found[["index", "repeat"]].to_numpy().tolist() == [
        [0, 0], [0, 1], [1, 0], [1, 1], [2, 0], [2, 1],
    ]  # fmt: skip
    np.testing.assert_allclose(found["fwd_ms"], [2, 5, 4, 6, 3, 7])
    np.testing.assert_allclose(found["bwd_ms"], 1)
    assert found["num_passes"].tolist() == [2] * 6
    # Totals of the first set: 2 and 5, of the second 3 and 9.
    np.testing.assert_allclose(found["pass_spread"], [3 / 3.5, 0, 6 / 6, 0, 0, 0])
    np.testing.assert_allclose(
        repeat_spread(found), [2 * 3 / (3 + 6), 2 * 2 / (5 + 7), 2 * 4 / (4 + 8)]
    )


def test_a_single_pass_has_no_spread() -> None:
    found = combine_passes(measured(2, num_passes=1, num_repeats=1)[0])
    assert found["num_passes"].tolist() == [1, 1]
    assert found["pass_spread"].isna().all()
    assert repeat_spread(found).size == 0


def test_one_half_of_the_sets_tells_how_the_other_half_responds() -> None:
    rows, exact = measured()
    odd = rows["index"] % 2 == 1
    response = Response.fit(rows[odd])
    assert response is not None
    found = response.apply(rows[~odd])
    left = np.log(found["bwd_ms"] / exact[~odd])
    assert left.groupby(found["index"]).std().max() < 0.02
    assert list(found.index) == list(rows.index[~odd])
