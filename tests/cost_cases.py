"""A simulated machine with known physics, whose measurements the cost networks learn from.

Its kernels are not a weighted sum of work: rows of tables larger than a cache cost more per
element, and many touched rows in one set cost more again. A linear model cannot say either.
"""

from __future__ import annotations

import atexit
import json
import shutil
import tempfile
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from autoshard.calibration.adapting import CalibrationConfig
from autoshard.calibration.artifact import calibrate
from autoshard.calibration.data import calibration_data
from autoshard.calibration.tunable import TunableModel
from autoshard.cost_models.exported import load_cost_model
from autoshard.distributions import IdDistribution
from autoshard.features import SHARD_FEATURES, shard_features
from autoshard.measure.environment import Environment
from autoshard.measure.schema import COLLECTIVE_COLUMNS, KERNEL_COLUMNS
from autoshard.measure.slices_json import slices_to_text
from autoshard.problem import Optimizer, TrainingConfig
from autoshard.protocols import CostModel
from autoshard.shards import ShardSlice
from autoshard.tables import Table
from cost_net.dataset import KernelData, MeasuredData, collective_data, kernel_data
from cost_net.export import export_cost_model
from cost_net.pipeline import MODEL_FOLDER, TrainedCostModel, train_cost_model
from cost_net.training import CostNetConfig, NetworkKind, train_compute

MACHINE = Environment(hardware={"cpu": "simulated"}, software={"torch": "2.13.0"})
NOISE = 0.02
_PLAIN = {"string": "x", "int64": 3, "double": 0.01, "bool": False}
_COLUMN = {name: index for index, name in enumerate(SHARD_FEATURES)}


def pool(split: str, num: int = 60) -> list[Table]:
    """Tables of one split; the names of different splits differ."""
    rng = np.random.default_rng({"train": 1, "validation": 2, "test": 3}[split])
    return [
        Table(
            name=f"{split}-{index}",
            num_embeddings=int(10 ** rng.uniform(3, 6.5)),
            embedding_dim=int(rng.choice([8, 16, 32, 64, 128])),
            pooling_factor=float(np.round(rng.uniform(1, 30), 1)),
            ids=IdDistribution(zipf_exponent=float(np.round(rng.uniform(0, 1.2), 2))),
        )
        for index in range(num)
    ]


def kernel_ms(features_SF: np.ndarray) -> np.ndarray:
    """What the simulated machine takes for one set, [2], without noise."""

    def column(name: str) -> np.ndarray:
        return features_SF[:, _COLUMN[name]]

    megabytes = np.expm1(column("log_weights_bytes")) / 2**20
    miss = 1 + 2.0 * megabytes / (megabytes + 16.0)
    touched = column("fwd_unique_elements").sum()
    crowd = 1 + 0.15 * touched / (touched + 3e6)
    fwd = (
        column("fwd_lookup_elements") * 4e-7 * miss + column("fwd_bags") * 1e-5 + 0.01
    ).sum() * crowd
    bwd = (
        column("bwd_lookups") * 1e-4 + column("bwd_unique_elements") * 1e-6 * miss + 0.02
    ).sum() * crowd + 0.1
    return np.array([fwd + 0.05, bwd])


def transfer_ms(world_size: int, busiest_bytes: float, total_bytes: float) -> float:
    """What it takes for an all-to-all, without noise; every rank has a processor of its own."""
    return 0.1 + 0.05 * (world_size - 1) + busiest_bytes / 2e6 + total_bytes / world_size / 4e6


def kernel_rows(sets_per_split: dict[str, int], seed: int = 0) -> list[dict[str, Any]]:
    """Measured shard sets; every tenth of a split is measured twice."""
    rng = np.random.default_rng(seed)
    rows = []
    for split, num in sets_per_split.items():
        tables = pool(split)
        for number in range(num):
            size = min(int(rng.geometric(0.15)), 30)
            chosen = [tables[i] for i in rng.choice(len(tables), size, replace=False)]
            samples = int(rng.choice([256, 512, 1024]))
            training = TrainingConfig(batch_size=samples)
            slices = [ShardSlice.whole(table) for table in chosen]
            exact = kernel_ms(shard_features(slices, training, 1))
            for repeat in range(2 if number % 10 == 0 else 1):
                fwd, bwd = exact * np.exp(NOISE * rng.standard_normal(2))
                rows.append(_row(KERNEL_COLUMNS, split, number, repeat) | {
                    "split": split,
                    "num_slices": size,
                    "num_samples": samples,
                    "world_size": 1,
                    "optimizer": Optimizer.ROWWISE_ADAGRAD.value,
                    "slices": slices_to_text(slices),
                    "fwd_ms": fwd,
                    "bwd_ms": bwd,
                })  # fmt: skip
    for index, one in enumerate(rows):  # a number for each set, as the runner gives
        one["index"] = index - one["repeat"]
    return rows


