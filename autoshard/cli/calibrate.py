"""`autoshard calibrate`: an exported cost model, adapted to another machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli.console import note, progress_bar, say, show_json, show_table, waiting
from autoshard.cli.options import (
    JsonOption,
    SeedOption,
    check_output,
    integer_option,
    load_tables,
)
from autoshard.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Mapping

    from autoshard.calibration.measuring import QuickMeasuring

DEFAULT_NUM_SETS = 100
DEFAULT_OPTIMIZER = "rowwise_adagrad"
#: Where shard sets draw their tables from by default: sizes that a small machine holds.
DEFAULT_TABLES = "workload:laptop?num_tables=1000&seed=0"
#: Beside the model, so that the folder of a calibration that was cut short is found again.
MEASUREMENTS_SUFFIX = "-measurements"


def calibrate_command(
    out: Annotated[
        str,
        typer.Option(
            metavar="FOLDER", help="Where the calibrated model goes: a folder that is new or empty."
        ),
    ],
    base: Annotated[
        str,
        typer.Option(
            "--from", metavar="NAME|PATH", help="The model to start from: shipped or exported."
        ),
    ] = "default",
    measurements: Annotated[
        str | None,
        typer.Option(
            metavar="FOLDER",
            help="Use what was measured there, by this command or by experiments.measure, and "
            "measure nothing. By default this machine is measured, into FOLDER-measurements "
            "beside the model, which is continued if it is there.",
        ),
    ] = None,
    num_sets: Annotated[
        int, integer_option("Shard sets to measure, each of them twice.", low=20, high=100_000)
    ] = DEFAULT_NUM_SETS,
    tables: Annotated[
        str,
        typer.Option(
            metavar="TABLES",
            help="Shard sets are drawn from these tables: best those that plans will place.",
        ),
    ] = DEFAULT_TABLES,
    optimizer: Annotated[
        str,
        typer.Option(help="The fused optimizer: sgd, adagrad, rowwise_adagrad or adam."),
    ] = DEFAULT_OPTIMIZER,
    device: Annotated[str, typer.Option(help="Where kernels run: cpu or cuda.")] = "cpu",
    batch_size: Annotated[
        int | None,
        integer_option("Samples per rank, with --world-size; by default many sizes.", low=1),
    ] = None,
    world_size: Annotated[
        int | None, integer_option("Ranks of the plans to come; by default 1, 2, 4 and 8.", low=1)
    ] = None,
    collectives: Annotated[
        bool,
        typer.Option(
            "--collectives/--no-collectives",
            help="Calibrate all-to-alls, too, or keep the base model's.",
        ),
    ] = True,
    seed: SeedOption = 0,
    json_output: JsonOption = False,
) -> None:
    """Adapt a cost model to another machine, from about 100 shard sets: minutes.

    Measures, adapts what cross-validation shows to help, and says how good the model got. For
    example:

      autoshard calibrate --out my_model
      autoshard calibrate --out my_model --tables tables.csv --optimizer adam
      autoshard calibrate --out my_model --measurements runs/measurements
      autoshard plan tables.csv --world-size 2 --hbm-gib 4 --cost-model my_model
    """
    _check_out(Path(out))
    if measurements is not None:
        _refuse_measuring_options(
            {
                "--num-sets": num_sets != DEFAULT_NUM_SETS,
                "--tables": tables != DEFAULT_TABLES,
                "--optimizer": optimizer != DEFAULT_OPTIMIZER,
                "--device": device != "cpu",
                "--batch-size": batch_size is not None,
                "--world-size": world_size is not None,
            }
        )
    from autoshard.calibration.adapting import CalibrationConfig
    from autoshard.calibration.artifact import calibrate
    from autoshard.calibration.data import load_calibration_data
    from autoshard.calibration.measuring import QuickMeasuring
    from autoshard.calibration.tunable import TunableModel
    from autoshard.problem import parse_optimizer
    from autoshard.runtime.capabilities import parse_device

    model = TunableModel(base)
    folder = measurements
    if folder is None:
        folder = f"{out.rstrip('/')}{MEASUREMENTS_SUFFIX}"
        measuring = QuickMeasuring(
            num_sets=num_sets,
            num_collectives=QuickMeasuring.num_collectives if collectives else 0,
            optimizer=parse_optimizer(optimizer),
            device=parse_device(device),
            batch_size=batch_size,
            world_size=world_size,
            seed=seed,
        )
        _measure(tables, measuring, folder)
    data = load_calibration_data(folder, exchanges=collectives)
    with waiting(f"calibrating {model.model.name} with {data.sets.num_sets} shard sets"):
        report = calibrate(model, data, out, CalibrationConfig(seed=seed))
    if json_output:
        show_json({"out": out, "measurements": folder, **report})
    else:
        _show(report)
    note(f"wrote {out}")


def _check_out(path: Path) -> None:
    if not path.exists():
        check_output(path)
    elif not path.is_dir() or any(path.iterdir()):
        raise InputError(f"{path} exists", remedy="choose a folder that is new or empty")


def _refuse_measuring_options(given: Mapping[str, bool]) -> None:
    """Refuse options that say what to measure where nothing is measured."""
    if names := [name for name, is_given in given.items() if is_given]:
        raise InputError(
            f"--measurements measures nothing, and {', '.join(names)} says what to measure",
            remedy="leave one of them out",
        )


def _measure(tables: str, measuring: QuickMeasuring, folder: str) -> None:
    from autoshard.calibration.measuring import measure_for_calibration

    pool = load_tables(tables)
    note(f"measuring {measuring.num_sets} shard sets, each twice, into {folder}")
    with progress_bar("starting", 2 * measuring.num_sets) as bar:

        def report(done: int, total: int, what: str) -> None:
            bar.update(bar.task_ids[0], completed=done, total=total, description=what)

        measure_for_calibration(pool, measuring, folder, report)


def _show(report: Mapping[str, Any]) -> None:
    kernels, exchanges = report["kernels"], report["collectives"]
    scores = {"before": kernels["before"], "after": kernels["after"]}
    if kernels["noise_floor"]:
        scores["a second measurement"] = kernels["noise_floor"]
    names = ("fwd", "bwd", "total")
    rows = [[title, *(_shown(found[name]) for name in names)] for title, found in scores.items()]
    if exchanges is not None:
        say(
            f"All-to-alls ({exchanges['num']}): {_shown(exchanges['before'])} before, "
            f"{_shown(exchanges['after'])} after"
        )
    show_table(
        f"Median relative error, {kernels['num_sets']} shard sets",
        [("", False), *((name, True) for name in names)],
        rows,
        caption=f"{report['protocol']}, 95% bootstrap intervals; kept: {kernels['kept']}",
    )


def _shown(scores: Mapping[str, Any]) -> str:
    low, high = scores["interval"]
    return f"{scores['median']:.1%} ({low:.1%}–{high:.1%})"
