"""Times the kernels of a shard set: forward, and backward with the fused optimizer.

Part of the way from shard sets (`sampling`) to rows (`store`). One iteration is a
forward and a backward over one of several batches drawn beforehand. Every few milliseconds the
reference kernels take a turn, and then one iteration that does not count brings the caches
back. With `warm` caches the tables' hot rows, the batch and the buffers are as the iteration
before left them, which is what a training loop sees; with `cold` caches a buffer twice as large
as the last-level cache is swept before each forward and each backward, outside the timed part.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from autoshard.errors import InputError
from autoshard.measure.arena import Arena
from autoshard.measure.config import CacheState, KernelConfig, TimingConfig, real_device
from autoshard.measure.environment import last_level_cache_bytes
from autoshard.measure.kernel_set import KernelSet
from autoshard.measure.references import REFERENCE_KERNELS
from autoshard.measure.repetition import (
    NS_PER_MS,
    Repetitions,
    is_settled,
    is_used_up,
    reached_target,
)
from autoshard.runtime.capabilities import Device
from autoshard.shards import ShardSlice

_REFERENCE_SEED = 1
#: Before the references are first timed, while the process still warms up.
_REFERENCE_WARMUP = 20
#: Weights of the largest reference.
_REFERENCE_BYTES = 2**28


@dataclass(frozen=True, kw_only=True)
class KernelTiming:
    """What one shard set's kernels took."""

    fwd: Repetitions
    """Forward: time on the device (on the CPU the same as wall time)."""
    bwd: Repetitions
    """Backward and fused optimizer: time on the device."""
    fwd_wall_ms: float
    """Median wall time, launches included."""
    bwd_wall_ms: float
    iterations: int
    warmup_iterations: int
    reached_target: bool
    """Whether both medians are as certain as asked; else a limit ended the repetitions."""
    reference_ms: tuple[float, ...]
    """Medians of the reference kernels over the same time, as `REFERENCE_COLUMNS` has them."""
    num_kernels: int
    """TBEs that ran one after the other."""
    build_ms: float
    """Building the kernels and drawing the batches; not part of the timings."""


@dataclass(frozen=True)
class _Iteration:
    """One forward and backward, in milliseconds."""

    fwd_ms: float
    bwd_ms: float
    fwd_wall_ms: float
    bwd_wall_ms: float


