r"""How good a cost model gets from few measurements of another machine, and how many it saves.

    python -m experiments.measure measure_preset=full kernels.optimizer=adagrad num_sets=2500 \
        collectives.num_collectives=0 out=runs/other
    python -m benchmarks.calibration --measurements runs/other --out runs/calibration

Another optimizer (or batch size, or number of threads) stands in for another machine. From its
training sets that are not augmented, `--sets` are drawn to calibrate the base model with, as
`autoshard calibrate` does, and from all of them growing numbers to train a network of the same
kind from scratch. All are scored on the same sets of test tables, which neither saw. Every seed
draws sets of its own. Written are `calibration.json` and a picture, `calibration.png` and `.svg`.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as TextTable

from autoshard.calibration.adapting import CalibrationConfig, adapt_kernels
from autoshard.calibration.data import SetRows, calibration_data
from autoshard.calibration.tunable import TunableModel, predict_ms
from autoshard.errors import AutoshardError, InputError
from autoshard.files import make_folder, write_atomically, write_text
from autoshard.measure.loading import load_kernel_rows
from autoshard.measure.normalising import combine_passes, normalise_by_references
from autoshard.report.svg import INK, color, style
from cost_net.bootstrap import Resamples, error_intervals, median_difference
from cost_net.contenders import Contender, fit, some_rows
from cost_net.dataset import KernelData, existing, kernel_data
from cost_net.errors import QUANTITIES, with_total
from cost_net.training import CostNetConfig

FloatArray = NDArray[np.float64]
REPORT_FILE = "calibration.json"
BASE, CALIBRATED = "base model as it is", "calibrated"
SCRATCH = "from scratch"
#: Calibrating is to be at least as good as learning from so many sets.
BAR_SETS = 1000
_NUM_RESAMPLES = 1000
#: Optimizer steps of a network at least, however few sets there are.
_MIN_STEPS = 4000
_DOTS_PER_INCH = 160


@dataclass(frozen=True, kw_only=True, eq=False)
class Other:
    """Measurements of the machine to calibrate for."""

    rows: pd.DataFrame
    """One row per pass, as measured."""
    kernels: KernelData
    """Every set once."""

    @classmethod
    def load(cls, folder: Path) -> Other:
        """Read; the folder is one of `experiments.measure`."""
        rows = load_kernel_rows(existing(folder, "kernels"))
        everything = kernel_data(combine_passes(normalise_by_references(rows)))
        everything.check_disjoint()
        _, first = np.unique(everything.index_N, return_index=True)
        return cls(rows=rows, kernels=everything.of(first))

    def training_sets(self, num_sets: int, seed: int) -> SetRows:
        """A calibration's sets: nothing of any other set is looked at, not even its references.

        They hold tables as they are, none augmented, as those of `autoshard calibrate` do.
        """
        train = self.plain_training_rows()
        drawn = np.random.default_rng([seed, 2]).choice(
            train["index"].unique(), num_sets, replace=False
        )
        rows = train[train["index"].isin(drawn) & (train["repeat"] == 0)]
        return calibration_data(combine_passes(normalise_by_references(rows)), None).sets

    def plain_training_rows(self) -> pd.DataFrame:
        """Passes over training sets that are not augmented."""
        return self.rows[(self.rows["split"] == "train") & ~self.rows["augmented"].astype(bool)]

    def test(self) -> KernelData:
        """What everyone is scored on."""
        return self.kernels.split("test")


def as_rows(data: KernelData) -> SetRows:
    """The same sets as calibration takes them."""
    return SetRows(
        features_SF=data.features_SF,
        num_shards_N=data.num_shards_N,
        time_ms_NP=data.time_ms_NP,
        index_N=data.index_N,
    )


def compare(
    other: Other,
    model: TunableModel,
    *,
    num_calibration_sets: int,
    scratch_sizes: Sequence[int],
    num_seeds: int,
    num_steps: int,
) -> tuple[dict[str, FloatArray], list[dict[str, Any]]]:
    """Everyone's predictions of the test sets.

    Returns:
        By contender and seed, [seeds, N, P]; and how each calibration went.
    """
    test = other.test()
    network = CostNetConfig()
    predicted: dict[str, list[FloatArray]] = {
        BASE: [predict_ms(model, model.compute_state, as_rows(test))]
    }
    reports = []
    with Progress(console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=num_seeds * (1 + len(scratch_sizes)))
        for seed in range(num_seeds):
            bar.update(task, description=f"calibrating, seed {seed}")
            sets = other.training_sets(num_calibration_sets, seed)
            adapted = adapt_kernels(model, sets, CalibrationConfig(seed=seed, num_steps=num_steps))
            reports.append(adapted.report)
            own_NP = predict_ms(model, adapted.state, as_rows(test))
            predicted.setdefault(CALIBRATED, []).append(own_NP)
            bar.advance(task)
            for size in scratch_sizes:
                bar.update(task, description=f"training with {size} sets, seed {seed}")
                predict = fit(
                    Contender(name=SCRATCH, config=network),
                    some_rows(other.kernels, size, seed=seed),
                    seed=seed,
                    min_steps=_MIN_STEPS,
                )
                predicted.setdefault(f"{SCRATCH}, {size}", []).append(predict(test))
                bar.advance(task)
    return {name: np.stack(runs) for name, runs in predicted.items()}, reports


def errors_of(predicted_QNP: FloatArray, measured_NP: FloatArray) -> FloatArray:
    """Relative errors, [seeds, N, 3]."""
    measured_N3 = with_total(measured_NP)
    return np.stack(
        [np.abs(with_total(own_NP) - measured_N3) / measured_N3 for own_NP in predicted_QNP]
    )


def summarise(errors: Mapping[str, FloatArray]) -> dict[str, dict[str, Any]]:
    """Median errors with intervals over sets, and of every seed."""
    num_sets = next(iter(errors.values())).shape[1]
    resamples = Resamples.draw(num_sets, _NUM_RESAMPLES, seed=0)
    return {
        name: {
            quantity: {
                **error_intervals(own_QN3[:, :, column], resamples)["median"].to_json(),
                "seeds": [float(np.median(one_N3[:, column])) for one_N3 in own_QN3],
            }
            for column, quantity in enumerate(QUANTITIES)
        }
        for name, own_QN3 in errors.items()
    }


def verdict(errors: Mapping[str, FloatArray]) -> dict[str, Any] | None:
    """The calibrated model's median error of the total less that of training from scratch."""
    rival = f"{SCRATCH}, {BAR_SETS}"
    if rival not in errors:
        return None
    calibrated_QN, rival_QN = errors[CALIBRATED][:, :, -1], errors[rival][:, :, -1]
    resamples = Resamples.draw(calibrated_QN.shape[1], _NUM_RESAMPLES, seed=1)
    difference = median_difference(calibrated_QN, rival_QN, resamples)
    return {"holds": difference.value <= 0.0, "difference": difference.to_json()}


