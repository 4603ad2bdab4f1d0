"""`autoshard calibrate`: an exported cost model, adapted to measurements of another machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli.console import note, say, show_json, show_table, waiting
from autoshard.cli.options import JsonOption, SeedOption

if TYPE_CHECKING:
    from collections.abc import Mapping


def calibrate_command(
    measurements: Annotated[
        str,
        typer.Option(
            metavar="FOLDER",
            help="Measured shard sets and all-to-alls of one machine and optimizer.",
        ),
    ],
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
    """Adapt a cost model to another machine, from about 100 measured shard sets.

    For example:

      autoshard calibrate --measurements measured --out my_model
      autoshard plan tables.csv --world-size 2 --hbm-gib 4 --cost-model my_model
    """
    _check_out(Path(out))
    from autoshard.calibration.adapting import CalibrationConfig
    from autoshard.calibration.artifact import calibrate
    from autoshard.calibration.data import load_calibration_data
    from autoshard.calibration.tunable import TunableModel

    model = TunableModel(base)
    data = load_calibration_data(measurements, exchanges=collectives)
    with waiting(f"calibrating {model.model.name} with {data.sets.num_sets} shard sets"):
        report = calibrate(model, data, out, CalibrationConfig(seed=seed))
    if json_output:
        show_json({"out": out, **report})
    else:
        _show(report)
    note(f"wrote {out}")


def _check_out(path: Path) -> None:
    from autoshard.errors import InputError

    if path.exists() and not (path.is_dir() and not any(path.iterdir())):
        raise InputError(f"{path} exists", remedy="choose a folder that is new or empty")


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
