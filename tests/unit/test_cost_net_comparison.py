"""The comparison of cost models: nested rows, grown sets, the bar, and a whole small run."""

from __future__ import annotations

import io
import json
from functools import cache
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from rich.console import Console

from autoshard.distributions import IdDistribution
from autoshard.errors import InputError
from autoshard.problem import TrainingConfig
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import DataType, Table
from cost_net.comparison import ComparisonConfig, compare
from cost_net.comparison_data import (
    COLUMN_SLICES,
    PLAIN,
    REPLICAS,
    ROW_SLICES,
    VARIANTS,
    ComparisonData,
    comparison_data,
    kinds_of,
)
from cost_net.comparison_figures import write_figures
from cost_net.comparison_text import comparison_markdown, comparison_table
from cost_net.contenders import Contender, make_contenders, some_rows, with_enough_steps
from cost_net.learning_curve import Training, curve_sizes, plan_trainings
from cost_net.monotonicity import growth_report, range_report
from cost_net.probe_sets import GROWTHS, SetOnRank, grow_sets, more_columns, more_rows, odd_sets
from cost_net.trainings import Predictions, TrainingFolder, train_and_keep
from tests.cost_cases import kernel_rows, quick_config

OTHER = "sum of single-table costs"


@cache
def data() -> ComparisonData:
    frame = pd.DataFrame(kernel_rows({"train": 80, "validation": 16, "test": 60}))
    return comparison_data(frame, num_grown_sets=10, num_random_sets=3, seed=0)


def table(**changes: object) -> Table:
    values: dict[str, object] = {"num_embeddings": 1000, "embedding_dim": 16, "pooling_factor": 4.0}
    return Table(name="t", **{**values, **changes})


def test_every_set_counts_once_and_its_second_measurement_is_kept_apart():
    kernels, second = data().kernels, data().second_ms_NP
    assert kernels.num_sets == 156
    assert len(np.unique(kernels.index_N)) == 156
    twice = np.isfinite(second[:, 0])
    assert twice.sum() == 8 + 2 + 6  # every tenth set of a split
    ratio = second[twice] / kernels.time_ms_NP[twice]
    assert np.all(ratio != 1.0)
    assert np.all(np.abs(np.log(ratio)) < 0.2)


def test_kinds_of_sets():
    half = ShardSlice(table(), ShardingType.ROW_WISE, 0, 0, 500, 16)
    narrow = ShardSlice(table(), ShardingType.COLUMN_WISE, 0, 8, 1000, 8)
    replica = ShardSlice.whole(table(), ShardingType.DATA_PARALLEL)
    assert kinds_of([ShardSlice.whole(table())]) == {PLAIN}
    assert kinds_of([half, ShardSlice.whole(table())]) == {ROW_SLICES}
    assert kinds_of([narrow, replica]) == {COLUMN_SLICES, REPLICAS}
    for variant in (
        {"weighted": True},
        {"data_type": DataType.FP16},
        {"feature_names": ("a", "b")},
    ):
        assert kinds_of([ShardSlice.whole(table(**variant))]) == {VARIANTS}


def test_parts_are_nested_hold_no_test_set_and_shrink_validation_alike():
    small, large = (some_rows(data().kernels, n, seed=3) for n in (20, 40))
    assert set(small.index_N) < set(large.index_N)
    assert sorted(set(small.split_N)) == ["train", "validation"]
    assert [(part.split_N == "validation").sum() for part in (small, large)] == [4, 8]
    other = some_rows(data().kernels, 20, seed=4)
    assert set(other.index_N) != set(small.index_N)


def test_few_rows_get_as_many_steps():
    config = with_enough_steps(quick_config(num_epochs=10, patience=5, batch_size=64), 100, 200)
    assert (config.num_epochs, config.patience) == (100, 50)
    assert with_enough_steps(quick_config(num_epochs=10), 100, 5).num_epochs == 10


def test_the_plan_trains_longest_first_and_baselines_once_on_all_rows():
    contenders = make_contenders({"additive": quick_config()})
    sizes = curve_sizes((100, 30, 5000), 200)
    assert sizes == (30, 100, 200)
    plan = plan_trainings(contenders, sizes, 200, 3)
    assert len(plan) == 3 * 3 + 4 * (3 + 3 + 1)
    assert (plan[0].contender.name, plan[0].num_sets) == ("additive", 200)
    assert len({training.key for training in plan}) == len(plan)


