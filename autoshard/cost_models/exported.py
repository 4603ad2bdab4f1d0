"""Trained cost models as artifacts: loading one, and the protocol on top of its programs.

`cost_net.export` writes the folder; nothing of `cost_net` is needed to use it. `analytic` names
`AnalyticCostModel`, `simulated:NAME` a `SimulatedCostModel`, and other people's models come in
through the entry point group `autoshard.cost_models` (a callable without arguments that returns
a model).

Shapes: S=shards, N=shard sets, D=encoding width, F=shard features, C=traffic features.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.artifact_files import (
    check_names,
    find_artifact,
    load_artifact_program,
    read_artifact,
)
from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.cost_models.bounds import makespan_lower_bound
from autoshard.cost_models.ranges import MeasuredRange
from autoshard.cost_models.simulated import (
    SIMULATED_PREFIX,
    refuse_bare_name,
    simulated_cost_model,
)
from autoshard.errors import ArtifactError, quoted
from autoshard.features import NUM_TRAFFIC_FEATURES, SHARD_FEATURES, TRAFFIC_FEATURES
from autoshard.objective import CostSource
from autoshard.problem import ShardingProblem
from autoshard.protocols import CostModel

FloatArray = NDArray[np.float64]
Program = Callable[..., Any]

COST_MODEL_KIND = "autoshard-cost-model"
COST_MODEL_VERSION = 3
WEIGHTS_FILE = "weights.safetensors"
CARD_FILE = "card.md"
ENCODE_FILE = "encode.pt2"
COMPUTE_FILE = "compute.pt2"
COLLECTIVE_FILE = "collective.pt2"
#: What decides the predictions, and what they are marked with.
COST_MODEL_IDENTITY = (
    "shard_features",
    "traffic_features",
    "encoding_width",
    "network",
    "compute_bound",
    "collective_bound",
    "measured_range",
    WEIGHTS_FILE,
)
#: A model of simulated rows says so: its costs are marked `simulated`, as theirs are.
SOURCE_KEY = "source"
#: Exported programs take row counts from 2 on (torch.export treats 0 and 1 as special).
MIN_PROGRAM_ROWS = 2
ENTRY_POINTS = "autoshard.cost_models"
ANALYTIC = "analytic"
#: Programs compute in float32: bounds stay this share below what float64 would say.
FLOAT32_SLACK = 1e-5
#: Larger numbers are taken for this one, far from where float32 turns them into infinity.
FLOAT32_LIMIT = 1e30


class ExportedCostModel:
    """A trained network behind `autoshard.protocols.CostModel`."""

    def __init__(
        self, programs: Mapping[str, Program], config: Mapping[str, Any], name: str
    ) -> None:
        """Wrap loaded programs; `load_cost_model` is what makes these."""
        self._encode = programs[ENCODE_FILE]
        self._compute = programs[COMPUTE_FILE]
        self._collective = programs[COLLECTIVE_FILE]
        self.config = config
        self._name = name

    @property
    def name(self) -> str:
        """The artifact's name."""
        return self._name

    @property
    def source(self) -> CostSource:
        """`PREDICTED`, or `SIMULATED` where the model was trained on simulated rows."""
        return CostSource(self.config.get(SOURCE_KEY, CostSource.PREDICTED.value))

    @property
    def fingerprint(self) -> str:
        """Identifies the weights and the range of the measurements behind them."""
        return str(self.config["fingerprint"])

    @cached_property
    def measured_range(self) -> MeasuredRange:
        """What was measured."""
        return MeasuredRange.from_json(self.config["measured_range"])

    def encode(self, features_SF: FloatArray) -> FloatArray:
        """See `CostModel.encode`."""
        if len(features_SF) == 0:
            return np.zeros((0, int(self.config["encoding_width"])))
        return _call(self._encode, features_SF)

    def compute_ms(
        self, encoding_sum_ND: FloatArray, num_shards_N: NDArray[np.int64]
    ) -> FloatArray:
        """See `CostModel.compute_ms`."""
        num_shards_N = np.asarray(num_shards_N)
        if len(encoding_sum_ND) == 0:
            return np.zeros((0, 2))
        cost_NP = _call(self._compute, encoding_sum_ND, num_shards_N[:, None])
        return np.where(num_shards_N[:, None] > 0, cost_NP, 0.0)

    def collective_ms(self, traffic_NC: FloatArray) -> FloatArray:
        """See `CostModel.collective_ms`."""
        traffic_NC = np.asarray(traffic_NC, dtype=np.float64).reshape(-1, NUM_TRAFFIC_FEATURES)
        if len(traffic_NC) == 0:
            return np.zeros(0)
        happens_N = (traffic_NC[:, 3] > 0) & (traffic_NC[:, 0] > 1)
        return np.where(happens_N, _call(self._collective, traffic_NC), 0.0)

    def compute_lower_bound_ms(
        self, encoding_SD: FloatArray, world_size: int, base_D: FloatArray | None = None
    ) -> FloatArray | None:
        """The overhead, and what the own costs come to at the least factors.

        A set's cost is overhead + Σ_g φ_g · Σ own_g with φ_g >= φ_min,g by construction (it is
        clamped inside the program). The rank that attains the makespan bound of Σ_g φ_min,g · own_g
        holds a shard, so it pays the overhead too, and what every rank holds adds its own costs
        to each sum. None for networks without such a form.
        """
        facts = self.config["compute_bound"]
        if facts is None:
            return None
        if len(encoding_SD) == 0 and base_D is None:
            return np.zeros(2)
        phi_min_PG = np.array(facts["phi_min"])

        def least_ms(encoding_ND: FloatArray) -> FloatArray:
            own = np.maximum(encoding_ND[:, : phi_min_PG.size], 0.0)
            return (own.reshape(-1, *phi_min_PG.shape) * phi_min_PG).sum(axis=2)

        own_SP = least_ms(np.asarray(encoding_SD))
        base_P = np.zeros(2) if base_D is None else least_ms(np.asarray(base_D)[None])[0]
        makespan_P = [makespan_lower_bound(own_S, world_size) for own_S in own_SP.T]
        least_P = np.array(facts["overhead_ms"]) + base_P + np.array(makespan_P)
        return least_P * (1 - FLOAT32_SLACK)

    def collective_lower_bound_ms(self, total_bytes: float, world_size: int) -> float | None:
        """The least factor times the base, with the busiest rank at total / R, its least."""
        if total_bytes <= 0 or world_size <= 1:
            return 0.0
        facts = self.config["collective_bound"]
        at_once = min(world_size, facts["num_processors"])
        base_ms = (
            facts["latency_ms"]
            + facts["turn_ms"] * (world_size / at_once - 1)
            + facts["message_ms"] * world_size * (world_size - 1) / at_once
            + facts["busiest_ms_per_byte"] * total_bytes / world_size
            + facts["total_ms_per_byte"] * total_bytes / at_once
        )
        return float(facts["factor_min"] * base_ms * (1 - FLOAT32_SLACK))

    def is_extrapolated(self, features_SF: FloatArray, problem: ShardingProblem) -> bool:
        """See `CostModel.is_extrapolated`."""
        return bool(self.measured_range.outside(features_SF, problem))


