"""From measurements to an exported cost model with its error report: the whole of training."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from autoshard.files import make_folder, write_atomically, write_text
from cost_net.baselines import BASELINES
from cost_net.collective_errors import (
    collective_score,
    leave_one_world_size_out,
    other_kinds_report,
)
from cost_net.collective_training import predict_collective_ms, train_collective
from cost_net.dataset import SPLITS, KernelData, MeasuredData
from cost_net.errors import noise_floor, score
from cost_net.export import export_cost_model
from cost_net.networks import AdditiveNet, CollectiveNet, SumNet
from cost_net.training import CostNetConfig, OnEpoch, predict_ms, train_compute

MODEL_FOLDER = "model"
ERRORS_FILE = "errors.json"
PREDICTIONS_FILE = "predictions.parquet"


@dataclass(frozen=True, kw_only=True, eq=False)
class TrainedCostModel:
    """What training gives."""

    network: AdditiveNet | SumNet
    collective: CollectiveNet
    errors: Mapping[str, Any]
    fingerprint: str
    """Of the exported artifact."""


def train_cost_model(
    data: MeasuredData, config: CostNetConfig, out_dir: Path, on_epoch: OnEpoch | None = None
) -> TrainedCostModel:
    """Train, report errors, export.

    Args:
        data: from `cost_net.dataset.load_measurements`.
        config: how.
        out_dir: gets `errors.json`, `predictions.parquet` and the artifact `model/`.
        on_epoch: told of every epoch of the compute network.

    Raises:
        InputError: a split is empty or the folder is not writable.
    """
    make_folder(out_dir)
    network = train_compute(data.kernels, config, on_epoch)
    collective = train_collective(data.collectives, config)
    errors = error_report(data, network, collective, config)
    write_text(out_dir / ERRORS_FILE, json.dumps(errors, indent=1) + "\n")
    frame = predictions(data, network, collective)
    write_atomically(out_dir / PREDICTIONS_FILE, lambda path: frame.to_parquet(path, index=False))
    fingerprint = export_cost_model(
        network, collective, data, config, errors, out_dir / MODEL_FOLDER
    )
    return TrainedCostModel(
        network=network, collective=collective, errors=errors, fingerprint=fingerprint
    )


def error_report(
    data: MeasuredData,
    network: AdditiveNet | SumNet,
    collective: CollectiveNet,
    config: CostNetConfig,
) -> dict[str, Any]:
    """Errors of the network and of the baselines on every split.

    Returns:
        `splits[split]` with `num_sets` and `models[name][fwd|bwd|total]` (see
        `cost_net.errors.score`), `noise_floor`, `collectives` (of the rows trained on,
        under `test` of those held out, and see `cost_net.collective_errors`), `network` and
        `measurements`.
    """
    kernels = data.kernels
    train = kernels.split("train")
    predictors = {name: make(train) for name, make in BASELINES.items()}
    label = f"network ({config.network.value})"
    splits = {}
    for split in SPLITS:
        part = kernels.split(split)
        if part.num_sets == 0:
            continue
        models = {label: _score(part, predict_ms(network, part))}
        models |= {name: _score(part, predict(part)) for name, predict in predictors.items()}
        splits[split] = {"num_sets": part.num_sets, "models": models}
    exchanges = data.collectives
    return {
        "network": label,
        "splits": splits,
        "noise_floor": noise_floor(kernels),
        "collectives": {
            **(collective_score(exchanges.of(~exchanges.test_M), collective) or {}),
            "test": collective_score(exchanges.of(exchanges.test_M), collective),
            "left_out_world_sizes": leave_one_world_size_out(exchanges, config, collective),
            "other_kinds": other_kinds_report(data.other_collectives, collective, config),
        },
        "measurements": dict(data.facts),
    }


def _score(part: KernelData, predicted_NP: np.ndarray) -> dict[str, Any]:
    return score(np.maximum(predicted_NP, 1e-9), part.time_ms_NP, part.num_shards_N)


def predictions(
    data: MeasuredData, network: AdditiveNet | SumNet, collective: CollectiveNet
) -> pd.DataFrame:
    """Predicted beside measured, one row per shard set and phase, and per all-to-all.

    Returns:
        Columns `kind` (`fwd`, `bwd`, `collective`), `split`, `num_shards` (world size of a
        collective), `measured_ms`, `predicted_ms`.
    """
    kernels = data.kernels
    predicted_NP = predict_ms(network, kernels)
    parts = [
        pd.DataFrame(
            {
                "kind": phase,
                "split": kernels.split_N,
                "num_shards": kernels.num_shards_N,
                "measured_ms": kernels.time_ms_NP[:, column],
                "predicted_ms": predicted_NP[:, column],
            }
        )
        for column, phase in enumerate(("fwd", "bwd"))
    ]
    parts.append(
        pd.DataFrame(
            {
                "kind": "collective",
                "split": np.where(data.collectives.test_M, "test", "train"),
                "num_shards": data.collectives.traffic_MC[:, 0].astype(int),
                "measured_ms": data.collectives.time_ms_M,
                "predicted_ms": predict_collective_ms(collective, data.collectives),
            }
        )
    )
    return pd.concat(parts, ignore_index=True)
