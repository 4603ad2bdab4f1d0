"""The kernels that one rank runs for a set of shards, with batches to run them on.

They are the runtime's own kernels on memory borrowed from an `Arena`; what is timed is
what `autoshard.runtime` times: a forward turns bag lengths into offsets and looks up, a
backward runs the fused optimizer.

Shapes: F=features of one kernel, B=samples, C=padded columns of all features, L=ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from autoshard.errors import InputError, UnsupportedError, quoted
from autoshard.measure.arena import Arena
from autoshard.problem import Optimizer, TrainingConfig
from autoshard.runtime.bags import Bags
from autoshard.runtime.capabilities import (
    Device,
    supported_data_types,
    supported_optimizers,
)
from autoshard.runtime.kernels import EmbeddingKernel, KernelKey, kernel_key
from autoshard.shards import ShardSlice, optimizer_state_bytes, padded_cols
from autoshard.tables import DataType
from autoshard.workloads.batches import draw_kernel_batch

#: So small that weights stay where they are, whatever is measured on them.
LEARNING_RATE = 1e-4
EPS = 1e-8
GRADIENT_BOUND = 1e-3
_DTYPES = {
    DataType.FP32: torch.float32,
    DataType.FP16: torch.float16,
    DataType.BF16: torch.bfloat16,
}


def group_slices(
    slices: Sequence[ShardSlice], optimizer: Optimizer
) -> dict[KernelKey, list[ShardSlice]]:
    """Which slices share a kernel, in the order of their first member."""
    groups: dict[KernelKey, list[ShardSlice]] = {}
    for slice_ in slices:
        key = kernel_key(slice_.table, slice_.num_cols, optimizer)
        groups.setdefault(key, []).append(slice_)
    return groups


class Kernel:
    """One TBE with its batches and a gradient."""

    def __init__(
        self,
        key: KernelKey,
        slices: Sequence[ShardSlice],
        *,
        num_samples: int,
        num_batches: int,
        optimizer: Optimizer,
        device: torch.device,
        arena: Arena,
        generator: np.random.Generator,
    ) -> None:
        """Build the kernel and draw its batches; see `KernelSet`."""
        self.slices = tuple(slices)
        features = [index for index, s in enumerate(slices) for _ in s.table.feature_names]
        self.kernel = EmbeddingKernel(
            key,
            num_rows_T=[s.num_rows for s in slices],
            embedding_dim_T=[s.num_cols for s in slices],
            table_of_feature_F=features,
            training=TrainingConfig(
                batch_size=num_samples, optimizer=optimizer, learning_rate=LEARNING_RATE, eps=EPS
            ),
            device=device,
            host_buffers=_borrowed(key, slices, optimizer, arena) if device.type == "cpu" else None,
        )
        if device.type != "cpu":
            for index in range(len(slices)):
                self.kernel.weights(index).uniform_(-0.05, 0.05)
        gradient_BD = torch.empty(num_samples, self.kernel.num_cols, device=device)
        gradient_BD.uniform_(-GRADIENT_BOUND, GRADIENT_BOUND)
        self._gradient_BC = self.kernel.pad(gradient_BD)
        self.inputs = [
            _draw_input(slices, len(features), num_samples, generator, device)
            for _ in range(num_batches)
        ]

    def forward(self, batch: int) -> tuple[Bags, Tensor]:
        """Pool the rows of batch number `batch`: float32 [B, C], padding included."""
        bags = replace(self.inputs[batch])
        return bags, self.kernel.lookup(bags, training=True)

    def backward(self, bags: Bags) -> None:
        """Run the backward of a forward, with the fused optimizer."""
        self.kernel.update(bags, self._gradient_BC)


class KernelSet:
    """All kernels of one rank, run one after the other as in a training step."""

    def __init__(
        self,
        slices: Sequence[ShardSlice],
        num_samples: int,
        *,
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
            num_samples: samples that the kernels see, >= 1.
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
        if isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1:
            raise InputError(
                "num_samples is not usable", got=quoted(num_samples), allowed="integers >= 1"
            )
        check_supported(slices, optimizer, device)
        generator = np.random.default_rng(seed)
        torch_device = torch.device("cpu" if device is Device.CPU else f"cuda:{device_index}")
        self.kernels = [
            Kernel(
                key,
                group,
                num_samples=num_samples,
                num_batches=num_batches,
                optimizer=optimizer,
                device=torch_device,
                arena=arena,
                generator=generator,
            )
            for key, group in group_slices(slices, optimizer).items()
        ]

    def forward(self, batch: int) -> list[tuple[Bags, Tensor]]:
        """All kernels' bags and outputs for batch number `batch`."""
        return [kernel.forward(batch) for kernel in self.kernels]

    def backward(self, forwards: Sequence[tuple[Bags, Tensor]]) -> None:
        """All kernels' backwards, in the runtime's order."""
        for kernel, (bags, _) in zip(self.kernels, forwards, strict=True):
            kernel.backward(bags)


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


def _borrowed(
    key: KernelKey, slices: Sequence[ShardSlice], optimizer: Optimizer, arena: Arena
) -> dict[str, Tensor]:
    """The arena's memory for all tables of one kernel."""
    shapes = [(s.num_rows, padded_cols(s.num_cols)) for s in slices]
    buffers = {"weights": arena.weights(sum(r * c for r, c in shapes), _DTYPES[key.data_type])}
    if state := sum(optimizer_state_bytes(optimizer, r, c) // 4 for r, c in shapes):
        buffers["momentum1"] = arena.state(state)
    return buffers


def _draw_input(
    slices: Sequence[ShardSlice],
    num_features: int,
    num_samples: int,
    generator: np.random.Generator,
    device: torch.device,
) -> Bags:
    batch = draw_kernel_batch(slices, num_samples, generator)
    lengths = torch.from_numpy(np.diff(batch.offsets))
    weights = None
    if batch.weights is not None:
        weights = torch.from_numpy(batch.weights).to(device)
    return Bags(
        values_L=torch.from_numpy(batch.values).to(device),
        lengths_FB=lengths.view(num_features, num_samples).to(device),
        weights_L=weights,
    )
