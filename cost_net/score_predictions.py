"""Score anybody's predictions of kernel times: `python -m cost_net.score_predictions --help`.

For those who bring a cost model of their own to a published data set: predictions come as a plain
table with one row per shard set, and are scored as `cost_net.pipeline` scores its networks, beside
the noise floor. `--export-features` writes what such a model can learn from, as a plain table too.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from autoshard.errors import AutoshardError, InputError
from autoshard.files import write_atomically
from cost_net.dataset import SPLITS
from cost_net.errors import QUANTITIES
from cost_net.plain_tables import feature_table, load_kernels, read_predictions
from cost_net.prediction_scores import score_predictions


def main(
    data: Annotated[
        Path, typer.Option(help="Folder with kernels.parquet, such as data/measurements/cpu-2core.")
    ],
    predictions: Annotated[
        Path | None,
        typer.Option(help="Parquet or CSV: index, fwd_ms, bwd_ms; one row per shard set."),
    ] = None,
    split: Annotated[str, typer.Option(help=f"{', '.join(SPLITS)} or all.")] = "test",
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")] = False,
    export_features: Annotated[
        Path | None,
        typer.Option(help="Write features and labels of all shards, a Parquet file."),
    ] = None,
) -> None:
    """Score predicted kernel times of a measured data set, or export what to learn from."""
    if predictions is None and export_features is None:
        raise InputError(
            "there is nothing to do", remedy="give --predictions, --export-features or both"
        )
    if split not in (*SPLITS, "all"):
        raise InputError("there is no such split", got=split, allowed=(*SPLITS, "all"))
    frame = load_kernels(data)
    if export_features is not None:
        features = feature_table(frame)
        write_atomically(
            export_features,
            lambda path: features.to_parquet(path, index=False, compression="zstd"),
        )
        print(f"{export_features}: {len(features)} shards", file=sys.stderr)
    if predictions is not None:
        scored = score_predictions(frame, read_predictions(predictions), split)
        if as_json:
            print(json.dumps(scored, indent=1))
        else:
            Console().print(score_table(scored))


def score_table(scored: dict[str, Any]) -> Table:
    """For the terminal, in percent like the error report."""
    simulated = "simulated " if scored["device"] == "simulated" else ""
    table = Table(
        title=f"Relative error on {scored['num_sets']} {simulated}shard sets ({scored['split']})"
    )
    table.add_column("quantity")
    for name in ("median", "95% interval", "mean", "p90", "tau"):
        table.add_column(name, justify="right", no_wrap=True)
    _add_rows(table, "", scored["scores"], scored["median_95"])
    if scored["noise_floor"]:
        table.add_section()
        _add_rows(table, "a second measurement, ", scored["noise_floor"], {})
    return table


def _add_rows(
    table: Table, prefix: str, scores: dict[str, Any], intervals: dict[str, list[float]]
) -> None:
    for name in QUANTITIES:
        values, interval = scores[name], intervals.get(name)
        table.add_row(
            f"{prefix}{name}",
            f"{values['median']:.1%}",
            f"{interval[0]:.1%}–{interval[1]:.1%}" if interval else "",
            f"{values['mean']:.1%}",
            f"{values['p90']:.1%}",
            "–" if values["tau"] is None else f"{values['tau']:.3f}",
        )


if __name__ == "__main__":
    app = typer.Typer(add_completion=False, pretty_exceptions_enable=False)
    app.command()(main)
    try:
        app()
    except AutoshardError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
