"""Merge measurements of many machines: `python -m experiments.merge_measurements 'sources=[…]'`.

Each source is an output folder of `experiments.measure`, a Parquet file, or a pattern for such:
`sources='[runs/a,multirun/measure/2026-12-02*/*]'`. Writes one folder for each kind of hardware,
set of versions and setting, and tells which parts of a divided run are missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from autoshard.measure.machine_groups import Merged, MergedGroup, merge_by_machine
from experiments.common import run_experiment
from experiments.metrics import MetricsLog


@dataclass(frozen=True, kw_only=True)
class MergeMeasurementsConfig:
    """What to merge."""

    sources: tuple[str, ...]
    """Folders, files, and patterns for them."""
    require_complete: bool = False
    """Refuse to merge while parts or rows are missing."""


def run(config: MergeMeasurementsConfig, out_dir: Path, metrics: MetricsLog) -> Merged:
    """Merge, and print what was merged.

    Raises:
        AutoshardError: see `merge_by_machine`.
    """
    merged = merge_by_machine(config.sources, out_dir, require_complete=config.require_complete)
    for step, group in enumerate(merged.groups):
        counts = {f"num_{rows.kind.value}": rows.num_rows for rows in group.rows}
        metrics.log(step, folder=group.folder.name, is_complete=group.is_complete, **counts)
    console = Console()
    for group in merged.groups:
        console.print(group.folder.name, soft_wrap=True)
        console.print(group_table(group))
    dropped = f", {merged.num_dropped} row(s) that occurred again" if merged.num_dropped else ""
    console.print(
        f"{out_dir}: {len(merged.groups)} group(s) of {merged.num_files} file(s){dropped}"
    )
    return merged


def group_table(group: MergedGroup) -> Table:
    """What a folder holds, and what is missing of it."""
    table = Table()
    for name in ("rows of", "protocol"):
        table.add_column(name, no_wrap=True)
    for name in ("sets", "rows"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("parts")
    for rows in group.rows:
        counts = (str(rows.num_sets), str(rows.num_rows))
        for coverage in rows.coverage:
            style = None if coverage.is_complete else "yellow"
            table.add_row(
                rows.kind.value, coverage.protocol[:8], *counts, str(coverage), style=style
            )
            counts = ("", "")
    return table


if __name__ == "__main__":
    run_experiment("merge_measurements", MergeMeasurementsConfig, run)
