"""The cost model learns known physics, is exported whole, and reports honest errors."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from autoshard.cost_models.exported import CARD_FILE, ENCODE_FILE, load_cost_model
from autoshard.errors import ArtifactError, InputError
from autoshard.objective import CostSource
from cost_net.collective_training import train_collective
from cost_net.dataset import KernelData, MeasuredData
from cost_net.errors import error_table, grouped_tau, noise_floor, score
from cost_net.networks import NETWORKS
from cost_net.pipeline import ERRORS_FILE, MODEL_FOLDER, TrainedCostModel, train_cost_model
from cost_net.training import (
    CostNetConfig,
    NetworkKind,
    predict_ms,
    train_compute,
)
from tests.synthetic_measurements import kernels, measured, true_ms

CONFIG = CostNetConfig(num_epochs=40, collective_epochs=150, learning_rate=1e-2)


@pytest.fixture(scope="module")
def data() -> MeasuredData:
    return measured()


@pytest.fixture(scope="module")
def trained(
    data: MeasuredData, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainedCostModel, Path]:
    folder = tmp_path_factory.mktemp("cost_net")
    return train_cost_model(data, CONFIG, folder), folder


def test_the_network_beats_linear_regression_on_unseen_tables(
    data: MeasuredData, trained: tuple[TrainedCostModel, Path]
) -> None:
    models = trained[0].errors["splits"]["test"]["models"]
    network, linear = models["network (additive)"], models["linear regression"]
    for quantity in ("fwd", "bwd", "total"):
        assert network[quantity]["median"] < 0.5 * linear[quantity]["median"]
    assert network["total"]["median"] < 0.1
    assert network["total"]["tau"] > linear["total"]["tau"]
    # Against what the machine takes without noise, too.
    test = data.kernels.split("test")
    exact = true_ms(test.features_SF, test.set_S)
    assert np.median(np.abs(predict_ms(trained[0].network, test) / exact - 1)) < 0.1


def test_all_to_alls_are_learned_and_interpolate_world_sizes(
    trained: tuple[TrainedCostModel, Path],
) -> None:
    report = trained[0].errors["collectives"]
    assert (report["num"], report["test"]["num"]) == (96, 24)  # every fifth is held out
    assert report["test"]["median"] < 0.1
    traffic = torch.tensor([[6.0, 2e6, 1e6, 9e6]])
    with torch.inference_mode():
        assert float(trained[0].collective(traffic)[0]) == pytest.approx(2.3, rel=0.25)


def test_training_repeats_exactly_and_the_seed_matters(data: MeasuredData) -> None:
    short = replace(CONFIG, num_epochs=2)
    test = data.kernels.split("test")

    def predicted(config: CostNetConfig) -> np.ndarray:
        return predict_ms(train_compute(data.kernels, config), test)

    first = predicted(short)
    np.testing.assert_array_equal(first, predicted(short))
    assert (first != predicted(replace(short, seed=1))).any()


def test_every_network_trains_and_is_positive(data: MeasuredData) -> None:
    assert {kind.value for kind in NetworkKind} == set(NETWORKS)
    test = data.kernels.split("test")
    for kind in NetworkKind:
        network = train_compute(data.kernels, replace(CONFIG, network=kind, num_epochs=2))
        assert (predict_ms(network, test) > 0).all()


def test_the_artifact_predicts_like_the_network(
    data: MeasuredData, trained: tuple[TrainedCostModel, Path]
) -> None:
    result, folder = trained
    model = load_cost_model(folder / MODEL_FOLDER)
    assert model.fingerprint == result.fingerprint
    assert model.source is CostSource.PREDICTED
    encoding = model.encode(data.kernels.features_SF)
    sums = np.zeros((data.kernels.num_sets, encoding.shape[1]))
    np.add.at(sums, data.kernels.set_S, encoding)
    np.testing.assert_allclose(
        model.compute_ms(sums, data.kernels.num_shards_N),
        predict_ms(result.network, data.kernels),
        rtol=1e-5,
    )
    with torch.inference_mode():
        direct = result.collective(torch.tensor(data.collectives.traffic_MC, dtype=torch.float32))
    np.testing.assert_allclose(
        model.collective_ms(data.collectives.traffic_MC), direct.double().numpy(), rtol=1e-5
    )


def test_errors_json_is_what_was_returned_and_the_card_shows_it(
    trained: tuple[TrainedCostModel, Path],
) -> None:
    result, folder = trained
    report = json.loads((folder / ERRORS_FILE).read_text())
    assert report == json.loads(json.dumps(result.errors))
    assert set(report["splits"]) == {"train", "validation", "test"}
    assert report["noise_floor"]["num_pairs"] == 60
    # Two measurements with 3% noise each differ by 0.6745 · 0.03 · √2 = 2.9% in the median.
    assert report["noise_floor"]["fwd"]["median"] == pytest.approx(0.0286, abs=0.015)
    card = (folder / MODEL_FOLDER / CARD_FILE).read_text()
    median = report["splits"]["test"]["models"]["linear regression"]["total"]["median"]
    assert f"{median:.1%}" in card
    assert error_table(report).row_count == len(report["splits"]["test"]["models"]) + 1


def test_a_damaged_or_altered_artifact_is_refused(
    trained: tuple[TrainedCostModel, Path], tmp_path: Path
) -> None:
    source = trained[1] / MODEL_FOLDER
    names = [path.name for path in source.iterdir()]
    assert ENCODE_FILE in names
    for number, name in enumerate(names):
        for damage in ("missing", "cut", "flipped"):
            copied = tmp_path / f"{number}-{damage}"
            shutil.copytree(source, copied)
            path, content = copied / name, (copied / name).read_bytes()
            if damage == "missing":
                path.unlink()
            elif damage == "cut":
                path.write_bytes(content[: len(content) // 2])
            else:
                middle = len(content) // 2
                flipped = bytes([content[middle] ^ 1])
                path.write_bytes(content[:middle] + flipped + content[middle + 1 :])
            with pytest.raises(ArtifactError):
                load_cost_model(copied)


def test_a_failed_export_leaves_no_folder(data: MeasuredData, tmp_path: Path) -> None:
    (tmp_path / MODEL_FOLDER).mkdir()
    (tmp_path / MODEL_FOLDER / "precious").write_text("data")
    short = replace(CONFIG, num_epochs=1, collective_epochs=1)
    with pytest.raises(InputError, match="no artifact"):
        train_cost_model(data, short, tmp_path)
    assert [p.name for p in (tmp_path / MODEL_FOLDER).iterdir()] == ["precious"]


def test_a_table_in_two_splits_is_refused(data: MeasuredData) -> None:
    data.kernels.check_disjoint()
    leaked = {**data.kernels.tables, "test": data.kernels.tables["test"] | {"t3"}}
    with pytest.raises(InputError, match=r"train and the test split.*'t3'"):
        replace(data.kernels, tables=leaked).check_disjoint()


def test_missing_data_is_named(data: MeasuredData) -> None:
    only_train = data.kernels.split("train")
    with pytest.raises(InputError, match="validation split"):
        train_compute(only_train, CONFIG)
    nothing = data.collectives.of(np.zeros(120, dtype=bool))
    with pytest.raises(InputError, match="no measurements of all-to-alls"):
        train_collective(nothing, CONFIG)


def test_choosing_sets_keeps_their_shards() -> None:
    data = kernels(60)
    chosen = np.array([17, 3, 3, 40])
    part = data.of(chosen)
    assert part.num_shards_N.tolist() == data.num_shards_N[chosen].tolist()
    np.testing.assert_array_equal(part.summed(slice(None)), data.summed(slice(None))[chosen])
    assert data.of(np.zeros(data.num_sets, dtype=bool)).num_sets == 0


def test_scores_by_arithmetic() -> None:
    measured_ms = np.array([[1.0, 3.0], [2.0, 2.0], [4.0, 6.0]])
    predicted_ms = np.array([[1.1, 3.0], [1.0, 2.0], [4.0, 16.0]])
    found = score(predicted_ms, measured_ms, np.array([1, 1, 1]))
    # Relative errors: forward 0.1, 0.5, 0; backward 0, 0, 10/6; total 0.025, 0.25, 1.
    assert found["fwd"]["median"] == pytest.approx(0.1)
    assert found["fwd"]["mean"] == pytest.approx(0.2)
    assert found["bwd"]["mean"] == pytest.approx(10 / 18)
    assert found["total"]["median"] == pytest.approx(0.25)
    assert found["total"]["p90"] == pytest.approx(0.25 + 0.8 * 0.75)
    assert found["total"]["tau"] is None  # a group of three says nothing


def test_tau_by_counting_pairs() -> None:
    generator = np.random.default_rng(0)
    counts = np.repeat([1, 2, 3, 9], [20, 7, 4, 30])
    generator.shuffle(counts)
    first, second = generator.random(61), generator.random(61)
    second = first + second
    agree = pairs = 0
    for count in (1, 2, 9):  # the group of four is too small
        rows = np.flatnonzero(counts == count)
        for place, i in enumerate(rows):
            for j in rows[:place]:
                agree += 1 if (first[i] - first[j]) * (second[i] - second[j]) > 0 else -1
                pairs += 1
    assert grouped_tau(first, second, counts) == pytest.approx(agree / pairs)
    assert grouped_tau(first, -first, counts) == pytest.approx(-1.0)


def test_the_noise_floor_compares_first_and_second_measurement() -> None:
    data = kernels(100)

    def with_pairs(times: list[list[float]], index: list[int]) -> KernelData:
        part = data.of(np.arange(len(times)))
        return replace(part, time_ms_NP=np.array(times), index_N=np.array(index))

    floor = noise_floor(
        with_pairs([[1.0, 1.0], [2.0, 4.0], [9.0, 9.0], [1.5, 1.0], [2.0, 5.0]], [7, 3, 5, 7, 3])
    )
    assert floor is not None
    assert floor["num_pairs"] == 2
    assert floor["fwd"]["mean"] == pytest.approx((0.5 + 0.0) / 2)
    assert floor["bwd"]["mean"] == pytest.approx((0.0 + 0.25) / 2)
    assert noise_floor(with_pairs([[1.0, 1.0]] * 3, [1, 2, 3])) is None
