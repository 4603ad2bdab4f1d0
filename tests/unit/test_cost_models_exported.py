"""Exported cost models: equal to the network they came from, refused when damaged or foreign."""

from __future__ import annotations

import importlib.metadata
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from autoshard.artifact_files import write_artifact
from autoshard.cost_models import exported as module
from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.cost_models.exported import (
    COLLECTIVE_FILE,
    COMPUTE_FILE,
    ENCODE_FILE,
    WEIGHTS_FILE,
    ExportedCostModel,
    load_cost_model,
)
from autoshard.errors import ArtifactError
from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.programs import load_program
from autoshard.topology import GIB, Topology
from cost_net.collective_training import predict_collective_ms
from cost_net.training import Batch, predict_sets
from tests.cost_cases import (
    config_of,
    exported,
    features_of,
    kernels,
    measurements,
    model_folder,
    pool,
    trained,
)


def test_it_predicts_what_the_network_predicts() -> None:
    model, data = exported(), kernels().split("test")
    encoding_SD = model.encode(data.features_SF)
    sums_ND = np.zeros((data.num_sets, encoding_SD.shape[1]))
    np.add.at(sums_ND, data.set_S, encoding_SD)
    with torch.inference_mode():
        expected = predict_sets(trained().network, Batch.of(data)).numpy()
    np.testing.assert_allclose(model.compute_ms(sums_ND, data.num_shards_N), expected, rtol=1e-5)
    exchanges = measurements().collectives
    np.testing.assert_allclose(
        model.collective_ms(exchanges.traffic_MC),
        predict_collective_ms(trained().collective, exchanges),
        rtol=1e-5,
    )


def test_the_direct_call_is_the_programs_call() -> None:
    path = model_folder() / COMPUTE_FILE
    width = config_of(model_folder())["encoding_width"]
    inputs = (torch.rand(5, width), torch.tensor([[0.0], [1.0], [2.0], [30.0], [400.0]]))
    checked = torch.export.load(path).module()
    assert torch.equal(load_program(path)(*inputs), checked(*inputs))


def test_a_program_that_is_not_simple_is_called_the_long_way(tmp_path: Path) -> None:
    class Counting(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            return values + self.calls

    program = torch.export.export(Counting(), (torch.zeros(3),))
    torch.export.save(program, tmp_path / "counting.pt2")
    call = load_program(tmp_path / "counting.pt2")
    assert call(torch.zeros(3)).tolist() == [1.0] * 3
    assert call(torch.zeros(3)).tolist() == [2.0] * 3


def test_the_artifact_says_where_it_comes_from() -> None:
    model = exported()
    assert isinstance(model, ExportedCostModel)
    config = config_of(model_folder())
    assert config["network"] == "additive"
    assert config["measured_range"]["world_sizes"] == [2, 4, 8]
    assert config["measured_range"]["optimizers"] == ["rowwise_adagrad"]
    assert config["errors"]["splits"]["test"]["num_sets"] == kernels().split("test").num_sets
    assert model.fingerprint == config["fingerprint"] == trained().fingerprint
    card = (model_folder() / "card.md").read_text()
    for text in ("## Data and hardware", "## Errors on test tables", "## Limits", "held out"):
        assert text in card


def problem(world_size: int = 2, optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD):
    return ShardingProblem(
        tables=tuple(pool("test")),
        topology=Topology(world_size=world_size, hbm_bytes=(GIB,) * world_size),
        training=TrainingConfig(batch_size=512, optimizer=optimizer),
    )


def test_inside_the_measurements_nothing_is_extrapolated() -> None:
    model, features_SF = exported(), kernels().split("test").features_SF
    assert model.is_extrapolated(features_SF, problem()) is False
    assert model.is_extrapolated(features_SF, problem(world_size=6)) is False  # between 4 and 8
    assert model.is_extrapolated(features_SF, problem(world_size=1)) is False  # no collectives
    assert model.is_extrapolated(features_SF, problem(world_size=16)) is True
    assert model.is_extrapolated(features_SF, problem(optimizer=Optimizer.SGD)) is True
    assert model.is_extrapolated(features_of(pool("test"), 8192), problem()) is True


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    shutil.copytree(model_folder(), tmp_path / "copy")
    return tmp_path / "copy"


def test_a_moved_artifact_loads(copy: Path) -> None:
    model = load_cost_model(copy)
    assert model.name == "copy"
    assert model.fingerprint == exported().fingerprint


@pytest.mark.parametrize("name", [ENCODE_FILE, COMPUTE_FILE, COLLECTIVE_FILE, WEIGHTS_FILE])
def test_a_damaged_file_is_refused_by_name(copy: Path, name: str) -> None:
    content = bytearray((copy / name).read_bytes())
    content[len(content) // 2] ^= 0xFF
    (copy / name).write_bytes(content)
    with pytest.raises(ArtifactError, match=f"damaged.*{name}"):
        load_cost_model(copy)
    (copy / name).unlink()
    with pytest.raises(ArtifactError, match=f"lacks its file {name}"):
        load_cost_model(copy)


def test_an_altered_config_is_refused(copy: Path) -> None:
    config = config_of(copy)
    config["compute_bound"]["phi_min"] = [2.0, 2.0]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match="altered"):
        load_cost_model(copy)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"kind": "autoshard-policy"}', "\x00\xff"])
