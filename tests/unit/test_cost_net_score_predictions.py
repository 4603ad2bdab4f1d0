"""Predictions from outside are scored like the error report's, and refused by name."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from autoshard.errors import InputError
from autoshard.features import SHARD_FEATURES
from autoshard.measure.schema import RowKind, arrow_schema
from autoshard.measure.store import write_rows
from cost_net.dataset import kernel_data
from cost_net.errors import noise_floor, score
from cost_net.plain_tables import feature_table, load_kernels, read_predictions
from cost_net.prediction_scores import median_interval, score_predictions
from tests.cost_cases import kernel_rows

ROOT = Path(__file__).resolve().parents[2]
ROWS = kernel_rows({"train": 40, "validation": 12, "test": 31}, seed=5)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("published")
    rows = pa.Table.from_pylist(ROWS, schema=arrow_schema(RowKind.KERNELS))
    write_rows(out / "kernels.parquet", RowKind.KERNELS, rows, {})
    return out


@pytest.fixture(scope="module")
def frame(folder: Path) -> pd.DataFrame:
    return load_kernels(folder)


@pytest.fixture
def predicted(frame: pd.DataFrame) -> pd.DataFrame:
    """Known errors: 10% too slow forward, 20% too fast backward, in any order."""
    first = frame[frame["repeat"] == 0]
    own = first[["index", "fwd_ms", "bwd_ms"]].assign(
        fwd_ms=first["fwd_ms"] * 1.1, bwd_ms=first["bwd_ms"] * 0.8
    )
    return own.sample(frac=1.0, random_state=0)


def test_scores_are_those_of_the_error_report(frame, predicted):
    data = kernel_data(frame)
    part = data.split("test")
    by_set = predicted.set_index("index")[["fwd_ms", "bwd_ms"]]
    index = frame.loc[frame["split"] == "test", "index"]
    expected = score(by_set.loc[index].to_numpy(), part.time_ms_NP, part.num_shards_N)
    scored = score_predictions(frame, predicted, "test")
    assert scored["scores"] == expected
    assert scored["noise_floor"] == noise_floor(data)
    assert scored["noise_floor"]["num_pairs"] == 4 + 2 + 4
    assert (scored["num_sets"], scored["num_measurements"]) == (31, 35)
    for name, (low, high) in scored["median_95"].items():
        assert low <= expected[name]["median"] <= high
    json.dumps(scored, allow_nan=False)


def test_first_measurements_alone_have_the_errors_that_were_put_in(frame, predicted):
    scored = score_predictions(frame[frame["repeat"] == 0], predicted, "all")
    assert scored["scores"]["fwd"]["median"] == pytest.approx(0.1)
    assert scored["scores"]["bwd"]["p90"] == pytest.approx(0.2)
    assert scored["scores"]["fwd"]["tau"] == pytest.approx(1.0)
    assert scored["noise_floor"] is None
    assert scored["median_95"]["fwd"] == pytest.approx([0.1, 0.1])


def test_the_interval_is_that_of_drawing_sets():
    generator = np.random.default_rng(3)
    errors = generator.exponential(size=60)
    set_N = np.arange(60) // 2
    draws = [
        np.median(
            np.concatenate([errors[2 * s : 2 * s + 2] for s in generator.integers(0, 30, 30)])
        )
        for _ in range(4000)
    ]
    expected = np.quantile(draws, [0.025, 0.975])
    shuffled = generator.permutation(60)
    found = median_interval(errors[shuffled], set_N[shuffled])
    np.testing.assert_allclose(found, expected, rtol=0.15)
    assert found == median_interval(errors[shuffled], set_N[shuffled])


@pytest.mark.parametrize(
    ("alter", "message"),
    [
        (lambda p: p.iloc[1:], r"no prediction.*index \d+"),
        (lambda p: pd.concat([p, p.iloc[[0]]]), r"more than one prediction.*index \d+"),
        (lambda p: p.assign(fwd_ms=np.nan), "not finite"),
        (lambda p: p.assign(bwd_ms=np.inf), "not finite"),
        (lambda p: p.assign(bwd_ms=-p["bwd_ms"]), r"negative.*index \d+"),
        (lambda p: p.assign(index=p["index"] + 10_000), "does not hold"),
    ],
)
def test_unusable_predictions_are_refused_by_name(frame, predicted, alter, message):
    with pytest.raises(InputError, match=message):
        score_predictions(frame, alter(predicted), "all")


def test_other_splits_need_no_prediction(frame, predicted):
    test = set(frame.loc[frame["split"] == "test", "index"])
    own = predicted[predicted["index"].isin(test)]
    assert score_predictions(frame, own, "test") == score_predictions(frame, predicted, "test")
    with pytest.raises(InputError, match="no prediction"):
        score_predictions(frame, own, "train")
    only = frame[frame["split"] == "test"]
    with pytest.raises(InputError, match="no shard set of the train split"):
        score_predictions(only, own, "train")


def test_two_runs_are_told_apart_by_their_protocol(frame, predicted):
    both = pd.concat([frame, frame.assign(protocol="q", fwd_ms=frame["fwd_ms"] * 2)])
    with pytest.raises(InputError, match="no column protocol"):
        score_predictions(both, predicted, "test")
    slower = predicted.assign(protocol="q", fwd_ms=predicted["fwd_ms"] * 2)
    named = pd.concat([predicted.assign(protocol="p"), slower])
    scored = score_predictions(both, named, "test")
    assert scored["num_sets"] == 62
    alone = score_predictions(frame, predicted, "test")
    for name in ("median", "p90"):
        assert scored["scores"]["fwd"][name] == pytest.approx(alone["scores"]["fwd"][name])


def test_features_are_one_row_per_shard_with_labels_of_the_set(frame):
    table = feature_table(frame)
    data = kernel_data(frame[frame["repeat"] == 0])
    np.testing.assert_array_equal(table[list(SHARD_FEATURES)].to_numpy(), data.features_SF)
    sets = table.groupby("index").first()
    np.testing.assert_array_equal(sets[["fwd_ms", "bwd_ms"]].to_numpy(), data.time_ms_NP)
    assert (table.groupby("index")["shard"].max() + 1).tolist() == data.num_shards_N.tolist()
    again = frame[frame["repeat"] == 1].set_index("index")["bwd_ms"]
    pd.testing.assert_series_equal(sets["bwd_again_ms"].dropna(), again, check_names=False)
    for split, names in data.tables.items():
        assert set(table.loc[table["split"] == split, "table"]) == names


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("index,fwd_ms\n1,2\n", "lack columns.*bwd_ms"),
        ("index,fwd_ms,bwd_ms\n1,2,slow\n", "'bwd_ms' holds no numbers"),
        ("index,fwd_ms,bwd_ms\n1.5,2,3\n", "other than whole numbers"),
        ("index,fwd_ms,bwd_ms\n,2,3\n", "other than whole numbers"),
        ("", "cannot be read"),
    ],
)
def test_unreadable_predictions_are_refused(tmp_path: Path, content: str, message: str):
    path = tmp_path / "mine.csv"
    path.write_text(content)
    with pytest.raises(InputError, match=message):
        read_predictions(path)
    torn = tmp_path / "mine.parquet"
    torn.write_text(content)
    with pytest.raises(InputError, match="cannot be read"):
        read_predictions(torn)


def test_the_script_prints_json_and_ends_with_2_on_bad_input(folder, predicted, tmp_path):
    mine = tmp_path / "mine.parquet"
    predicted.set_index("index").to_parquet(mine)

    def call(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "cost_net.score_predictions", *map(str, arguments)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=120,
        )

    features = tmp_path / "features.parquet"
    done = call("--data", folder, "--predictions", mine, "--json", "--export-features", features)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["num_sets"] == 31
    assert len(pd.read_parquet(features)) == sum(r["num_slices"] for r in ROWS if not r["repeat"])
    refused = call("--data", folder, "--predictions", tmp_path / "none.parquet")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: ")
    assert "Traceback" not in refused.stderr
