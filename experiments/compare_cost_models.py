"""Which cost model is best, and how sure is that? `python -m experiments.compare_cost_models`.

Trains our network, the networks of AutoShard and NeuroShard and plain baselines on the same rows,
with several seeds and on growing parts of the rows, and writes `comparison.json`,
`comparison.md` (tables) and figures. Finished trainings are kept; a killed run goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console

from autoshard.checks import check_integers, check_numbers
from autoshard.errors import InputError
from autoshard.files import write_text
from cost_net.comparison import ComparisonConfig, compare
from cost_net.comparison_data import load_comparison_data
from cost_net.comparison_figures import write_figures
from cost_net.comparison_text import comparison_markdown, comparison_table
from cost_net.contenders import make_contenders
from cost_net.learning_curve import curve_sizes, plan_trainings
from cost_net.training import CostNetConfig
from cost_net.trainings import TrainingFolder, run_trainings
from experiments.common import run_experiment
from experiments.metrics import MetricsLog
from experiments.progress import progress_bar

REPORT_FILE = "comparison.json"
TEXT_FILE = "comparison.md"
TRAININGS_FOLDER = "trainings"


@dataclass(frozen=True, kw_only=True)
class CompareCostModelsConfig:
    """What to learn from, who takes part, and how they are judged."""

    measurements: tuple[str, ...]
    """Output folders of `experiments.measure`."""
    networks: dict[str, CostNetConfig]
    """By name, as `conf/cost_net` has them. Their seeds are replaced."""
    comparison: ComparisonConfig
    workers: int
    """Processes that train, one thread each."""
    training_time_limit_s: float
    """A training that takes longer ends the run."""

    def __post_init__(self) -> None:
        check_integers(self, workers=1)
        check_numbers(self, training_time_limit_s=1.0)
        if self.comparison.ours not in self.networks:
            raise InputError(
                "comparison.ours names no network",
                got=self.comparison.ours,
                allowed=", ".join(self.networks),
            )


def run(config: CompareCostModelsConfig, out_dir: Path, metrics: MetricsLog) -> None:
    """Train all contenders, judge them, write the report.

    Raises:
        AutoshardError: the measurements are not usable, or a training failed.
    """
    settings = config.comparison
    with progress_bar("comparing cost models") as report:
        report(0, 1, "reading measurements")
        data = load_comparison_data(
            config.measurements,
            num_grown_sets=settings.num_grown_sets,
            num_random_sets=settings.num_random_sets,
            seed=settings.seed,
        )
        contenders = make_contenders(config.networks)
        num_sets = int((data.kernels.split_N == "train").sum())
        sizes = curve_sizes(settings.sizes, num_sets)
        trainings = plan_trainings(contenders, sizes, num_sets, settings.num_seeds)
        folder = TrainingFolder(
            out_dir / TRAININGS_FOLDER,
            {
                "data": data.mark,
                "min_steps": settings.min_steps,
                "networks": {n: _plain(c) for n, c in config.networks.items()},
            },
        )
        done = sum(training in folder for training in trainings)
        report(done, len(trainings), "training")
        for training in run_trainings(
            data,
            trainings,
            folder,
            min_steps=settings.min_steps,
            num_workers=config.workers,
            time_limit_s=config.training_time_limit_s,
        ):
            done += 1
            report(done, len(trainings), f"{training.key} is done")
        report(done, len(trainings), "judging")
        results = [(training, folder.read(training)) for training in trainings]
        comparison = compare(data, contenders, results, settings)
        write_text(out_dir / REPORT_FILE, json.dumps(comparison, indent=1) + "\n")
        figures = write_figures(comparison, out_dir)
        write_text(out_dir / TEXT_FILE, comparison_markdown(comparison))
    for step, (name, scores) in enumerate(comparison["test"].items()):
        medians = {f"{q}_median": s["median"]["value"] for q, s in scores.items()}
        metrics.log(step, contender=name, **medians)
    console = Console()
    console.print(comparison_table(comparison))
    console.print(f"report: {out_dir / TEXT_FILE}, {len(figures)} figures beside it")


def _plain(config: CostNetConfig) -> Mapping[str, object]:
    """What decides a network's training, as plain values."""
    return {**asdict(config), "network": config.network.value}


if __name__ == "__main__":
    run_experiment("compare_cost_models", CompareCostModelsConfig, run)