def test_junk_for_a_config_is_refused(copy: Path, text: str) -> None:
    (copy / "config.json").write_text(text)
    with pytest.raises(ArtifactError):
        load_cost_model(copy)


def rewrite(source: Path, target: Path, *, without: str = "", **changes: object) -> Path:
    """An artifact whose checksums are right and whose content is not ours."""
    config = config_of(source) | changes
    del config["fingerprint"], config["checksum"]
    files = [name for name in config.pop("files") if name != without]
    kind, version, identity = (config.pop(key) for key in ("kind", "version", "identity"))
    write_artifact(
        target,
        kind=kind,
        version=version,
        config=config,
        writers={
            name: lambda path, name=name: path.write_bytes((source / name).read_bytes())
            for name in files
        },
        identity=identity,
    )
    return target


def test_other_features_and_versions_are_refused(tmp_path: Path) -> None:
    source = model_folder()
    assert load_cost_model(rewrite(source, tmp_path / "same"))
    with pytest.raises(ArtifactError, match="other shard_features"):
        load_cost_model(rewrite(source, tmp_path / "features", shard_features=["bags"]))
    with pytest.raises(ArtifactError, match="version"):
        load_cost_model(rewrite(source, tmp_path / "version", version=99))
    with pytest.raises(ArtifactError, match=f"lacks its file {COMPUTE_FILE}"):
        load_cost_model(rewrite(source, tmp_path / "short", without=COMPUTE_FILE))


def test_a_program_that_torch_cannot_read_is_refused(tmp_path: Path, copy: Path) -> None:
    (copy / COMPUTE_FILE).write_bytes(b"not a program")
    with pytest.raises(ArtifactError, match="cannot be loaded with torch"):
        load_cost_model(rewrite(copy, tmp_path / "unreadable"))


def test_unknown_names_are_refused_with_what_exists(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="'defualt' does not exist"):
        load_cost_model("defualt")
    with pytest.raises(ArtifactError, match="is not a cost model"):
        load_cost_model(tmp_path)


def test_other_peoples_models_come_in_by_entry_point(monkeypatch: pytest.MonkeyPatch) -> None:
    class Point:
        def __init__(self, name: str, value: object) -> None:
            self.name, self.value, self._value = name, "theirs:model", value

        def load(self) -> object:
            if isinstance(self._value, Exception):
                raise self._value
            return lambda: self._value

    theirs = AnalyticCostModel(name="theirs")
    points = [
        Point("theirs", theirs),
        Point("broken", ImportError("no such module")),
        Point("foreign", "a string"),
    ]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda group: points)
    assert module.load_cost_model("theirs") is theirs
    with pytest.raises(ArtifactError, match="does not load"):
        load_cost_model("broken")
    with pytest.raises(ArtifactError, match="is no cost model"):
        load_cost_model("foreign")
