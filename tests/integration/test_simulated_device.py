"""From a simulated device's rows to plans: the same pipeline, and `simulated` all the way."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from autoshard.cli.main import run_command_line
from autoshard.cost_models.device_specs import A100_80GB
from autoshard.cost_models.exported import load_cost_model
from autoshard.cost_models.simulated import SimulatedCostModel
from autoshard.errors import ArtifactError, InputError
from autoshard.features import TRAFFIC_FEATURES
from autoshard.measure.collectives import time_collectives
from autoshard.measure.config import (
    CollectiveConfig,
    KernelConfig,
    MeasureConfig,
    SamplingConfig,
    SimulatedDevice,
    measure_config,
    to_plain,
)
from autoshard.measure.kernels import KernelMeter
from autoshard.measure.loading import (
    load_collective_rows,
    load_kernel_rows,
    row_features,
    row_slices,
)
from autoshard.measure.merging import merge_parts
from autoshard.measure.runner import measure_collectives, measure_kernels
from autoshard.objective import CostSource
from autoshard.planning import make_plan
from autoshard.problem import Optimizer
from autoshard.report.data import load_report_data
from autoshard.report.measurement_section import measurement_section
from autoshard.report.model_sections import cost_model_section
from autoshard.runtime.capabilities import Device
from cost_net.analytic_fit import fit_analytic
from cost_net.dataset import MeasuredData, load_measurements
from cost_net.pipeline import MODEL_FOLDER, train_cost_model
from tests.cost_cases import measurements, model_folder, pool, quick_config
from tests.placement_cases import make_problem, random_tables

SIMULATED = SimulatedDevice.SIMULATED
TABLES = [*pool("train", 25), *pool("test", 15)]
CONFIG = MeasureConfig(
    num_sets=120,
    num_repeated_sets=6,
    num_passes=1,
    workers=10_000,  # of real processes there are none
    kernels=KernelConfig(device=SIMULATED),
    sampling=SamplingConfig(max_shards=8, num_samples=(1024, 4096), max_iteration_ms=1000.0),
    collectives=CollectiveConfig(device=SIMULATED, world_sizes=(2, 4, 64), num_collectives=15),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("simulated")
    assert measure_kernels(CONFIG, TABLES, out) == 126
    assert measure_collectives(CONFIG, out) == 45
    return out


@pytest.fixture(scope="module")
def data(folder: Path) -> MeasuredData:
    return load_measurements([folder])


@pytest.fixture(scope="module")
def trained(data: MeasuredData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("trained")
    train_cost_model(data, quick_config(num_epochs=3, collective_epochs=20), out)
    return out / MODEL_FOLDER


def test_kernel_rows_are_what_the_model_says(folder: Path):
    model = SimulatedCostModel(spec=A100_80GB)
    rows = load_kernel_rows(folder / "kernels")
    assert set(rows["device"]) == {"simulated"}
    assert set(rows["cache"]) == {"cold"}
    assert not rows["pinned"].any()
    for row in rows.to_dict("records"):
        encoding_SD = model.encode(row_features(row))
        sums_1D = encoding_SD.sum(axis=0)[None]
        fwd, bwd = model.compute_ms(sums_1D, np.array([row["num_slices"]]))[0]
        assert (row["fwd_ms"], row["bwd_ms"]) == (fwd, bwd)
        for phase in ("fwd", "bwd"):
            same = {row[f"{phase}_{s}"] for s in ("ms", "p20_ms", "p80_ms", "min_ms", "wall_ms")}
            assert len(same) == 1
            assert row[f"{phase}_relative_error"] == 0
        kinds = {(s.table.weighted, s.table.data_type) for s in row_slices(row)}
        assert row["num_kernels"] == len(kinds)
    again = rows[rows["repeat"] == 1].set_index("index")
    first = rows[rows["repeat"] == 0].set_index("index").loc[again.index]
    pd.testing.assert_series_equal(again["bwd_ms"], first["bwd_ms"])


def test_collective_rows_are_what_the_model_says(folder: Path):
    model = SimulatedCostModel(spec=A100_80GB)
    rows = load_collective_rows(folder / "collectives")
    assert set(rows["backend"]) == {"simulated"}
    assert not rows["oversubscribed"].any()
    expected_N = model.collective_ms(rows[list(TRAFFIC_FEATURES)].to_numpy())
    np.testing.assert_array_equal(rows["transfer_ms"], expected_N)
    assert (rows["wait_ms"] == 0).all()


def test_rows_repeat_exactly_and_a_folder_is_continued(folder: Path, tmp_path: Path):
    # No more repetitions than there are test sets: these then stay the same ones.
    few = dataclasses.replace(CONFIG, num_sets=50, num_repeated_sets=4)
    assert measure_kernels(few, TABLES, tmp_path) == 54
    assert measure_kernels(CONFIG, TABLES, tmp_path) == 72
    assert measure_kernels(CONFIG, TABLES, tmp_path) == 0
    plain = [
        load_kernel_rows(where / "kernels").drop(columns=["measured_at", "order"])
        for where in (folder, tmp_path)
    ]
    pd.testing.assert_frame_equal(*plain)


def test_the_hardware_is_the_spec(folder: Path, tmp_path: Path):
    other = dataclasses.replace(CONFIG, simulated_device="h100-80gb")
    with pytest.raises(InputError, match=r"hardware fingerprint differs.*h100-80gb"):
        measure_collectives(other, shutil.copytree(folder, tmp_path / "copy"))
    measure_kernels(other, TABLES, tmp_path)
    paths = [folder / "kernels", tmp_path / "kernels"]
    with pytest.raises(InputError, match=r"hardware.*simulated_device"):
        load_kernel_rows(paths)
    assert len(load_kernel_rows(paths, allow_mixed=True)) == 252
    faster = load_kernel_rows(paths[1])["fwd_ms"] < load_kernel_rows(paths[0])["fwd_ms"]
    assert faster.all()


def test_every_optimizer_is_simulated(tmp_path: Path):
    kernels = dataclasses.replace(CONFIG.kernels, optimizer=Optimizer.ADAM)
    config = dataclasses.replace(CONFIG, kernels=kernels, num_sets=5, num_repeated_sets=0)
    assert measure_kernels(config, TABLES, tmp_path) == 5
    assert set(load_kernel_rows(tmp_path / "kernels")["optimizer"]) == {"adam"}


def as_if_real(folder: Path, name: str, destination: Path) -> None:
    """The merged rows of a kind, with another device written into them."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    merge_parts(folder / name, destination)
    rows = pq.read_table(destination)
    column = rows.column_names.index("device")
    rows = rows.set_column(column, "device", pa.array(["cpu"] * len(rows)))
    pq.write_table(rows, destination)