def test_growing_a_shard_grows_what_it_says():
    measured = table(ids=IdDistribution(bucket_rows=(10, 990), bucket_shares=(0.7, 0.3)))
    part = ShardSlice(measured, ShardingType.ROW_WISE, 250, 0, 500, 16)
    grown = more_rows(part)
    assert (grown.row_offset, grown.num_rows, grown.row_share) == (500, 1000, part.row_share)
    assert grown.table.ids.bucket_rows == (20, 1980)
    narrow = more_columns(ShardSlice(table(), ShardingType.COLUMN_WISE, 0, 8, 1000, 8))
    assert (narrow.table.embedding_dim, narrow.col_offset, narrow.num_cols) == (32, 16, 16)


def test_grown_sets_differ_from_their_base_in_one_shard_or_in_samples():
    slices = tuple(ShardSlice.whole(table(num_embeddings=size)) for size in (1000, 2000, 3000))
    training = TrainingConfig(batch_size=64)
    sets = {7: SetOnRank(slices=slices, training=training, world_size=2)}
    grown = grow_sets(sets, training.optimizer, 5, seed=0)
    assert list(grown.growth_M) == list(GROWTHS)
    assert list(grown.base_M) == [7] * len(GROWTHS)
    assert list(grown.data.num_shards_N) == [3, 3, 3, 3, 4]
    before = sets[7].features()
    after = [grown.data.features_SF[grown.data.set_S == place] for place in range(len(GROWTHS))]
    for changed in after[:3]:
        assert (changed != before).any(axis=1).sum() == 1
    np.testing.assert_allclose(after[3][:, 0], 2 * before[:, 0])  # bags of the forward
    np.testing.assert_array_equal(after[4][:3], before)
    assert not grown.switched_M.any()


def test_sets_whose_replicas_exchange_otherwise_are_told_apart():
    """64 samples of 4 ids: rows travel while fewer than about 64 are touched, then bags."""
    few = ShardSlice.whole(
        table(num_embeddings=40, embedding_dim=64, pooling_factor=4), ShardingType.DATA_PARALLEL
    )
    training = TrainingConfig(batch_size=64)
    one = SetOnRank(slices=(few,), training=training, world_size=2)
    grown = grow_sets({0: one}, training.optimizer, 1, seed=0)
    switched = dict(zip(grown.growth_M, grown.switched_M, strict=True))
    assert switched == {
        "rows × 2": True,  # about 78 of 80 rows are touched
        "columns × 2": False,
        "pooling × 1.5": False,
        "batch × 2": False,
        "one more shard": False,
    }
    cheaper = np.full((1, 5, 2), 0.5)
    noise = dict.fromkeys(("fwd", "bwd", "total"), 0.02)
    report = growth_report(grown, np.ones((1, 1, 2)), cheaper, noise)
    assert report["rows × 2"]["total"]["num"] == 0
    assert report["all"]["total"]["num"] == 4
    assert report["another exchange"]["total"]["num"] == 1
    assert report["another exchange"]["total"]["share_cheaper"] == 1.0


def test_decreases_by_hand():
    grown = data().grown
    num = len(grown.base_M)
    before = np.ones((1, data().kernels.num_sets, 2))
    after = np.full((1, num, 2), 1.1)
    rows = np.flatnonzero(grown.growth_M == "rows × 2")
    after[0, rows[0]], after[0, rows[1]] = 0.99, 0.7  # by 1% and by 30%
    report = growth_report(grown, before, after, dict.fromkeys(("fwd", "bwd", "total"), 0.02))
    own = report["rows × 2"]["total"]
    assert own["num"] == 10
    assert own["share_cheaper"] == pytest.approx(0.2)
    assert own["share_beyond_noise"] == pytest.approx(0.1)
    assert own["largest_decrease"] == pytest.approx(0.3)
    assert report["all"]["total"]["share_cheaper"] == pytest.approx(2 / num)
    assert report["batch × 2"]["fwd"]["share_cheaper"] == 0
    none = growth_report(grown, before, after, dict.fromkeys(("fwd", "bwd", "total")))
    assert none["all"]["total"]["share_beyond_noise"] is None


def test_costs_that_are_none_are_counted():
    values = [np.array([[1.0, -1.0], [np.nan, np.inf]]), np.array([[2.0, 3.0], [4.0, 5.0]])]
    assert range_report({"test": values})["test"] == {
        "num": 8,
        "negative": 1,
        "not_finite": 2,
        "largest_ms": 5.0,
    }


def test_odd_sets_are_finite_and_of_many_sizes():
    odd = odd_sets(data().kernels.optimizer, 3, seed=0)
    assert odd["random"].num_sets == 3
    assert odd["absurd"].num_shards_N.max() == 1000
    assert all(np.isfinite(sets.features_SF).all() for sets in odd.values())