def _call(program: Program, *arrays: NDArray[Any]) -> FloatArray:
    """Run a program on float64 rows; a single row is padded to the least a program takes."""
    import torch

    num = len(arrays[0])
    tensors = []
    for array in arrays:
        rows = np.clip(array, -FLOAT32_LIMIT, FLOAT32_LIMIT).astype(np.float32)
        if num < MIN_PROGRAM_ROWS:
            rows = np.repeat(rows, MIN_PROGRAM_ROWS, axis=0)
        tensors.append(torch.from_numpy(np.ascontiguousarray(rows)))
    with torch.inference_mode():
        result = program(*tensors)
    return result.numpy().astype(np.float64)[:num]


def load_cost_model(path_or_name: str | Path = "default") -> CostModel:
    """Load a cost model.

    Args:
        path_or_name: the folder of an exported one, the name of a shipped one, `analytic`,
            `simulated:NAME` (see `autoshard.cost_models.device_specs`), or the name of an entry
            point in `autoshard.cost_models`.

    Raises:
        ArtifactError: it does not exist, is damaged, or reads other features than this version
            of autoshard computes.
        InputError: an option of a simulated device is not usable.
    """
    if str(path_or_name) == ANALYTIC:
        return AnalyticCostModel()
    if str(path_or_name).startswith(SIMULATED_PREFIX):
        return simulated_cost_model(str(path_or_name).removeprefix(SIMULATED_PREFIX))
    if not Path(path_or_name).is_dir():
        for point in importlib.metadata.entry_points(group=ENTRY_POINTS):
            if point.name == str(path_or_name):
                return _from_entry_point(point)
        refuse_bare_name(str(path_or_name))
    folder = find_artifact(path_or_name, folder="cost_models", what="cost model")
    config = read_artifact(
        folder, kind=COST_MODEL_KIND, version=COST_MODEL_VERSION, what="cost model"
    )
    check_names(config, "shard_features", SHARD_FEATURES, folder, "cost model")
    check_names(config, "traffic_features", TRAFFIC_FEATURES, folder, "cost model")
    _check_source(config, folder)
    programs = {
        name: load_artifact_program(folder, config, name, "cost model")
        for name in (ENCODE_FILE, COMPUTE_FILE, COLLECTIVE_FILE)
    }
    return ExportedCostModel(programs, config, Path(path_or_name).name)


def _check_source(config: Mapping[str, Any], folder: Path) -> None:
    """Refuse a mark that a model's costs cannot carry."""
    allowed = [CostSource.PREDICTED.value, CostSource.SIMULATED.value]
    if config.get(SOURCE_KEY, allowed[0]) not in allowed:
        raise ArtifactError(
            f"cost model {folder} does not say where its costs come from",
            got=quoted(config[SOURCE_KEY]),
            allowed=" or ".join(allowed),
        )


def _from_entry_point(point: importlib.metadata.EntryPoint) -> CostModel:
    try:
        model = point.load()()
    except Exception as error:
        raise ArtifactError(
            f"cost model {point.name!r} of {point.value} does not load", got=str(error)[:200]
        ) from error
    if not isinstance(model, CostModel):
        raise ArtifactError(
            f"cost model {point.name!r} of {point.value} is no cost model",
            got=type(model).__name__,
            allowed="the methods of autoshard.protocols.CostModel",
        )
    return model