def test_simulated_and_real_rows_never_mix(folder: Path, tmp_path: Path):
    as_if_real(folder, "kernels", tmp_path / "kernels.parquet")
    paths = [folder / "kernels", tmp_path / "kernels.parquet"]
    for allow_mixed in (False, True):
        with pytest.raises(InputError, match="simulated and real rows are mixed"):
            load_kernel_rows(paths, allow_mixed=allow_mixed)
    merge_parts(folder / "collectives", tmp_path / "collectives.parquet")
    with pytest.raises(InputError, match="not of one simulated device"):
        load_measurements([tmp_path])


def test_kernels_and_collectives_are_of_one_device(folder: Path, tmp_path: Path):
    measure_kernels(CONFIG, TABLES, tmp_path)
    measure_collectives(dataclasses.replace(CONFIG, simulated_device="h100-80gb"), tmp_path)
    with pytest.raises(InputError, match="not of one simulated device"):
        load_measurements([tmp_path])


def test_a_trained_model_is_marked_and_its_mark_is_sealed(
    trained: Path, data: MeasuredData, tmp_path: Path
):
    assert data.source is CostSource.SIMULATED
    model = load_cost_model(trained)
    assert model.source is CostSource.SIMULATED
    config = json.loads((trained / "config.json").read_text())
    assert (config["source"], config["measurements"]["device"]) == ("simulated", "simulated")
    assert "simulated" in (trained / "card.md").read_text()
    plan = make_plan(make_problem(random_tables(4), 2), sharder="cost_greedy", cost_model=model)
    assert plan.cost is not None
    assert plan.cost.step.source is CostSource.SIMULATED
    altered = shutil.copytree(trained, tmp_path / "altered")
    (altered / "config.json").write_text(json.dumps({**config, "source": "predicted"}))
    with pytest.raises(ArtifactError, match="altered"):
        load_cost_model(altered)


