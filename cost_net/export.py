"""Export of trained cost networks as an artifact that planning loads without this package."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.export import Dim

from autoshard.artifact_files import write_artifact
from autoshard.cost_models.exported import (
    CARD_FILE,
    COLLECTIVE_FILE,
    COMPUTE_FILE,
    COST_MODEL_IDENTITY,
    COST_MODEL_KIND,
    COST_MODEL_VERSION,
    ENCODE_FILE,
    MIN_PROGRAM_ROWS,
    SOURCE_KEY,
    WEIGHTS_FILE,
)
from autoshard.cost_models.ranges import MeasuredRange
from autoshard.features import (
    NUM_SHARD_FEATURES,
    NUM_TRAFFIC_FEATURES,
    SHARD_FEATURES,
    TRAFFIC_FEATURES,
)
from autoshard.objective import CostSource
from autoshard.programs import save_program
from cost_net.card import write_card
from cost_net.dataset import MeasuredData
from cost_net.networks import AdditiveNet, CollectiveNet, SumNet
from cost_net.training import CostNetConfig


def export_cost_model(
    network: AdditiveNet | SumNet,
    collective: CollectiveNet,
    data: MeasuredData,
    config: CostNetConfig,
    errors: Mapping[str, Any],
    folder: str | Path,
) -> str:
    """Write the networks as an artifact, whole or not at all.

    Args:
        network: the trained compute network.
        collective: the trained network of all-to-alls.
        data: what they were trained on; gives the measured range.
        config: how they were trained.
        errors: the error report, for the card.
        folder: where it goes; an older artifact there is replaced.

    Returns:
        The artifact's fingerprint.

    Raises:
        InputError: the place is not writable or holds something else.
    """
    kernels = data.kernels
    is_simulated = data.source is CostSource.SIMULATED
    described: dict[str, Any] = {
        "shard_features": list(SHARD_FEATURES),
        "traffic_features": list(TRAFFIC_FEATURES),
        "encoding_width": network.encoding_width,
        "network": config.network.value,
        SOURCE_KEY: data.source.value,
        "compute_bound": network.bound_facts(),
        "collective_bound": collective.bound_facts(),
        "measured_range": MeasuredRange.of(
            kernels.features_SF,
            world_sizes=data.collectives.world_sizes,
            optimizers=(kernels.optimizer,),
        ).to_json(),
        "measurements": dict(data.facts),
        "errors": dict(errors),
        "training": {
            "seed": config.seed,
            "num_epochs": config.num_epochs,
            "batch_size": config.batch_size,
            "learning_rate": config.learning_rate,
        },
        "torch": torch.__version__,
    }
    weights = {
        f"{part}.{name}": value.contiguous().clone()
        for part, module in (("compute", network), ("collective", collective))
        for name, value in module.state_dict().items()
    }
    rows = 7  # any number that is neither 0 nor 1
    programs = {
        ENCODE_FILE: _program(_Encode(network), (torch.zeros(rows, NUM_SHARD_FEATURES),)),
        COMPUTE_FILE: _program(
            _Compute(network), (torch.zeros(rows, network.encoding_width), torch.ones(rows, 1))
        ),
        COLLECTIVE_FILE: _program(collective, (torch.ones(rows, NUM_TRAFFIC_FEATURES),)),
    }

    return write_artifact(
        folder,
        kind=COST_MODEL_KIND,
        version=COST_MODEL_VERSION,
        config=described,
        # Of what is predicted, the fingerprint is as it was before models could be simulated.
        identity=(*COST_MODEL_IDENTITY, *([SOURCE_KEY] if is_simulated else [])),
        writers={
            WEIGHTS_FILE: lambda path: save_file(weights, path),
            CARD_FILE: lambda path: write_card(path, described),
            **{name: partial(save_program, program) for name, program in programs.items()},
        },
    )


class _Encode(nn.Module):
    def __init__(self, network: AdditiveNet | SumNet) -> None:
        super().__init__()
        self.network = network

    def forward(self, features_SF: Tensor) -> Tensor:
        return self.network.encode(features_SF)


class _Compute(nn.Module):
    def __init__(self, network: AdditiveNet | SumNet) -> None:
        super().__init__()
        self.network = network

    def forward(self, encoding_ND: Tensor, num_shards_N1: Tensor) -> Tensor:
        return self.network.compute(encoding_ND, num_shards_N1)


def _program(module: nn.Module, example: tuple[Tensor, ...]) -> torch.export.ExportedProgram:
    rows = Dim("rows", min=MIN_PROGRAM_ROWS)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(
            module.eval(), example, dynamic_shapes=tuple({0: rows} for _ in example), strict=False
        )