def collective_rows(num: int = 150, seed: int = 0) -> list[dict[str, Any]]:
    """Measured all-to-alls of 2, 4 and 8 ranks."""
    rng = np.random.default_rng(seed)
    rows = []
    for number in range(num):
        world_size = (2, 4, 8)[number % 3]
        sent = 10 ** rng.uniform(2, 7, world_size) * (world_size - 1)
        received = (sent.sum() - sent) / (world_size - 1)
        busiest = max(sent.max(), received.max())
        exact = transfer_ms(world_size, busiest, sent.sum())
        rows.append(_row(COLLECTIVE_COLUMNS, "x", number, 0) | {
            "index": number,
            "collective": "all_to_all",
            "world_size": float(world_size),
            "max_sent_bytes": sent.max(),
            "max_received_bytes": received.max(),
            "total_bytes": sent.sum(),
            "bytes_per_peer": [4] * world_size,
            "transfer_ms": exact * float(np.exp(NOISE * rng.standard_normal())),
        })  # fmt: skip
    return rows


def _row(columns: dict[str, Any], split: str, number: int, repeat: int) -> dict[str, Any]:
    plain = {name: _PLAIN.get(str(kind)) for name, kind in columns.items()}
    return plain | {
        "key": f"{split}-{number}-{repeat}",
        "protocol": "p",
        "index": number,
        "repeat": repeat,
        "pass": 0,
        "measured_at": f"2026-01-01T00:{number // 60 % 60:02d}:{number % 60:02d}",
        "device": "cpu",
        "hardware_fingerprint": MACHINE.hardware_fingerprint,
        "software_fingerprint": MACHINE.software_fingerprint,
    }


@cache
def kernels() -> KernelData:
    """The kernel measurements that tests learn from."""
    return kernel_data(pd.DataFrame(kernel_rows({"train": 400, "validation": 80, "test": 150})))


@cache
def measurements() -> MeasuredData:
    """All measurements that tests learn from."""
    return MeasuredData(
        kernels=kernels(),
        collectives=collective_data(pd.DataFrame(collective_rows())),
        facts={
            "num_kernel_rows": kernels().num_sets,
            "num_collective_rows": 150,
            "measured_from": "2026-01-01",
            "measured_to": "2026-01-01",
            "device": "cpu",
            "cache": "warm",
            "threads": 1,
            "concurrent_workers": 1,
            "num_passes": 1,
            "num_repeated_sets": 0,
            "num_oversubscribed_rows": 0,
            "hardware_fingerprint": MACHINE.hardware_fingerprint,
            "software_fingerprint": MACHINE.software_fingerprint,
        },
    )


def quick_config(kind: str = "additive", **changes: Any) -> CostNetConfig:
    """A training of seconds."""
    values: dict[str, Any] = {"num_epochs": 60, "collective_epochs": 300, **changes}
    return CostNetConfig(network=NetworkKind(kind), **values)


@cache
def _folder() -> Path:
    folder = Path(tempfile.mkdtemp(prefix="autoshard-cost-models-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@cache
def trained() -> TrainedCostModel:
    """A model of the simulated machine, exported below `model_folder`."""
    return train_cost_model(measurements(), quick_config(), _folder())


@cache
def model_folder(kind: str = "additive") -> Path:
    """A trained model as an artifact. Copy it before you break it.

    The sum networks are trained for form only, and take the rest from `trained()`.
    """
    full = trained()
    if kind == "additive":
        return _folder() / MODEL_FOLDER
    config = quick_config(kind, num_epochs=2)
    network = train_compute(kernels(), config)
    folder = _folder() / kind
    export_cost_model(network, full.collective, measurements(), config, full.errors, folder)
    return folder


@cache
def calibrated_folder() -> Path:
    """The trained model, calibrated to a machine whose backward takes twice as long.

    Fine-tuned as well, which alters every weight.
    """
    rows = pd.DataFrame(kernel_rows({"train": 40}, seed=5))
    rows["bwd_ms"] *= 2.0
    exchanges = pd.DataFrame(collective_rows(40, seed=3))
    exchanges["transfer_ms"] *= 1.5
    folder = _folder() / "calibrated"
    config = CalibrationConfig(num_folds=2, num_steps=20)
    calibrate(TunableModel(model_folder()), calibration_data(rows, exchanges), folder, config)
    return folder


@cache
def exported(kind: str = "additive") -> CostModel:
    """`model_folder(kind)`, loaded."""
    return load_cost_model(model_folder(kind))


def features_of(tables: Sequence[Table], batch_size: int = 512, world_size: int = 1) -> np.ndarray:
    """Features of whole tables."""
    slices = [ShardSlice.whole(table) for table in tables]
    return shard_features(slices, TrainingConfig(batch_size=batch_size), world_size)


def config_of(folder: Path) -> dict[str, Any]:
    """An artifact's config as it stands."""
    return json.loads((folder / "config.json").read_text())