class KernelMeter:
    """Times shard sets on one device, with memory kept between them."""

    def __init__(self, config: KernelConfig, *, device_index: int = 0) -> None:
        """Prepare memory and the reference kernel, on one thread.

        Raises:
            InputError: CUDA was asked for and is not there, or the device is simulated.
            DependencyError: FBGEMM is missing or does not load.
        """
        self._device = real_device(config.device)
        if self._device is Device.CUDA and not torch.cuda.is_available():
            raise InputError(
                "kernels cannot be measured on CUDA: torch sees no GPU",
                remedy="set kernels.device=cpu, or install the CUDA build",
            )
        torch.set_num_threads(1)
        self.config = config
        self._device_index = device_index
        self._arena = Arena(config.arena_bytes)
        self._sweep = _sweep_buffer(config, device_index)
        self._references = []
        for reference in REFERENCE_KERNELS.values():
            kernels = self._build(
                reference.slices, reference.num_samples, 1, _REFERENCE_SEED, Arena(_REFERENCE_BYTES)
            )
            self._references.append(kernels)
            for batch in range(_REFERENCE_WARMUP):
                self._run(kernels, batch % config.num_batches)

    def measure(
        self, slices: Sequence[ShardSlice], batch_size: int, *, world_size: int = 1, seed: int
    ) -> KernelTiming:
        """Time one shard set; see `measure_kernel`."""
        start_ns = time.perf_counter_ns()
        self._arena.reset()
        kernels = self._build(slices, batch_size, world_size, seed, self._arena)
        build_ms = (time.perf_counter_ns() - start_ns) / NS_PER_MS
        timed, references = self._repeat(kernels, self.config.timing)
        series = [[t.fwd_ms for t in timed], [t.bwd_ms for t in timed]]
        return KernelTiming(
            fwd=Repetitions.of(series[0]),
            bwd=Repetitions.of(series[1]),
            fwd_wall_ms=Repetitions.of([t.fwd_wall_ms for t in timed]).median_ms,
            bwd_wall_ms=Repetitions.of([t.bwd_wall_ms for t in timed]).median_ms,
            iterations=len(timed),
            warmup_iterations=self.config.timing.warmup_iterations,
            reached_target=reached_target(series, self.config.timing),
            reference_ms=tuple(
                Repetitions.of(times_ms).median_ms
                for turns in references
                for times_ms in ([t.fwd_ms for t in turns], [t.bwd_ms for t in turns])
            ),
            num_kernels=len(kernels.kernels),
            build_ms=build_ms,
        )

    def _build(
        self,
        slices: Sequence[ShardSlice],
        batch_size: int,
        world_size: int,
        seed: int,
        arena: Arena,
    ) -> KernelSet:
        return KernelSet(
            slices,
            batch_size,
            world_size=world_size,
            num_batches=self.config.num_batches,
            optimizer=self.config.optimizer,
            device=self._device,
            device_index=self._device_index,
            arena=arena,
            seed=seed,
        )

    def _repeat(
        self, kernels: KernelSet, timing: TimingConfig
    ) -> tuple[list[_Iteration], list[list[_Iteration]]]:
        """Iterations of the kernels, and of each reference, by turns."""
        num_batches = self.config.num_batches
        for index in range(timing.warmup_iterations):
            last = self._run(kernels, index % num_batches)
        interval_ms = self.config.reference_interval_ms
        turn = max(1, int(interval_ms / max(last.fwd_wall_ms + last.bwd_wall_ms, 1e-3)))
        timed: list[_Iteration] = []
        references: list[list[_Iteration]] = [[] for _ in self._references]
        elapsed_s = 0.0
        while not timed or not is_settled(
            [[t.fwd_ms for t in timed], [t.bwd_ms for t in timed]], elapsed_s, timing
        ):
            start_ns = time.perf_counter_ns()
            for reference, turns in zip(self._references, references, strict=True):
                self._run(reference, len(turns) % num_batches)
                turns.append(self._run(reference, len(turns) % num_batches))
            self._run(kernels, len(timed) % num_batches)
            before_s = elapsed_s
            for _ in range(turn):
                timed.append(self._run(kernels, len(timed) % num_batches))
                elapsed_s = before_s + (time.perf_counter_ns() - start_ns) / 1e9
                if is_used_up(len(timed), elapsed_s, timing):
                    break
        return timed, references

    def _run(self, kernels: KernelSet, batch: int) -> _Iteration:
        if self._device is Device.CPU:
            return self._run_cpu(kernels, batch)
        return self._run_cuda(kernels, batch)

    def _flush_caches(self) -> None:
        if self._sweep is not None:
            self._sweep.add_(1.0)

    def _run_cpu(self, kernels: KernelSet, batch: int) -> _Iteration:
        clock = time.perf_counter_ns
        self._flush_caches()
        start = clock()
        outputs = kernels.forward(batch)
        fwd_ms = (clock() - start) / NS_PER_MS
        self._flush_caches()
        start = clock()
        kernels.backward(outputs)
        bwd_ms = (clock() - start) / NS_PER_MS
        return _Iteration(fwd_ms, bwd_ms, fwd_ms, bwd_ms)

    def _run_cuda(self, kernels: KernelSet, batch: int) -> _Iteration:
        clock = time.perf_counter_ns
        device = torch.device(f"cuda:{self._device_index}")
        events = [torch.cuda.Event(enable_timing=True) for _ in range(4)]
        with torch.cuda.device(device):
            self._flush_caches()
            torch.cuda.synchronize(device)
            start = clock()
            events[0].record()
            outputs = kernels.forward(batch)
            events[1].record()
            torch.cuda.synchronize(device)
            fwd_wall_ms = (clock() - start) / NS_PER_MS
            self._flush_caches()
            torch.cuda.synchronize(device)
            start = clock()
            events[2].record()
            kernels.backward(outputs)
            events[3].record()
            torch.cuda.synchronize(device)
            bwd_wall_ms = (clock() - start) / NS_PER_MS
        return _Iteration(
            events[0].elapsed_time(events[1]),
            events[2].elapsed_time(events[3]),
            fwd_wall_ms,
            bwd_wall_ms,
        )


def measure_kernel(
    slices: Sequence[ShardSlice],
    batch_size: int,
    config: KernelConfig | None = None,
    *,
    world_size: int = 1,
    seed: int = 0,
) -> KernelTiming:
    """Time the kernels of one shard set in this process.

    Args:
        slices: what the rank holds, at least one.
        batch_size: samples of one rank in one step, >= 1.
        config: device, optimizer, caches and repetitions; the defaults if None.
        world_size: ranks of the plan, >= 1: shards see the samples of all of them, and
            replicas update what all of them looked up.
        seed: of the batches.

    Raises:
        InputError: no slices, no samples, no such device, or the arena is too small.
        UnsupportedError: the device has no such optimizer or data type.
        DependencyError: FBGEMM is missing or does not load.
    """
    return KernelMeter(config or KernelConfig()).measure(
        slices, batch_size, world_size=world_size, seed=seed
    )


def _sweep_buffer(config: KernelConfig, device_index: int) -> torch.Tensor | None:
    if config.cache is CacheState.WARM:
        return None
    if config.device is Device.CPU:
        return torch.zeros(2 * last_level_cache_bytes() // 4)
    device = torch.device(f"cuda:{device_index}")
    cache_bytes = torch.cuda.get_device_properties(device).L2_cache_size
    return torch.zeros(2 * cache_bytes // 4, device=device)