def test_the_report_calls_nothing_measured(folder: Path, trained: Path, tmp_path: Path):
    shutil.copytree(folder, tmp_path / "measurements")
    shutil.copytree(trained.parent, tmp_path / "cost_net")
    data = load_report_data(tmp_path)
    part = measurement_section(data)
    assert part.takeaway.startswith("120 shard sets and 45 all-to-alls were simulated on a100-80gb")
    assert "not timed" in part.notes[0]
    model = cost_model_section(data)
    assert "against simulated time" in str(model.tables[0].caption)
    for picture in (*part.pictures, *model.pictures[1:]):
        assert "simulated" in picture.alt.lower()
        assert "measured" not in picture.alt.lower()


def test_models_of_measured_rows_predict_as_before():
    model = load_cost_model(model_folder())
    config = json.loads((model_folder() / "config.json").read_text())
    assert measurements().source is CostSource.PREDICTED
    assert config["source"] == "predicted"
    assert "source" not in config["identity"]
    assert model.source is CostSource.PREDICTED
    assert load_cost_model("default").source is CostSource.PREDICTED  # says nothing of it


def test_fitted_coefficients_are_marked_too(data: MeasuredData):
    model = fit_analytic(data)
    assert model.source is CostSource.SIMULATED
    assert type(model).from_json(model.to_json()) == model
    assert fit_analytic(measurements()).source is CostSource.PREDICTED


def test_real_devices_refuse_to_simulate():
    with pytest.raises(InputError, match="runs nothing"):
        KernelMeter(KernelConfig(device=SIMULATED))
    from autoshard.measure.runner import collective_schedule

    with pytest.raises(InputError, match="runs nothing"):
        next(time_collectives(collective_schedule(CONFIG)[:1], CONFIG.collectives))


def test_configurations_say_what_they_simulate():
    assert measure_config(to_plain(CONFIG)) == CONFIG
    real = MeasureConfig()
    assert measure_config(to_plain(real)).kernels.device is Device.CPU
    with pytest.raises(InputError, match=r"kernels.device is not known.*cpu, cuda, simulated"):
        measure_config({"kernels": {"device": "simulate"}})
    with pytest.raises(InputError, match="do not go together"):
        MeasureConfig(kernels=KernelConfig(device=SIMULATED))
    MeasureConfig(num_sets=0, num_repeated_sets=0, collectives=CONFIG.collectives)
    with pytest.raises(ArtifactError, match="did you mean 'a100-80gb'"):
        dataclasses.replace(CONFIG, simulated_device="a100")
    MeasureConfig(simulated_device="a100")  # not asked


def test_the_command_line_plans_and_explains(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    def call(*arguments: object) -> tuple[int, str, str]:
        code = run_command_line([str(argument) for argument in arguments])
        return code, *capsys.readouterr()

    plan, options = tmp_path / "plan.json", ("--cost-model", "simulated:h100-80gb")
    workload = "workload:production?num_tables=12&seed=0"
    shape = ("--world-size", 16, "--local-world-size", 8, "--hbm-gib", 80)
    code, out, _ = call(
        "plan", workload, *shape, *options, "--sharder", "cost_greedy", "--json", "--out", plan
    )
    assert code == 0
    cost = json.loads(plan.read_text())["cost"]
    assert (cost["source"], cost["extrapolated"]) == ("simulated", False)
    assert json.loads(plan.read_text())["provenance"]["cost_model"]["name"] == options[1]
    code, out, _ = call("explain", plan, *options)
    assert code == 0
    assert "simulated" in out
    assert "predicted" not in out
    code, out, err = call("explain", plan, "--cost-model", "simulated:h200")
    assert (code, out) == (2, "")
    assert "a100-80gb, h100-80gb" in err
