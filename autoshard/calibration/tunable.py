"""An exported cost model, opened: its programs as functions of its parameters, and saved anew.

All programs of a model name the parameters of one network alike, so that one dictionary of
tensors is the state of all. The recorded graphs consist of differentiable operations; calling
them with other tensors is evaluating the network with other weights.

Shapes: S=shards, N=shard sets, D=encoding width, F=shard features, P=2 phases, M=all-to-alls,
C=traffic features.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import load_file
from torch import Tensor
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind

from autoshard.artifact_files import find_artifact
from autoshard.calibration.data import ExchangeRows, SetRows
from autoshard.cost_models.exported import (
    COLLECTIVE_FILE,
    COMPUTE_FILE,
    ENCODE_FILE,
    WEIGHTS_FILE,
    ExportedCostModel,
    load_cost_model,
)
from autoshard.errors import ArtifactError, InputError
from autoshard.objective import CostSource

FloatArray = NDArray[np.float64]
State = Mapping[str, Tensor]
#: Where the programs of the compute network keep it, and what the weights' file calls it.
NETWORK_PREFIX = "network."
_WEIGHTS_OF = {COMPUTE_FILE: "compute.", COLLECTIVE_FILE: "collective."}


class TunableModel:
    """The programs of an exported model, and the values of its parameters.

    `compute_state` and `exchange_state` are the base model's parameters by name; they are not
    altered. Functions take a state of the same names.
    """

    def __init__(self, path_or_name: str | Path) -> None:
        """Open a model.

        Args:
            path_or_name: the folder of an exported one, or the name of a shipped one.

        Raises:
            ArtifactError: there is none, it is damaged or of another version, or not one that
                learned from measurements.
        """
        model = load_cost_model(path_or_name)
        if not isinstance(model, ExportedCostModel):
            raise ArtifactError(
                f"cost model {str(path_or_name)!r} has nothing to calibrate",
                got=f"{type(model).__name__}, which computes costs by formulas",
                allowed="the folder of an exported cost model, or the name of a shipped one",
                remedy="give --from such a model",
            )
        self.model = model
        self.config = model.config
        self.folder = find_artifact(path_or_name, folder="cost_models", what="cost model")
        self._programs = {
            name: torch.export.load(self.folder / name)
            for name in (ENCODE_FILE, COMPUTE_FILE, COLLECTIVE_FILE)
        }
        self._calls = {name: _Call(program) for name, program in self._programs.items()}
        self.compute_state = self._parameters(ENCODE_FILE) | self._parameters(COMPUTE_FILE)
        self.exchange_state = self._parameters(COLLECTIVE_FILE)
        self.weights = load_file(self.folder / WEIGHTS_FILE)

    @property
    def source(self) -> CostSource:
        """What the model's costs are marked with."""
        return self.model.source

    def check_source(self, source: CostSource) -> None:
        """Refuse to calibrate what was simulated with what was measured, or the reverse.

        Raises:
            InputError: the model's source is another.
        """
        if source is self.source:
            return
        named = {CostSource.SIMULATED: "simulated", CostSource.PREDICTED: "measured"}
        raise InputError(
            "the model and the measurements are not of one kind",
            got=f"a model of {named.get(self.source, self.source.value)} costs and "
            f"{named.get(source, source.value)} rows",
            remedy="calibrate a model of measured costs with measurements of a machine, and one of "
            "simulated costs with simulated rows",
        )

    def encode(self, state: State, features_SF: Tensor) -> Tensor:
        """Encodings of shards, [S, D]."""
        return self._calls[ENCODE_FILE](state, features_SF)

    def compute(self, state: State, encoding_ND: Tensor, num_shards_N1: Tensor) -> Tensor:
        """Times of sets, ms, [N, P]."""
        return self._calls[COMPUTE_FILE](state, encoding_ND, num_shards_N1)

    def exchange(self, state: State, traffic_MC: Tensor) -> Tensor:
        """Times of all-to-alls, ms, [M]."""
        return self._calls[COLLECTIVE_FILE](state, traffic_MC)

    def save_program(self, name: str, state: State) -> ExportedProgram:
        """A program with other values of its parameters, to be saved."""
        program = torch.export.load(self.folder / name)
        with torch.no_grad():
            for key, value in state.items():
                if key in program.state_dict:
                    program.state_dict[key].copy_(value)
        return program

    def tuned_weights(self, compute_state: State, exchange_state: State) -> dict[str, Tensor]:
        """The weights' file with other values of the parameters."""
        weights = dict(self.weights)
        for file, state in ((COMPUTE_FILE, compute_state), (COLLECTIVE_FILE, exchange_state)):
            for key, value in state.items():
                name = _WEIGHTS_OF[file] + key.removeprefix(NETWORK_PREFIX)
                weights[name] = value.detach().contiguous().clone()
        return weights

    def _parameters(self, name: str) -> dict[str, Tensor]:
        program = self._programs[name]
        named = program.graph_signature.parameters
        return {key: program.state_dict[key].detach().clone() for key in named}