def exact_and_wrong() -> tuple[list[Contender], list[tuple[Training, Predictions]]]:
    """One contender that knows the measurements, one that is 30% off, the wrong way round."""
    contenders = [Contender(name="additive", config=quick_config()), Contender(name=OTHER)]
    truth = data().kernels.time_ms_NP
    off = {
        "additive": truth * 1.001,
        OTHER: truth * np.where(truth > np.median(truth), 0.7, 1.3),
    }
    zeros = np.zeros((len(data().grown.base_M), 2))
    results = [
        (
            Training(contender=one, num_sets=80, seed=0),
            Predictions(
                measured_NP=off[one.name],
                grown_MP=zeros,
                odd={kind: np.ones((sets.num_sets, 2)) for kind, sets in data().odd.items()},
                seconds=1.0,
            ),
        )
        for one in contenders
    ]
    return contenders, results


def test_the_bar_lets_the_truth_pass_and_not_the_wrong():
    contenders, results = exact_and_wrong()
    settings = {"min_group": 2, "num_resamples": 100}
    report = compare(data(), contenders, results, ComparisonConfig(**settings))
    assert report["test"]["additive"]["total"]["median"]["value"] == pytest.approx(0.001)
    assert report["test"][OTHER]["fwd"]["median"]["value"] == pytest.approx(0.3)
    assert report["bar"]["passed"]
    assert report["bar"]["median"]["at_most"] == pytest.approx(0.04)
    assert report["growth"]["additive"]["all"]["total"]["share_cheaper"] == 1.0
    assert report["by_num_shards"]["1"]["num_sets"] > 0
    assert report["by_kind"][REPLICAS]["num_sets"] == 0
    swapped = compare(data(), contenders, results, ComparisonConfig(ours=OTHER, **settings))
    assert not swapped["bar"]["passed"]
    assert not swapped["bar"]["better_than"]["additive"]["bwd"]["passed"]


def test_trainings_are_kept_and_everything_is_written(tmp_path: Path):
    networks = {"additive": quick_config(num_epochs=2)}
    contenders = make_contenders(networks)
    config = ComparisonConfig(num_seeds=2, sizes=(40,), min_group=3, num_resamples=100)
    plan = plan_trainings(contenders, curve_sizes(config.sizes, 80), 80, config.num_seeds)
    folder = TrainingFolder(tmp_path / "trainings", {"a": 1})
    for training in plan:
        assert training not in folder
        train_and_keep(data(), folder, 1, training)
        assert training in folder
    report = compare(data(), contenders, [(t, folder.read(t)) for t in plan], config)
    json.dumps(report, allow_nan=False)
    assert [point["num_sets"] for point in report["learning_curve"]["additive"]] == [40, 80]
    assert len(report["learning_curve"]["linear regression"][0]["total"]["seeds"]) == 2
    assert len(report["learning_curve"]["linear regression"][1]["total"]["seeds"]) == 1
    for by_kind in report["ranges"].values():
        assert all(kind["negative"] == kind["not_finite"] == 0 for kind in by_kind.values())
    files = write_figures(report, tmp_path)
    assert {path.name for path in files} >= {"learning_curve.png", "learning_curve.svg"}
    text = comparison_markdown(report)
    for heading in ("## The bar", "## Learning curve", "## Sets that grew", "a second measurement"):
        assert heading in text
    with pytest.raises(InputError, match="other data or with another configuration"):
        TrainingFolder(tmp_path / "trainings", {"a": 2})
    path = tmp_path / "trainings" / f"{plan[0].key}.npz"
    path.write_bytes(b"torn")
    with pytest.raises(InputError, match="is damaged"):
        folder.read(plan[0])


def test_what_cannot_be_compared_is_refused():
    frame = pd.DataFrame(kernel_rows({"train": 5, "validation": 5}))
    with pytest.raises(InputError, match="belongs to the test split"):
        comparison_data(frame, num_grown_sets=1, num_random_sets=1, seed=0)
    for changes in ({"num_seeds": 0}, {"sizes": (0,)}, {"min_group": 1}):
        with pytest.raises(InputError, match=f"{next(iter(changes))} is not usable"):
            ComparisonConfig(**changes)


def test_the_table_fits_a_terminal():
    contenders, results = exact_and_wrong()
    report = compare(data(), contenders, results, ComparisonConfig(num_resamples=100))
    console = Console(width=80, file=io.StringIO())
    with console.capture() as capture:
        console.print(comparison_table(report))
    text = capture.get()
    assert "…" not in text
    for part in ("additive", OTHER, "a second measurement", "30.0%", "0.1%"):
        assert part in text
