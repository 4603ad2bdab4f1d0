"""Runs measurements: draws what is missing, spreads it over processes, stores the rows.

The only file of `measure` that knows all the others. `experiments/measure.py` and tests
call it; a folder holds `kernels/` and `collectives/`, and calling again continues it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from autoshard.cost_models.simulated import SimulatedCostModel
from autoshard.errors import InputError
from autoshard.features import TRAFFIC_FEATURES
from autoshard.measure.collective_ranks import PROCEDURE, CollectiveTiming
from autoshard.measure.collectives import check_world_size, time_collectives
from autoshard.measure.config import (
    Collective,
    KernelConfig,
    MeasureConfig,
    MeasuredDevice,
    is_simulated,
    real_device,
    to_plain,
)
from autoshard.measure.environment import available_cores, pin_to_core
from autoshard.measure.kernel_set import check_supported
from autoshard.measure.machine_lock import machine_to_itself
from autoshard.measure.recording import Progress, now, recording, timing_columns
from autoshard.measure.references import reference_columns
from autoshard.measure.sampling import ShardSet, ShardSetSampler, Split
from autoshard.measure.schema import RowKind
from autoshard.measure.simulation import (
    BACKEND,
    CACHE,
    simulate_collectives,
    simulate_shard_set,
    simulated_environment,
    simulated_model,
)
from autoshard.measure.slices_json import slices_to_text
from autoshard.measure.store import PlannedRows
from autoshard.measure.traffic_sampling import Traffic, draw_traffic
from autoshard.measure.workers import run_tasks
from autoshard.runtime.capabilities import Device
from autoshard.shards import ShardSlice
from autoshard.tables import Table, tables_fingerprint

KERNELS_FOLDER = "kernels"
COLLECTIVES_FOLDER = "collectives"
_ORDER_STREAM, _BATCH_STREAM = 5, 6


@dataclass(frozen=True)
class KernelPlace:
    """One row of the schedule of kernels."""

    index: int
    """Number of the shard set."""
    repeat: int
    """Number of the measurement: 1 for the second one of the same set."""
    pass_: int
    """Number of the pass within the measurement."""


@dataclass(frozen=True)
class _KernelTask:
    place: KernelPlace
    order: int
    shard_set: ShardSet
    seed: int

    def __str__(self) -> str:
        drawn = self.shard_set
        return f"shard set {drawn.index}: {len(drawn.slices)} shard(s), {drawn.num_samples} samples"


def measure_kernels(
    config: MeasureConfig,
    tables: Sequence[Table],
    out_dir: str | Path,
    progress: Progress = lambda done, total, what: None,
) -> int:
    """Measure the shard sets that are still missing in `out_dir`/kernels.

    Args:
        config: what to measure and how; `config.workload` is not read here.
        tables: the pool that shard sets are drawn from.
        out_dir: created if missing; continued if an earlier run was cut short.
        progress: told after each row.

    Returns:
        Rows measured by this call.

    Raises:
        InputError: the pool, the budget or the number of workers is not usable, or the
            folder holds something else.
        MachineBusyError: another process measured on this machine for too long.
        UnsupportedError: the device has no such optimizer or data type.
        WorkerError: a worker failed, died or took too long. Finished rows are kept.
    """
    kernels = config.kernels
    model = simulated_model(config) if is_simulated(kernels.device) else None
    if model is None:
        whole = [ShardSlice.whole(table) for table in tables]
        check_supported(whole, kernels.optimizer, real_device(kernels.device))
    num_workers = resolve_workers(config)
    sampler = ShardSetSampler(tables, config.sampling, seed=config.seed)
    described = {
        "seed": config.seed,
        "kernels": to_plain(kernels) if model is None else {"optimizer": kernels.optimizer.value},
        "sampling": to_plain(config.sampling),
        "tables": tables_fingerprint(tables),
        "workers": num_workers,
    }
    cores = available_cores()
    schedule = kernel_schedule(config, sampler)
    stages = [
        [(order, place) for order, place in stage if config.takes(place.index)]
        for stage in schedule
    ]
    num_rows = sum(map(len, stages))
    with recording(
        config,
        Path(out_dir) / KERNELS_FOLDER,
        RowKind.KERNELS,
        described,
        kernels.device,
        _planned(config, num_rows, sum(map(len, schedule))),
        None if model is None else simulated_environment(model.spec),
    ) as recorder:

        def key(place: KernelPlace) -> str:
            return f"{recorder.protocol}-{place.index:06d}-{place.repeat}-{place.pass_}"

        missing = [
            [(order, place) for order, place in stage if key(place) not in recorder.store.finished]
            for stage in stages
        ]

        def answers() -> Generator[tuple[_KernelTask, dict[str, Any]], None, None]:
            # Processes of their own for every pass: where memory lies is a part of the noise.
            for stage in filter(None, missing):
                tasks = (
                    _KernelTask(
                        place, order, sampler.draw(place.index), _batch_seed(config.seed, place)
                    )
                    for order, place in stage
                )
                if model is not None:
                    yield from _simulated_answers(model, tasks)
                    continue
                yield from run_tasks(
                    partial(_make_kernel_handler, kernels, cores),
                    tasks,
                    num_workers=min(num_workers, len(stage)),
                    time_limit_s=config.item_time_limit_s,
                    on_idle=recorder.store.flush_if_due,
                )

        def row(task: _KernelTask, timing: dict[str, Any]) -> dict[str, Any]:
            drawn = task.shard_set
            return {
                "key": key(task.place),
                "index": drawn.index,
                "repeat": task.place.repeat,
                "pass": task.place.pass_,
                "order": task.order,
                "concurrent_workers": num_workers,
                "split": drawn.split.value,
                "augmented": drawn.augmented,
                "num_slices": len(drawn.slices),
                "num_samples": drawn.num_samples,
                "world_size": drawn.world_size,
                "optimizer": kernels.optimizer.value,
                "cache": (kernels.cache if model is None else CACHE).value,
                "slices": slices_to_text(drawn.slices),
                **timing,
            }

        with machine_to_itself(
            Path(out_dir), config.machine_wait_limit_s, needed=model is None and any(missing)
        ):
            return recorder.record(answers(), row, num_rows, sum(map(len, missing)), progress)


def measure_collectives(
    config: MeasureConfig,
    out_dir: str | Path,
    progress: Progress = lambda done, total, what: None,
) -> int:
    """Measure the collectives that are still missing in `out_dir`/collectives.

    Args:
        config: its `seed`, `collectives`, part and limits are read.
        out_dir: created if missing; continued if an earlier run was cut short.
        progress: told after each row.

    Returns:
        Rows measured by this call.

    Raises:
        InputError: more ranks than GPUs, or the folder holds something else.
        MachineBusyError: another process measured on this machine for too long.
        WorkerError: a rank failed, died or took too long. Finished rows are kept.
    """
    collectives = config.collectives
    model = simulated_model(config) if is_simulated(collectives.device) else None
    described = {
        "seed": config.seed,
        "device": collectives.device.value,
        "max_rank_bytes": collectives.max_rank_bytes,
    }
    num_cores = len(available_cores())
    if model is None:
        described["timing"] = to_plain(collectives.timing)
        described["procedure"] = PROCEDURE
        for world_size in collectives.world_sizes:
            check_world_size(world_size, real_device(collectives.device))
    schedule = collective_schedule(config)
    traffics = [traffic for traffic in schedule if config.takes(traffic.index)]
    with recording(
        config,
        Path(out_dir) / COLLECTIVES_FOLDER,
        RowKind.COLLECTIVES,
        described,
        collectives.device,
        _planned(config, len(traffics), len(schedule)),
        None if model is None else simulated_environment(model.spec),
    ) as recorder:

        def key(traffic: Traffic) -> str:
            # All-to-alls keep the names of the time when there was nothing else.
            kind = traffic.collective
            name = "" if kind is Collective.ALL_TO_ALL else f"{kind.value}-"
            return f"{recorder.protocol}-{name}{traffic.world_size:03d}-{traffic.index:06d}"

        order = {key(traffic): number for number, traffic in enumerate(schedule)}
        missing = [t for t in traffics if key(t) not in recorder.store.finished]

        def row(traffic: Traffic, timing: CollectiveTiming) -> dict[str, Any]:
            crowded = collectives.device is Device.CPU and traffic.world_size > num_cores
            return {
                "key": key(traffic),
                "index": traffic.index,
                "repeat": 0,
                "pass": 0,
                "order": order[key(traffic)],
                "measured_at": now(),
                "worker": 0,
                "pinned": model is None and not crowded,
                "concurrent_workers": traffic.world_size,
                "iterations": timing.iterations,
                "warmup_iterations": timing.warmup_iterations,
                "reached_target": timing.reached_target,
                "collective": traffic.collective.value,
                "backend": _backend(collectives.device),
                "direction": traffic.direction.value
                if traffic.collective is Collective.ALL_TO_ALL
                else None,
                "oversubscribed": crowded,
                **dict(zip(TRAFFIC_FEATURES, traffic.features().tolist(), strict=True)),
                "bytes_per_peer": list(traffic.bytes_per_peer),
                **timing_columns("transfer", timing.transfer),
                "wait_ms": timing.wait_ms,
            }

        timings = (
            time_collectives(missing, collectives)
            if model is None
            else simulate_collectives(model, missing)
        )
        with machine_to_itself(
            Path(out_dir), config.machine_wait_limit_s, needed=model is None and bool(missing)
        ):
            return recorder.record(timings, row, len(traffics), len(missing), progress)


def resolve_workers(config: MeasureConfig) -> int:
    """How many processes measure kernels at once; one, this one, where they are simulated.

    Raises:
        InputError: more than there are cores, which would time each other's pauses.
    """
    if is_simulated(config.kernels.device):
        return 1
    num_cores = len(available_cores())
    if config.workers > num_cores:
        raise InputError(
            "more measuring workers than cores", got=config.workers, allowed=f"1..{num_cores}"
        )
    if config.kernels.device is Device.CUDA:
        import torch

        return min(config.workers or num_cores, max(1, torch.cuda.device_count()))
    return config.workers or num_cores


def kernel_schedule(
    config: MeasureConfig, sampler: ShardSetSampler
) -> list[list[tuple[int, KernelPlace]]]:
    """What is measured, pass by pass, in the order of measurement, with its place in it.

    Every pass takes its sets in a new random order. Second measurements come after all first.
    """
    every = range(config.num_sets)
    test = [index for index in every if sampler.split_of(index) is Split.TEST]
    repeated = [*test, *sorted(set(every) - set(test))][: config.num_repeated_sets]
    stages: list[list[tuple[int, KernelPlace]]] = []
    order = 0
    for repeat, indices in enumerate((list(every), repeated)):
        for pass_ in range(config.num_passes):
            rng = np.random.default_rng([_ORDER_STREAM, config.seed, repeat, pass_])
            places = [KernelPlace(int(i), repeat, pass_) for i in rng.permutation(indices)]
            stages.append(list(enumerate(places, order)))
            order += len(places)
    return stages


def collective_schedule(config: MeasureConfig) -> list[Traffic]:
    """Collectives in the order of measurement: largest groups first, the kinds in turn within.

    In turn, so that what else the machine does at a time disturbs all kinds alike.
    """
    collectives = config.collectives
    return [
        draw_traffic(
            index, world_size, collectives.max_rank_bytes, seed=config.seed, collective=kind
        )
        for world_size in sorted(collectives.world_sizes, reverse=True)
        for index in range(collectives.num_collectives)
        for kind in collectives.kinds
    ]


def _planned(config: MeasureConfig, num_rows: int, num_rows_of_run: int) -> PlannedRows:
    return PlannedRows(
        part=config.part,
        num_parts=config.num_parts,
        num_rows=num_rows,
        num_rows_of_run=num_rows_of_run,
    )


def _batch_seed(seed: int, place: KernelPlace) -> int:
    stream = [_BATCH_STREAM, seed, place.index, place.repeat, place.pass_]
    return int(np.random.SeedSequence(stream).generate_state(1)[0])


def _backend(device: MeasuredDevice) -> str:
    """What carries the all-to-alls."""
    if is_simulated(device):
        return BACKEND
    return "gloo" if device is Device.CPU else "nccl"


def _simulated_answers(
    model: SimulatedCostModel, tasks: Iterable[_KernelTask]
) -> Generator[tuple[_KernelTask, dict[str, Any]], None, None]:
    for task in tasks:
        drawn = task.shard_set
        yield task, simulate_shard_set(model, drawn)


def _make_kernel_handler(
    config: KernelConfig, cores: Sequence[int], worker: int
) -> Callable[[_KernelTask], dict[str, Any]]:
    """Runs in the worker: one meter for its whole life."""
    from autoshard.measure.kernels import KernelMeter
    from autoshard.runtime.allocator import keep_freed_memory

    pinned = pin_to_core(cores[worker % len(cores)])
    keep_freed_memory()  # as the ranks of a training do
    meter = KernelMeter(config, device_index=worker if config.device is Device.CUDA else 0)

    def handle(task: _KernelTask) -> dict[str, Any]:
        timing = meter.measure(
            task.shard_set.slices,
            task.shard_set.batch_size,
            world_size=task.shard_set.world_size,
            seed=task.seed,
        )
        plain = {
            field.name: getattr(timing, field.name)
            for field in dataclasses.fields(timing)
            if field.name not in ("fwd", "bwd", "reference_ms")
        }
        return {
            **plain,
            **timing_columns("fwd", timing.fwd),
            **timing_columns("bwd", timing.bwd),
            **reference_columns(timing.reference_ms),
            "measured_at": now(),
            "worker": worker,
            "pinned": pinned,
        }

    return handle