class _Call:
    """A program's graph as a function of a state and its inputs."""

    def __init__(self, program: ExportedProgram) -> None:
        self._graph: Any = program.graph_module.forward
        specs = program.graph_signature.input_specs
        self._names = [str(spec.target) for spec in specs if spec.kind is not InputKind.USER_INPUT]
        self._own = {**program.constants, **program.state_dict}

    def __call__(self, state: State, *inputs: Tensor) -> Tensor:
        values = [state[name] if name in state else self._own[name] for name in self._names]
        result: Tensor = self._graph(*values, *inputs)[0]
        return result


class SetTensors:
    """Measured sets as the programs take them."""

    def __init__(self, rows: SetRows) -> None:
        """Convert."""
        self.features_SF = torch.tensor(rows.features_SF, dtype=torch.float32)
        self.set_S = torch.tensor(rows.set_S)
        self.num_shards_N1 = torch.tensor(rows.num_shards_N[:, None], dtype=torch.float32)
        self.time_ms_NP = torch.tensor(rows.time_ms_NP, dtype=torch.float32)

    def summed(self, values_SD: Tensor) -> Tensor:
        """Sums over each set's shards, [N, D]."""
        zeros = torch.zeros(len(self.num_shards_N1), values_SD.shape[1])
        return zeros.index_add(0, self.set_S, values_SD)


def predict_sets(model: TunableModel, state: State, tensors: SetTensors) -> Tensor:
    """Times of sets, ms, [N, P]."""
    sums_ND = tensors.summed(model.encode(state, tensors.features_SF))
    return model.compute(state, sums_ND, tensors.num_shards_N1)


def predict_ms(model: TunableModel, state: State, rows: SetRows) -> FloatArray:
    """Times of measured sets, float64 [N, P]."""
    with torch.no_grad():
        return predict_sets(model, state, SetTensors(rows)).double().numpy()


def predict_exchange_ms(model: TunableModel, state: State, rows: ExchangeRows) -> FloatArray:
    """Times of measured all-to-alls, float64 [M]."""
    with torch.no_grad():
        traffic_MC = torch.tensor(rows.traffic_MC, dtype=torch.float32)
        return model.exchange(state, traffic_MC).double().numpy()


def softplus(raw: Tensor) -> Tensor:
    """What programs turn raw coefficients into, in float64; > 0."""
    return torch.nn.functional.softplus(raw.detach().double())


def inverse_softplus(values: Tensor) -> Tensor:
    """What softplus turns into `values`, > 0 (below 1e-12 into 1e-12), as float32."""
    # log(exp(x) − 1) = x + log(1 − exp(−x)), which does not overflow.
    values = values.double().clamp_min(1e-12)
    return (values + torch.log(-torch.expm1(-values))).float()