def table(summary: Mapping[str, Mapping[str, Any]], title: str) -> TextTable:
    """For the terminal."""
    result = TextTable(title=title, caption="median relative error, 95% interval over sets")
    result.add_column("cost model", no_wrap=True)
    for quantity in QUANTITIES:
        result.add_column(quantity, justify="right")
    for name, scores in summary.items():
        result.add_row(
            name,
            *(
                f"{scores[q]['value']:.1%} ({scores[q]['low']:.1%}–{scores[q]['high']:.1%})"
                for q in QUANTITIES
            ),
        )
    return result


def picture(report: Mapping[str, Any]) -> Figure:
    """Error over the number of sets, for each phase and the total; call within `style()`."""
    figure = Figure(figsize=(9.0, 3.2), layout="constrained")
    sizes = report["scratch_sizes"]
    summary = report["errors"]
    every: Sequence[Axes] = figure.subplots(1, len(QUANTITIES), sharey=True)
    for axes, quantity in zip(every, QUANTITIES, strict=True):
        points = [summary[f"{SCRATCH}, {size}"][quantity] for size in sizes]
        axes.fill_between(
            sizes, [100 * p["low"] for p in points], [100 * p["high"] for p in points],
            color=color(1), alpha=0.2, linewidth=0,
        )  # fmt: skip
        axes.plot(sizes, [100 * p["value"] for p in points], color=color(1), label=SCRATCH)
        own = summary[CALIBRATED][quantity]
        axes.errorbar(
            [report["num_calibration_sets"]],
            [100 * own["value"]],
            yerr=[[100 * (own["value"] - own["low"])], [100 * (own["high"] - own["value"])]],
            fmt="o", color=color(0), label=CALIBRATED,
        )  # fmt: skip
        base = 100 * summary[BASE][quantity]["value"]
        axes.axhline(base, color=INK, linewidth=0.8, linestyle=":", label=BASE)
        axes.set(xscale="log", yscale="log", title=quantity, xlabel="shard sets of the new machine")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
        axes.set_xticks(sizes)
        axes.set_yticks([t for t in (2, 5, 10, 20, 50, 100, 200) if t < 1.5 * max(base, 20)])
    every[0].set_ylabel("median relative error, %")
    every[-1].legend(frameon=False)
    return figure


