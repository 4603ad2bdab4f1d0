"""Generated tables against the published figures; presets against their published lists."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from autoshard.distributions import expected_unique_rows, reuse_histogram
from autoshard.errors import InputError
from autoshard.table_io import read_tables
from autoshard.workloads.dlrm_tables import (
    AUTOSHARD_DIMS,
    DLRM_VERSIONS,
    NEUROSHARD_DIMS,
    DlrmConfig,
    dlrm_tables,
)
from autoshard.workloads.presets import (
    criteo_kaggle,
    criteo_terabyte,
    criteo_terabyte_10m,
    mlperf_dcnv2,
)
from autoshard.workloads.production import ProductionConfig, draw_statistics, production_tables
from autoshard.workloads.registry import make_workload, register_workload, workload_names

#: torchrec, docs/wiki/sharding_stats_example.txt: percent, rows, pooling factor.
PUBLISHED_QUANTILES = [
    (5, 2, 0.75), (10, 2, 1), (20, 2, 1), (25, 14, 1), (30, 100, 1), (40, 335, 1), (50, 537, 5),
    (60, 738, 5), (70, 1e3, 5), (75, 3e3, 5), (80, 3.8e4, 5), (90, 5e5, 27), (95, 1e7, 82),
    (99, 2.5e7, 282), (100, 4e7, 1058),
]  # fmt: skip
PUBLISHED_DIMS = {
    8: 714, 128: 636, 4: 385, 64: 112, 32: 45, 1280: 26, 12: 6, 1024: 3, 256: 3,
    1536: 1, 1792: 1, 2048: 1,
}  # fmt: skip
#: dlrm_datasets, locality_stats.txt: share of distinct rows, share of lookups by reuse bin.
PUBLISHED_REUSE = {
    2021: (
        [.473, .152, .139, .112, .072, .032, .011, .005, .002, .001, 0, 0, 0, 0, 0, 0, 0],
        [.069, .044, .068, .101, .121, .104, .073, .058, .052, .050, .049, .048, .048, .043,
         .031, .023, .019],
    ),
    2022: (
        [.342, .144, .149, .138, .112, .068, .029, .010, .004, .002, .001, .001, 0, 0, 0, 0, 0],
        [.027, .023, .040, .068, .105, .120, .099, .070, .059, .054, .040, .072, .064, .047,
         .021, .017, .076],
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def many():
    """Enough tables that what is compared is the distribution, not the draw."""
    return draw_statistics(200_000, seed=11)


@pytest.mark.parametrize(("percent", "rows", "pooling"), PUBLISHED_QUANTILES)
def test_quantiles_are_as_published(many, percent, rows, pooling):
    # Quantiles sit on steep parts of the curves, where a percent of tables is a factor of
    # 2: the published value must lie between the quantiles one percent to either side,
    # widened by the 10% to which the published figures are rounded.
    low, high = np.quantile(
        many.num_embeddings, [max(percent - 1, 0) / 100, min(percent + 1, 100) / 100]
    )
    assert 0.9 * low <= rows <= 1.1 * high
    # The decades' curves and the overall quantiles are rounded separately: 3 percent.
    low, high = np.quantile(
        many.pooling_factor, [max(percent - 3, 0) / 100, min(percent + 3, 100) / 100]
    )
    assert 0.9 * low <= pooling <= 1.1 * high


def test_dimensions_are_as_published(many):
    total = sum(PUBLISHED_DIMS.values())
    for dim, tables in PUBLISHED_DIMS.items():
        got = np.mean(many.embedding_dim == dim)
        assert got == pytest.approx(tables / total, rel=0.05, abs=4e-4), dim
    assert set(np.unique(many.embedding_dim)) == set(PUBLISHED_DIMS)


def test_dependence_is_as_published(many):
    log_rows = np.log(many.num_embeddings)
    assert np.corrcoef(log_rows, np.log(many.embedding_dim))[0, 1] == pytest.approx(0.69, abs=0.02)
    assert np.corrcoef(log_rows, np.log(many.pooling_factor))[0, 1] == pytest.approx(0.21, abs=0.03)


def test_totals_are_as_published(many):
    # The largest tables carry the totals, and quantiles pin them less: 10% of each.
    assert many.pooling_factor.mean() == pytest.approx(16.8, rel=0.1)
    assert np.mean(many.pooling_factor <= 1) == pytest.approx(0.42, abs=0.02)
    assert np.mean(many.pooling_factor > 100) == pytest.approx(0.04, abs=0.005)

    def top_share(weight, share):
        ordered = np.sort(weight)[::-1]
        return ordered[: int(share * ordered.size)].sum() / ordered.sum()

    parameters = many.num_embeddings * many.embedding_dim.astype(float)
    lookups = many.pooling_factor * many.embedding_dim
    assert top_share(parameters, 0.05) == pytest.approx(0.82, abs=0.05)
    assert top_share(lookups, 0.05) == pytest.approx(0.74, abs=0.03)
    assert top_share(lookups, 0.10) == pytest.approx(0.89, abs=0.03)


def total_reuse(tables, batch_size):
    row_bins, lookup_bins = np.zeros(17), np.zeros(17)
    for table in tables:
        lookups = table.lookups_per_sample * batch_size
        rows, share = reuse_histogram(table.ids, table.num_embeddings, lookups)
        row_bins += rows * expected_unique_rows(table.ids, table.num_embeddings, lookups)
        lookup_bins += share * lookups
    return row_bins, lookup_bins


@pytest.mark.parametrize(
    ("workload", "version", "rows_tolerance", "lookups_tolerance"),
    # The fit leaves 0.013 and 0.017 for 2021, 0.046 and 0.029 for 2022; the tables' heavy
    # tails leave the sums of 16,000 of them uncertain by about 0.005.
    [("dlrm", 2021, 0.02, 0.022), ("dlrm", 2022, 0.055, 0.035), ("production", 2021, 0.02, 0.022)],
)
def test_reuse_is_as_published(workload, version, rows_tolerance, lookups_tolerance):
    published = DLRM_VERSIONS[version]
    options = {"version": version} if workload == "dlrm" else {}
    tables = make_workload(workload, num_tables=16_000, seed=0, **options)
    row_bins, lookup_bins = total_reuse(tables, published.batch_size)
    expected_rows, expected_lookups = PUBLISHED_REUSE[version]
    np.testing.assert_allclose(row_bins / row_bins.sum(), expected_rows, atol=rows_tolerance)
    np.testing.assert_allclose(
        lookup_bins / lookup_bins.sum(), expected_lookups, atol=lookups_tolerance
    )
    mean_pooling = lookup_bins.sum() / published.batch_size / len(tables)
    assert mean_pooling == pytest.approx(published.mean_pooling_factor, rel=0.1)
    unique = row_bins.sum() / len(tables)
    assert unique == pytest.approx(published.unique_rows_per_table, rel=0.15)


def test_generators_repeat_and_extend():
    assert production_tables(50, seed=3) == production_tables(80, seed=3)[:50]
    assert production_tables(50, seed=3) != production_tables(50, seed=4)
    assert dlrm_tables(20, seed=3) == dlrm_tables(20, seed=3)
    assert ProductionConfig(num_tables=5, seed=2).tables() == production_tables(5, seed=2)
    assert DlrmConfig(num_tables=5, dims=AUTOSHARD_DIMS).tables() == dlrm_tables(
        5, seed=0, dims=AUTOSHARD_DIMS
    )


def test_caps_and_scale():
    full = production_tables(300, seed=0)
    capped = production_tables(
        300, seed=0, max_num_embeddings=5000, max_embedding_dim=64, max_pooling_factor=20
    )
    for before, after in zip(full, capped, strict=True):
        assert after.num_embeddings == min(before.num_embeddings, 5000)
        assert after.embedding_dim == min(before.embedding_dim, 64)
        assert after.pooling_factor == min(before.pooling_factor, 20)
    for before, after in zip(full, production_tables(300, seed=0, row_scale=1e-3), strict=True):
        assert after.num_embeddings == max(1, round(before.num_embeddings * 1e-3))


def test_dlrm_tables_follow_the_papers():
    tables = dlrm_tables(856, seed=0)
    assert min(table.num_embeddings for table in tables) == 100
    counts = [sum(table.embedding_dim == dim for table in tables) for dim in NEUROSHARD_DIMS]
    assert sum(counts) == 856
    assert all(count > 856 / 6 * 0.7 for count in counts)
    narrow = dlrm_tables(856, seed=0, dims=AUTOSHARD_DIMS)
    assert {table.embedding_dim for table in narrow} == {16, 32}
    assert [t.num_embeddings for t in narrow] == [t.num_embeddings for t in tables]


@pytest.mark.parametrize(
    ("workload", "options", "words"),
    [
        ("production", {"num_tables": 0, "seed": 0}, "num_tables"),
        ("production", {"num_tables": 1.5, "seed": 0}, "num_tables"),
        ("production", {"num_tables": 1, "seed": -1}, "seed"),
        ("production", {"num_tables": 1, "seed": 0, "row_scale": 0.0}, "row_scale"),
        ("production", {"num_tables": 1, "seed": 0, "row_scale": float("nan")}, "row_scale"),
        ("production", {"num_tables": 1, "seed": 0, "max_num_embeddings": 0}, "max_num_embeddings"),
        ("production", {"num_tables": 1, "seed": 0, "max_embedding_dim": 0.5}, "max_embedding"),
        ("dlrm", {"num_tables": 1, "seed": 0, "version": 2020}, "2021, 2022"),
        ("dlrm", {"num_tables": 1, "seed": 0, "dims": ()}, "dims"),
        ("dlrm", {"num_tables": 1, "seed": 0, "dims": (4, 0)}, "dims"),
        ("criteo_kaggle", {"scale": 2.0}, "row_scale"),
        ("productoin", {}, "did you mean 'production'?"),
        ("production", {"num_table": 1}, "did you mean 'num_tables'?"),
        ("production", {"num_tables": 1}, "needs the option 'seed'"),
    ],
)
def test_bad_options_are_refused(workload, options, words):
    with pytest.raises(InputError) as caught:
        make_workload(workload, **options)
    assert words in str(caught.value)


def test_a_name_is_registered_once():
    with pytest.raises(InputError, match="twice"):
        register_workload("production")(production_tables)
    assert {"production", "dlrm", "mlperf_dcnv2", "trace", "dlrm_dataset"} <= set(workload_names())


@pytest.mark.parametrize(
    ("preset", "dim", "total_rows", "lookups"),
    # Totals of the published lists, added up apart from this code.
    [
        (mlperf_dcnv2, 128, 204_184_588, 214),
        (criteo_kaggle, 16, 33_762_577, 26),
        (criteo_terabyte, 128, 187_767_399, 26),
        (criteo_terabyte_10m, 64, 49_126_297, 26),
    ],
)
def test_presets(preset, dim, total_rows, lookups):
    tables = preset()
    assert len(tables) == 26
    assert {table.embedding_dim for table in tables} == {dim}
    assert sum(table.lookups_per_sample for table in tables) == lookups
    assert sum(table.num_embeddings for table in tables) == total_rows
    scaled = preset(scale=1e-3)
    assert [t.num_embeddings for t in scaled] == [
        max(1, round(t.num_embeddings * 1e-3)) for t in tables
    ]
    assert tables[0].feature_names == ("cat_0",)


@pytest.mark.parametrize(
    ("file", "workload", "options"),
    [
        ("production_64.csv", "production", {"num_tables": 64, "seed": 0}),
        (
            "laptop_16.csv",
            "production",
            {"num_tables": 16, "seed": 1, "max_num_embeddings": 100_000}
            | {"max_embedding_dim": 64, "max_pooling_factor": 20},
        ),
        ("mlperf_dcnv2.csv", "mlperf_dcnv2", {}),
    ],
)
def test_data_files_are_what_their_readme_says(file, workload, options):
    data = Path(__file__).resolve().parents[2] / "data"
    assert file in (data / "README.md").read_text(encoding="utf-8")
    assert read_tables(data / file) == make_workload(workload, **options)
