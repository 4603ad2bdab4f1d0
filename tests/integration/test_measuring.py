"""The comparison of ways to measure runs, and counts spreads and rates as arithmetic does."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from autoshard.measure.references import REFERENCE_COLUMNS
from benchmarks.measuring.__main__ import draw_sets, load_preset, main, tiny
from benchmarks.measuring.naive import measure_naively
from benchmarks.measuring.passes import PassResult, SetTime, Way
from benchmarks.measuring.report import bars, summarise
from benchmarks.measuring.results import (
    WayResults,
    difference_of_medians,
    median_of,
    normalised_spread_S,
    rate_ratio,
    raw_spread_S,
)

pytest.importorskip("fbgemm_gpu", reason="kernels need fbgemm-gpu-cpu or fbgemm-gpu")


def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "measuring.json"
    assert main(["--quick", "--ways", "naive,fast", "--workers", "1", "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    for way in ("naive", "fast"):
        first, second = results["passes"][way]
        assert len(first) == len(second) == 1
        for one in (first[0], second[0]):
            assert sorted(t["index"] for t in one["times"]) == [0, 1, 2, 3]
            busy_s = sum(t["ended_s"] - t["started_s"] for t in one["times"])
            assert 0 < busy_s <= one["wall_s"]
            assert one["start_s"] > 0
            assert all(t["fwd_ms"] > 0 and t["bwd_ms"] > 0 for t in one["times"])
            expected = 0 if way == "naive" else len(REFERENCE_COLUMNS)
            assert all(len(t["reference_ms"]) == expected for t in one["times"])
    assert results["summary"]["fast"]["rate_over_naive"]["low"] > 0
    assert results["summary"]["fast"]["spread_that_counts"] == "normalised"
    assert results["summary"]["naive"]["spread_that_counts"] == "raw"
    printed = capsys.readouterr().out
    assert "at least 4 times naive's rate at no more spread: " in printed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--ways", "naive,slow"], "got: naive,slow; allowed: some of naive,fast,precise"),
        (["--sets", "1"], "--sets is not usable"),
        (["--passes", "0"], "--passes is not usable"),
        (["--workers", "100000"], "--workers is not usable"),
    ],
)
def test_bad_input_is_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_presets_measure_once_and_several_times() -> None:
    fast, precise = load_preset(Way.FAST), load_preset(Way.PRECISE)
    assert fast.num_passes == 1
    assert precise.num_passes > 1
    assert fast.workload == precise.workload
    assert fast.sampling == precise.sampling
    assert fast.kernels.timing.time_budget_s < precise.kernels.timing.time_budget_s


def test_sets_hold_no_replicas_and_measure_naively_in_every_variant() -> None:
    sets = draw_sets(tiny(load_preset(Way.FAST)), 60, seed=3)
    assert not any(s.sharding_type.value == "data_parallel" for x in sets for s in x.slices)
    kinds = {(s.table.weighted, s.table.data_type) for x in sets for s in x.slices}
    assert len(kinds) == 4
    mixed = next(x for x in sets if len({s.table.weighted for s in x.slices}) == 2)
    fwd_ms, bwd_ms = measure_naively(mixed, seed=0)
    assert fwd_ms > 0
    assert bwd_ms > 0


def results_of(
    way: Way, totals_ms: list[list[list[float]]], seconds: float = 1.0, wall_s: float = 10.0
) -> WayResults:
    """Passes of each measurement, with the totals of sets 0, 1, … half forward, half backward."""
    references = () if way is Way.NAIVE else (1.0,) * len(REFERENCE_COLUMNS)
    return WayResults(
        way,
        tuple(
            tuple(
                PassResult(
                    start_s=2.0,
                    wall_s=wall_s,
                    times=tuple(
                        SetTime(
                            index=index,
                            fwd_ms=total / 2,
                            bwd_ms=total / 2,
                            reference_ms=references,
                            started_s=0.0,
                            ended_s=seconds * (index + 1),
                        )
                        for index, total in reversed(list(enumerate(pass_)))
                    ),
                )
                for pass_ in passes
            )
            for passes in totals_ms
        ),
    )


def test_spread_is_of_totals_and_passes_are_averaged() -> None:
    one = results_of(Way.NAIVE, [[[10.0, 100.0, 7.0]], [[30.0, 100.0, 8.0]]])
    np.testing.assert_allclose(raw_spread_S(one), [20 / 20, 0.0, 1 / 7.5])
    # Geometric means: 4 and 9 against 6 and 6.
    two = results_of(Way.PRECISE, [[[4.0, 8.0], [9.0, 2.0]], [[6.0, 4.0], [6.0, 5.0]]])
    np.testing.assert_allclose(
        raw_spread_S(two), [0.0, (np.sqrt(20) - 4) / (2 + np.sqrt(5))], atol=1e-12
    )


def test_normalising_takes_out_what_references_show() -> None:
    generator = np.random.default_rng(0)
    costs_S = np.exp(generator.uniform(0, 3, 80))  # each half of them is just enough
    passes = []
    for _ in range(2):
        times = []
        for index, cost in enumerate(costs_S):
            logs_J = generator.normal(0, 0.2, len(REFERENCE_COLUMNS))
            slowness = float(np.exp(logs_J @ [0.5, 0.1, 0.3, 0.1]))
            times.append(
                SetTime(
                    index=index,
                    fwd_ms=float(cost) * slowness,
                    bwd_ms=2 * float(cost) * slowness,
                    reference_ms=tuple(np.exp(logs_J).tolist()),
                    started_s=0.0,
                    ended_s=1.0,
                )
            )
        passes.append((PassResult(start_s=1.0, wall_s=40.0, times=tuple(times)),))
    results = WayResults(Way.PRECISE, tuple(passes))
    assert np.median(raw_spread_S(results)) > 0.05
    assert np.median(normalised_spread_S(results)) < 0.001
    # From fewer nothing can be told, and nothing is guessed.
    few = WayResults(
        Way.FAST,
        tuple((replace(one, times=one.times[:78]),) for (one,) in results.passes),
    )
    np.testing.assert_allclose(
        np.sort(normalised_spread_S(few)), np.sort(raw_spread_S(few)), rtol=1e-12
    )


def test_rates_leave_out_the_start_and_add_up_to_the_wall_clock() -> None:
    naive = results_of(Way.NAIVE, [[[1.0] * 6]] * 2, wall_s=60.0)
    fast = results_of(Way.FAST, [[[1.0] * 6]] * 2, wall_s=12.0)
    precise = results_of(Way.PRECISE, [[[1.0] * 6] * 3] * 2, wall_s=30.0)
    assert [r.sets_per_minute for r in (naive, fast, precise)] == pytest.approx([6.0, 30.0, 4.0])
    assert naive.seconds_S() == pytest.approx(60.0 * np.arange(1, 7) / 21)
    assert precise.seconds_S().sum() == pytest.approx(90.0)
    assert precise.start_s == 6.0
    ratio = rate_ratio(fast, naive)
    assert (ratio.low, ratio.value, ratio.high) == pytest.approx((5.0, 5.0, 5.0))
    lines = bars(summarise({r.way: r for r in (naive, fast, precise)}))
    assert [": holds" in line for line in lines] == [True, True]
    slow = results_of(Way.FAST, [[[1.0] * 6]] * 2, wall_s=20.0)
    noisy = results_of(Way.FAST, [[[1.0] * 6], [[1.1] * 6]], wall_s=12.0)
    for worse in (slow, noisy):
        (line,) = bars(summarise({Way.NAIVE: naive, Way.FAST: worse}))
        assert ": is missed" in line


def test_intervals_enclose_the_figure() -> None:
    values_S = np.linspace(0.0, 1.0, 101)
    median = median_of(values_S)
    assert median.value == 0.5
    assert 0.3 < median.low < 0.5 < median.high < 0.7
    # The same draws for both: a shift is seen exactly.
    shift = difference_of_medians(values_S + 0.25, values_S)
    assert (shift.low, shift.value, shift.high) == pytest.approx((0.25, 0.25, 0.25))
