"""Measure kernels and collectives of this machine: `python -m experiments.measure`.

The first stage of the flow: tables → shard sets → timings, from which `cost_net` learns.
Writes `kernels/` and `collectives/` (part files) and, once all is done, the merged
`kernels.parquet` and `collectives.parquet`. Started again, it measures what is missing.
`--multirun part=range(0,4) num_parts=4` divides the work among jobs, which Hydra's launchers
put on machines of their own; `experiments.merge_measurements` puts the parts together.
"""

from __future__ import annotations

from pathlib import Path

from autoshard.measure.config import MeasureConfig
from autoshard.measure.merging import merge_parts
from autoshard.measure.runner import (
    COLLECTIVES_FOLDER,
    KERNELS_FOLDER,
    measure_collectives,
    measure_kernels,
)
from autoshard.workloads.registry import make_workload
from experiments.common import run_experiment
from experiments.metrics import MetricsLog
from experiments.progress import console, progress_bar


def run(config: MeasureConfig, out_dir: Path, metrics: MetricsLog) -> list[Path]:
    """Measure what is missing of this part in `out_dir`, and merge.

    Returns:
        The merged files; none of a kind of which the part has no rows.

    Raises:
        AutoshardError: see `measure_kernels` and `measure_collectives`.
    """
    merged: list[Path] = []
    if config.num_sets:
        tables = make_workload(**config.workload)
        with progress_bar("measuring kernels") as report:
            measure_kernels(config, tables, out_dir, report)
        merged.append(out_dir / f"{KERNELS_FOLDER}.parquet")
    if config.collectives.num_collectives and config.collectives.world_sizes:
        with progress_bar("measuring collectives") as report:
            measure_collectives(config, out_dir, report)
        merged.append(out_dir / f"{COLLECTIVES_FOLDER}.parquet")
    if empty := [path for path in merged if not any(path.with_suffix("").glob("part-*"))]:
        console.print(
            f"part {config.part} of {config.num_parts} has no "
            f"{' and no '.join(path.stem for path in empty)} to measure"
        )
    for step, path in enumerate(path for path in merged if path not in empty):
        num_rows = merge_parts(path.with_suffix(""), path)
        metrics.log(step, file=path.name, num_rows=num_rows)
        console.print(f"{path}: {num_rows} rows, {path.stat().st_size / 2**20:.2f} MiB")
    return [path for path in merged if path not in empty]


if __name__ == "__main__":
    run_experiment("measure", MeasureConfig, run)
