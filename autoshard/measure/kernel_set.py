"""The kernels that one rank runs for a set of shards, with batches to run them on.

Built as the runtime builds them: shards that share data type and padding share
one table-batched embedding kernel (TBE) of FBGEMM; columns are padded to the kernel's
alignment; a forward turns bag lengths into offsets and looks up; a backward scales the
gradient where columns are padded, and runs the fused optimizer. Unlike the runtime's,
the kernels borrow their memory from an `Arena`.

Shapes: F=features of one kernel, B=samples, C=padded columns of all features, L=ids.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from autoshard.errors import DependencyError, InputError, UnsupportedError, quoted
from autoshard.measure.arena import Arena
from autoshard.problem import Optimizer
from autoshard.runtime.capabilities import (
    Device,
    supported_data_types,
    supported_optimizers,
)
from autoshard.runtime.kernels import KernelKey, kernel_key
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


@dataclass(frozen=True)
class KernelInput:
    """One batch for one kernel, on its device."""

    values_L: Tensor
    lengths_FB: Tensor
    weights_L: Tensor | None


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
        self._gradient_scale = math.sqrt(key.padding[0] / key.padding[1])
        features = [index for index, s in enumerate(slices) for _ in s.table.feature_names]
        self._tbe = _build_tbe(key, slices, features, optimizer, device, arena)
        num_cols = sum(padded_cols(slices[index].num_cols) for index in features)
        gradient = torch.empty(num_samples, num_cols).uniform_(-GRADIENT_BOUND, GRADIENT_BOUND)
        self._gradient_BC = gradient.to(device)
        self._scaled_BC = (
            self._gradient_BC
            if self._gradient_scale == 1.0
            else torch.empty_like(self._gradient_BC)
        )
        self.inputs = [
            _draw_input(slices, len(features), num_samples, generator, device)
            for _ in range(num_batches)
        ]

    def forward(self, batch: int) -> Tensor:
        """Pool the rows of batch number `batch`: float32 [B, C], padding included."""
        given = self.inputs[batch]
        offsets = torch.zeros(
            given.lengths_FB.numel() + 1, dtype=torch.int64, device=given.lengths_FB.device
        )
        torch.cumsum(given.lengths_FB.flatten(), 0, out=offsets[1:])
        output: Tensor = self._tbe(given.values_L, offsets, given.weights_L)
        return output

    def backward(self, output_BC: Tensor) -> None:
        """Run the backward of a forward, with the fused optimizer."""
        if self._gradient_scale != 1.0:
            torch.mul(self._gradient_BC, self._gradient_scale, out=self._scaled_BC)
        torch.autograd.backward([output_BC], [self._scaled_BC])

    def weights(self, index: int) -> Tensor:
        """The weights of `slices[index]`, a view [rows, padded columns]."""
        weights: Tensor = self._tbe.split_embedding_weights()[index]
        return weights.detach()


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

    def forward(self, batch: int) -> list[Tensor]:
        """All kernels' outputs for batch number `batch`."""
        return [kernel.forward(batch) for kernel in self.kernels]

    def backward(self, outputs: Sequence[Tensor]) -> None:
        """All kernels' backwards, last first."""
        for kernel, output in zip(reversed(self.kernels), reversed(outputs), strict=True):
            kernel.backward(output)


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


def _build_tbe(
    key: KernelKey,
    slices: Sequence[ShardSlice],
    features: Sequence[int],
    optimizer: Optimizer,
    device: torch.device,
    arena: Arena,
) -> Any:
    fbgemm, embedding_ops, training_ops = _load_fbgemm()
    on_cpu = device.type == "cpu"
    location = (
        embedding_ops.EmbeddingLocation.HOST if on_cpu else (embedding_ops.EmbeddingLocation.DEVICE)
    )
    compute = training_ops.ComputeDevice.CPU if on_cpu else training_ops.ComputeDevice.CUDA
    shapes = [(s.num_rows, padded_cols(s.num_cols)) for s in slices]
    optimizers = {
        Optimizer.SGD: fbgemm.EmbOptimType.EXACT_SGD,
        Optimizer.ADAGRAD: fbgemm.EmbOptimType.EXACT_ADAGRAD,
        Optimizer.ROWWISE_ADAGRAD: fbgemm.EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        Optimizer.ADAM: fbgemm.EmbOptimType.ADAM,
    }
    buffers = None
    if on_cpu:
        # FBGEMM takes flat tensors of exactly the elements that all tables need together.
        buffers = {"weights": arena.weights(sum(r * c for r, c in shapes), _DTYPES[key.data_type])}
        if state := sum(optimizer_state_bytes(optimizer, r, c) // 4 for r, c in shapes):
            buffers["momentum1"] = arena.state(state)
    tbe = training_ops.SplitTableBatchedEmbeddingBagsCodegen(
        [(rows, cols, location, compute) for rows, cols in shapes],
        feature_table_map=list(features),
        optimizer=optimizers[optimizer],
        learning_rate=LEARNING_RATE,
        eps=EPS,
        weights_precision=fbgemm.SparseType(key.data_type.value),
        output_dtype=fbgemm.SparseType.FP32,
        stochastic_rounding=False,
        pooling_mode=embedding_ops.PoolingMode.SUM,
        # The runtime checks ids before they reach a kernel.
        bounds_check_mode=embedding_ops.BoundsCheckMode.NONE,
        device=device,
        preallocated_host_buffers=buffers,
    )
    if not on_cpu:
        for weights in tbe.split_embedding_weights():
            weights.detach().uniform_(-0.05, 0.05)
    return tbe


def _draw_input(
    slices: Sequence[ShardSlice],
    num_features: int,
    num_samples: int,
    generator: np.random.Generator,
    device: torch.device,
) -> KernelInput:
    batch = draw_kernel_batch(slices, num_samples, generator)
    lengths = torch.from_numpy(np.diff(batch.offsets))
    weights = None
    if batch.weights is not None:
        weights = torch.from_numpy(batch.weights).to(device)
    return KernelInput(
        values_L=torch.from_numpy(batch.values).to(device),
        lengths_FB=lengths.view(num_features, num_samples).to(device),
        weights_L=weights,
    )


def _load_fbgemm() -> tuple[Any, Any, Any]:
    """FBGEMM's configuration, common and training modules."""
    try:
        from fbgemm_gpu import (
            split_embedding_configs,
            split_table_batched_embeddings_ops_common,
            split_table_batched_embeddings_ops_training,
        )
    except (ImportError, OSError) as error:
        raise DependencyError(
            "measuring kernels needs FBGEMM, which is missing or does not load",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            allowed="fbgemm-gpu-cpu 1.8.0 or fbgemm-gpu 1.8.0 with torch 2.13",
            remedy="pip install 'autoshard[cpu]' (or 'autoshard[cuda]'), then autoshard doctor",
        ) from error
    return (
        split_embedding_configs,
        split_table_batched_embeddings_ops_common,
        split_table_batched_embeddings_ops_training,
    )