def write_picture(report: Mapping[str, Any], out: Path) -> None:
    """`calibration.svg` and `.png`."""
    with style():
        figure = picture(report)
        for suffix in ("svg", "png"):
            write_atomically(out / f"calibration.{suffix}", partial(_save, figure, suffix))


def _save(figure: Figure, suffix: str, path: Path) -> None:
    metadata = {"Date": None} if suffix == "svg" else None
    figure.savefig(path, format=suffix, dpi=_DOTS_PER_INCH, facecolor="white", metadata=metadata)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare and print; 2 for bad input."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--measurements", type=Path, required=True, help="of the other machine")
    parser.add_argument("--from", dest="base", default="default", help="the model to calibrate")
    parser.add_argument("--sets", type=int, default=100, help="shard sets to calibrate with")
    parser.add_argument("--scratch", default="100,300,1000", help="shard sets to train with")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=CalibrationConfig.num_steps)
    parser.add_argument("--out", type=Path, required=True, help="a folder")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except AutoshardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    if options.seeds < 1:
        raise InputError("--seeds is not usable", got=options.seeds, allowed="1 or more")
    other, model = Other.load(options.measurements), TunableModel(options.base)
    available = int((other.kernels.split_N == "train").sum())
    plain = len(other.plain_training_rows()["index"].unique())
    try:
        sizes = sorted({int(part) for part in options.scratch.split(",")})
    except ValueError:
        sizes = [0]
    if not (all(1 <= size <= available for size in sizes) and 1 <= options.sets <= plain):
        raise InputError(
            "--scratch and --sets name numbers of training sets",
            got=f"{options.scratch} and {options.sets}",
            allowed=f"1..{available}, separated by commas, and 1..{plain}",
        )
    make_folder(options.out)
    predicted, reports = compare(
        other,
        model,
        num_calibration_sets=options.sets,
        scratch_sizes=sizes,
        num_seeds=options.seeds,
        num_steps=options.steps,
    )
    test = other.test()
    errors = {name: errors_of(own, test.time_ms_NP) for name, own in predicted.items()}
    report = {
        "base": {"name": model.model.name, "fingerprint": model.model.fingerprint},
        "optimizer": test.optimizer.value,
        "num_test_sets": test.num_sets,
        "num_calibration_sets": options.sets,
        "scratch_sizes": sizes,
        "num_seeds": options.seeds,
        "errors": summarise(errors),
        "bar": verdict(errors),
        "calibrations": reports,
    }
    write_text(options.out / REPORT_FILE, json.dumps(report, indent=1) + "\n")
    write_picture(report, options.out)
    console = Console(width=None if sys.stdout.isatty() else 112)
    title = f"{test.num_sets} sets of test tables, {test.optimizer.value}, {options.seeds} seeds"
    console.print(table(report["errors"], title))
    if report["bar"] is not None:
        found = report["bar"]["difference"]
        console.print(
            f"calibrated with {options.sets} sets, at most the error of {BAR_SETS} from scratch: "
            f"{'holds' if report['bar']['holds'] else 'is missed'} (difference of the medians of "
            f"the total {100 * found['value']:+.1f} percentage points, "
            f"95% {100 * found['low']:+.1f} to {100 * found['high']:+.1f})",
            highlight=False,
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
