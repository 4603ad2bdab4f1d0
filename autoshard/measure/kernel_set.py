"""The kernels that one rank runs for a set of shards, one after the other as in a step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from autoshard.errors import InputError, UnsupportedError, quoted
from autoshard.measure.arena import Arena
from autoshard.measure.measured_kernels import Bench, make_kernels
from autoshard.problem import Optimizer, TrainingConfig
from autoshard.runtime.capabilities import (
    Device,
    supported_data_types,
    supported_optimizers,
)
from autoshard.shards import ShardSlice

#: So small that weights stay where they are, whatever is measured on them.
LEARNING_RATE = 1e-4
EPS = 1e-8


class KernelSet:
    """All kernels of one rank, run one after the other as in a training step."""

    def __init__(
        self,
        slices: Sequence[ShardSlice],
        batch_size: int,
        *,
        world_size: int = 1,
        num_batches: int,
        optimizer: Optimizer,
        device: Device,
        device_index: int = 0,
        arena: Arena,
        seed: int,
    ) -> None:
        """Build kernels and draw batches.

        Args:
            slices: what the rank holds, at least one.
            batch_size: samples of one rank, >= 1. Shards see those of all ranks.
            world_size: ranks of the plan, >= 1.
            num_batches: different batches to draw.
            optimizer: fused into the backward.
            device: where the kernels run.
            device_index: which GPU, on CUDA.
            arena: lends memory until it is reset (on CUDA, kernels allocate their own).
            seed: of the batches.

        Raises:
            InputError: no slices, no samples, or the arena is too small.
            UnsupportedError: the device has no such optimizer or data type.
            DependencyError: FBGEMM is missing or does not load.
        """
        if not slices:
            raise InputError("an empty shard set has no kernel to measure")
        for name, value in (("batch_size", batch_size), ("world_size", world_size)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(
                    f"{name} is not usable", got=quoted(value), allowed="integers >= 1"
                )
        check_supported(slices, optimizer, device)
        bench = Bench(
            training=TrainingConfig(
                batch_size=batch_size, optimizer=optimizer, learning_rate=LEARNING_RATE, eps=EPS
            ),
            world_size=world_size,
            num_batches=num_batches,
            device=torch.device("cpu" if device is Device.CPU else f"cuda:{device_index}"),
            arena=arena,
            generator=np.random.default_rng(seed),
        )
        self.kernels = list(make_kernels(slices, bench))

    def forward(self, batch: int) -> list[tuple[object, Tensor]]:
        """What each kernel's backward takes, and its output, for batch number `batch`."""
        return [kernel.forward(batch) for kernel in self.kernels]

    def backward(self, forwards: Sequence[tuple[object, Tensor]]) -> None:
        """All kernels' backwards, in the runtime's order."""
        for kernel, (looked_up, _) in zip(self.kernels, forwards, strict=True):
            kernel.backward(looked_up)


def check_supported(slices: Sequence[ShardSlice], optimizer: Optimizer, device: Device) -> None:
    """Refuse what FBGEMM does not run on `device`.

    Raises:
        UnsupportedError: names the optimizer or the tables.
    """
    if optimizer not in supported_optimizers(device):
        raise UnsupportedError(
            f"kernels with this optimizer do not run on {device.value}",
            got=optimizer.value,
            allowed=", ".join(o.value for o in supported_optimizers(device)),
        )
    types = supported_data_types(device)
    if refused := sorted({s.table.name for s in slices if s.table.data_type not in types}):
        raise UnsupportedError(
            f"kernels with these tables' data type do not run on {device.value}",
            got=", ".join(refused[:8]),
            allowed=", ".join(data_type.value for data_type in types),
        )
