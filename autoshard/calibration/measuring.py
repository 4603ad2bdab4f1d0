"""Measures what a calibration needs, on this machine, in a few minutes.

Every shard set is measured twice, in processes of their own, so that the calibration can say
what a second measurement would score.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from autoshard.calibration.data import MIN_SETS
from autoshard.checks import check_integers
from autoshard.errors import InputError
from autoshard.measure.config import (
    CollectiveConfig,
    KernelConfig,
    MeasureConfig,
    SamplingConfig,
    TimingConfig,
)
from autoshard.measure.recording import Progress
from autoshard.measure.runner import measure_collectives, measure_kernels
from autoshard.problem import Optimizer
from autoshard.runtime.capabilities import Device
from autoshard.tables import Table

#: Samples of a step, all ranks together, and ranks, where the caller names none.
NUM_SAMPLES = (256, 512, 1024, 2048, 4096)
WORLD_SIZES = (1, 2, 4, 8)
#: A set draws its tables by number; all of them train.
_ALL_TRAIN = (1.0, 0.0, 0.0)
_KERNEL_TIMING = TimingConfig(
    warmup_iterations=3,
    min_iterations=9,
    max_iterations=200,
    target_relative_error=0.0,
    time_budget_s=0.15,
)


@dataclass(frozen=True, kw_only=True)
class QuickMeasuring:
    """What is measured for a calibration."""

    num_sets: int = 100
    """Shard sets, each measured twice."""
    num_collectives: int = 40
    """All-to-alls per world size; 0 for none."""
    optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD
    device: Device = Device.CPU
    batch_size: int | None = None
    """Samples per rank of the plans to come; None, as with `world_size`, for many sizes."""
    world_size: int | None = None
    """Ranks of the plans to come."""
    seed: int = 0
    """Decides shard sets and traffic."""

    def __post_init__(self) -> None:
        check_integers(self, num_sets=MIN_SETS, num_collectives=0, seed=0)
        setting = {"batch_size": self.batch_size, "world_size": self.world_size}
        given = [name for name, value in setting.items() if value is not None]
        check_integers(self, **dict.fromkeys(given, 1))
        if len(given) == 1:
            raise InputError(
                "a batch size and a world size go together",
                got=f"{given[0]} {setting[given[0]]} alone",
                remedy="give both, or neither for many sizes",
            )

    def measure_config(self) -> MeasureConfig:
        """The same as the configuration of `autoshard.measure`."""
        world_sizes = WORLD_SIZES if self.world_size is None else (self.world_size,)
        num_samples = (
            NUM_SAMPLES if self.batch_size is None else (self.batch_size * world_sizes[0],)
        )
        return MeasureConfig(
            seed=self.seed,
            num_sets=self.num_sets,
            num_passes=1,
            num_repeated_sets=self.num_sets,
            kernels=KernelConfig(
                device=self.device, optimizer=self.optimizer, timing=_KERNEL_TIMING
            ),
            sampling=SamplingConfig(
                num_samples=num_samples,
                world_sizes=world_sizes,
                split_shares=_ALL_TRAIN,
                augmented_share=0.0,  # the tables to come are like these, not like variations
                max_iteration_ms=80.0,
            ),
            collectives=CollectiveConfig(
                device=self.device,
                world_sizes=tuple(size for size in world_sizes if size > 1),
                num_collectives=self.num_collectives,
            ),
        )


def measure_for_calibration(
    tables: Sequence[Table],
    measuring: QuickMeasuring,
    folder: str | Path,
    progress: Progress = lambda done, total, what: None,
) -> None:
    """Measure what is still missing in a folder.

    Args:
        tables: shard sets are drawn from them, half of them with other dims and pooling.
        measuring: how much, and what.
        folder: created if missing; continued if an earlier run was cut short.
        progress: told after each shard set, and then after each all-to-all.

    Raises:
        AutoshardError: see `autoshard.measure.runner`.
    """
    config = measuring.measure_config()
    measure_kernels(config, tables, folder, progress)
    if config.collectives.num_collectives and config.collectives.world_sizes:
        measure_collectives(config, folder, progress)
