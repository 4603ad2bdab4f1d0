"""Train a cost model: `python -m experiments.train_cost_net 'measurements=[path/to/folder]'`.

Writes the artifact `model/`, the error report `errors.json` (beside plain baselines and the
noise floor), `predictions.parquet` and the learning curve `metrics.jsonl`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from cost_net.collective_errors import world_size_table
from cost_net.dataset import load_measurements
from cost_net.errors import error_table
from cost_net.pipeline import MODEL_FOLDER, train_cost_model
from cost_net.training import CostNetConfig
from experiments.common import run_experiment
from experiments.metrics import MetricsLog
from experiments.progress import progress_bar


@dataclass(frozen=True, kw_only=True)
class TrainCostNetConfig:
    """What to learn from, and how."""

    measurements: tuple[str, ...]
    """Output folders of `experiments.measure`."""
    cost_net: CostNetConfig


def run(config: TrainCostNetConfig, out_dir: Path, metrics: MetricsLog) -> None:
    """Train, report and export.

    Raises:
        AutoshardError: the measurements are not usable.
    """
    with progress_bar("training the cost model") as report:
        report(0, config.cost_net.num_epochs, "reading measurements")
        data = load_measurements(config.measurements)

        def on_epoch(epoch: int, num_epochs: int, values: Mapping[str, float]) -> None:
            report(epoch, num_epochs, f"validation loss {values['validation_loss']:.4f}")
            metrics.log(epoch, **values)

        trained = train_cost_model(data, config.cost_net, out_dir, on_epoch)
    console = Console()
    console.print(error_table(trained.errors))
    if (unseen := world_size_table(trained.errors)) is not None:
        console.print(unseen)
    console.print(f"model: {out_dir / MODEL_FOLDER}")


if __name__ == "__main__":
    run_experiment("train_cost_net", TrainCostNetConfig, run)
