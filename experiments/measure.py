"""Measure kernels and collectives of this machine: `python -m experiments.measure`.

The first stage of the flow: tables → shard sets → timings, from which `cost_net` learns.
Writes `kernels/` and `collectives/` (part files) and, once all is done, the merged
`kernels.parquet` and `collectives.parquet`. Started again, it measures what is missing.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import hydra
from omegaconf import DictConfig, OmegaConf
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from autoshard.errors import AutoshardError
from autoshard.measure.config import MeasureConfig, measure_config
from autoshard.measure.runner import (
    COLLECTIVES_FOLDER,
    KERNELS_FOLDER,
    measure_collectives,
    measure_kernels,
)
from autoshard.measure.store import merge_parts
from autoshard.workloads.registry import make_workload

CONF_DIR = str(Path(__file__).resolve().parents[1] / "conf")
_console = Console(stderr=True)


def run(config: MeasureConfig, out_dir: Path) -> list[Path]:
    """Measure what is missing in `out_dir`, and merge.

    Returns:
        The merged files.

    Raises:
        AutoshardError: see `measure_kernels` and `measure_collectives`.
    """
    merged: list[Path] = []
    if config.num_sets:
        tables = make_workload(**config.workload)
        with _progress("kernels") as report:
            measure_kernels(config, tables, out_dir, report)
        merged.append(out_dir / f"{KERNELS_FOLDER}.parquet")
    if config.collectives.num_collectives and config.collectives.world_sizes:
        with _progress("collectives") as report:
            measure_collectives(config, out_dir, report)
        merged.append(out_dir / f"{COLLECTIVES_FOLDER}.parquet")
    for path in merged:
        num_rows = merge_parts(path.with_suffix(""), path)
        _console.print(f"{path}: {num_rows} rows, {path.stat().st_size / 2**20:.2f} MiB")
    return merged


@contextmanager
def _progress(title: str) -> Iterator[Callable[[int, int, str], None]]:
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[what]}"),
    )
    with Progress(*columns, console=_console) as bar:
        task = bar.add_task(title, total=None, what="starting workers")

        def report(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, what=what)

        yield report


@hydra.main(version_base="1.3", config_path=CONF_DIR, config_name="measure")
def main(raw: DictConfig) -> None:
    """Run with the values of `conf/measure.yaml` and of the command line."""
    values = OmegaConf.to_container(raw, resolve=True)
    assert isinstance(values, dict)
    out_dir = Path(str(values.pop("out_dir")))
    try:
        run(measure_config({str(key): value for key, value in values.items()}), out_dir)
    except AutoshardError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
