"""FBGEMM's table-batched embedding kernels (TBE) with the fused optimizer.

One `EmbeddingKernel` holds shards that share data type and update. It always sums: means
are divided where the outputs arrive, so that they work for slices of rows too, and
because FBGEMM's CPU backward (seen in 1.8.0) leaves out the division for weighted means.
Columns are padded to the kernel's alignment without changing any update.

Shapes: T=tables, F=features of the kernel, B=bags per feature, C=padded columns of all
features together, L=ids.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autoshard.problem import Optimizer, TrainingConfig
from autoshard.runtime.bags import Bags
from autoshard.runtime.cpu_operators import CpuOperators
from autoshard.runtime.fbgemm import load_fbgemm
from autoshard.shards import padded_cols
from autoshard.tables import DataType, Table


@dataclass(frozen=True)
class KernelKey:
    """What tables of one kernel have in common."""

    weighted: bool
    data_type: DataType
    padding: tuple[int, int]
    """padded : true columns in lowest terms; (1, 1) where padding changes no update."""


def kernel_key(table: Table, num_cols: int, optimizer: Optimizer) -> KernelKey:
    """Which kernel `num_cols` columns of a table belong to."""
    padding = (1, 1)
    if optimizer is Optimizer.ROWWISE_ADAGRAD:
        padded = padded_cols(num_cols)
        divisor = math.gcd(padded, num_cols)
        padding = (padded // divisor, num_cols // divisor)
    return KernelKey(weighted=table.weighted, data_type=table.data_type, padding=padding)


class EmbeddingKernel:
    """One TBE: lookup of many tables at once, and their exact fused update.

    Duplicate ids are summed per row in fp32 before the optimizer is applied, once per row;
    weights round to their type, to the nearest. On CPU, FBGEMM (seen in 1.8.0) also rounds
    the step to fp16 before SGD and Adagrad subtract it from fp16 weights.

    Row-wise Adagrad keeps, per row, the sum over steps of the mean squared gradient.
    With D true columns padded to P, FBGEMM would divide by P. Gradients are therefore
    scaled by c = sqrt(P / D), which makes the state exactly Σg²/D, and the learning rate
    by 1 / c, which undoes the scaling in the update.
    """

    def __init__(
        self,
        key: KernelKey,
        *,
        num_rows_T: Sequence[int],
        embedding_dim_T: Sequence[int],
        table_of_feature_F: Sequence[int],
        training: TrainingConfig,
        device: torch.device,
        host_buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Allocate weights and optimizer state.

        Args:
            key: what the tables have in common.
            num_rows_T: of each table.
            embedding_dim_T: true columns of each table.
            table_of_feature_F: which table each feature looks up, ascending.
            training: optimizer, learning rate and eps.
            device: of the tables.
            host_buffers: on CPU, memory to use instead: flat `weights` and, unless the
                optimizer is SGD, float32 `momentum1`, with exactly the elements that all
                tables need together, padding included.

        Raises:
            DependencyError: FBGEMM is missing or does not load.
        """
        fbgemm = load_fbgemm()
        self.key = key
        self._optimizer = training.optimizer
        self.device = device
        self._true_T = list(embedding_dim_T)
        feature_dims = [embedding_dim_T[table] for table in table_of_feature_F]
        padded_dims = [padded_cols(dim) for dim in feature_dims]
        self.num_features = len(table_of_feature_F)
        self.num_cols = sum(feature_dims)
        """True columns of all features together."""
        self.num_padded_cols = sum(padded_dims)
        self._gradient_scale = math.sqrt(key.padding[0] / key.padding[1])
        self._true_cols = _true_columns(feature_dims, padded_dims, device)
        on_cpu = device.type == "cpu"
        location = fbgemm.EmbeddingLocation.HOST if on_cpu else fbgemm.EmbeddingLocation.DEVICE
        compute = fbgemm.ComputeDevice.CPU if on_cpu else fbgemm.ComputeDevice.CUDA
        self._tbe: Any = fbgemm.SplitTableBatchedEmbeddingBagsCodegen(
            [
                (rows, padded_cols(dim), location, compute)
                for rows, dim in zip(num_rows_T, embedding_dim_T, strict=True)
            ],
            feature_table_map=list(table_of_feature_F),
            optimizer=_OPTIMIZER_NAMES[training.optimizer](fbgemm.OptimType),
            learning_rate=training.learning_rate / self._gradient_scale,
            eps=training.eps,
            weights_precision=fbgemm.SparseType(key.data_type.value),
            output_dtype=fbgemm.SparseType.FP32,
            # Rounding up or down at random would make replicas and repeated runs differ.
            stochastic_rounding=False,
            pooling_mode=fbgemm.PoolingMode.SUM,
            # Ids were checked before they got here.
            bounds_check_mode=fbgemm.BoundsCheckMode.NONE,
            device=device,
            preallocated_host_buffers=None if host_buffers is None else dict(host_buffers),
        )
        self._cpu = CpuOperators(self._tbe, training.optimizer, training.eps) if on_cpu else None

    def lookup(self, bags: Bags, *, training: bool) -> Tensor:
        """Pool the rows of every bag.

        Args:
            bags: what to look up.
            training: whether `update` will follow.

        Returns:
            float32 [B, C], padding included, without a gradient of its own.
        """
        if not bags.lengths_FB.shape[1]:
            return torch.zeros(0, self.num_padded_cols, device=self.device)
        if self._cpu is not None:
            return self._cpu.forward(bags)
        with torch.set_grad_enabled(training):
            output: Tensor = self._tbe(bags.values_L, bags.offsets, bags.weights_L)
        bags.connected_BC = output if training else None
        return output.detach()

    def update(self, bags: Bags, gradient_BC: Tensor) -> None:
        """Run the backward and the fused optimizer.

        Args:
            bags: the gradient's; they need not have been looked up here.
            gradient_BC: of their output, as `pad` gave it.
        """
        if not bags.values_L.numel():
            return
        if self._cpu is not None:
            self._cpu.backward(bags, gradient_BC)
            return
        if bags.connected_BC is None:
            self.lookup(bags, training=True)
        connected, bags.connected_BC = bags.connected_BC, None
        assert connected is not None  # `lookup` has just set it
        torch.autograd.backward([connected], [gradient_BC])

    def unpad(self, output_BC: Tensor) -> Tensor:
        """The true columns of an output, [B, `num_cols`]."""
        return output_BC if self._true_cols is None else output_BC[:, self._true_cols]

    def pad(self, gradient_BD: Tensor) -> Tensor:
        """A gradient as `update` wants it: padded with zeros, scaled for the padding.

        A copy, except where there is nothing to do and the argument is contiguous.
        """
        if self._true_cols is None:
            return gradient_BD.contiguous()
        padded_BC = gradient_BD.new_zeros(gradient_BD.shape[0], self.num_padded_cols)
        padded_BC[:, self._true_cols] = gradient_BD
        return padded_BC if self._gradient_scale == 1.0 else padded_BC.mul_(self._gradient_scale)

    def weights(self, table: int) -> Tensor:
        """Weights of the kernel's table number `table`, a view [rows, columns] without padding."""
        weights: Tensor = self._tbe.split_embedding_weights()[table]
        return weights.detach()[:, : self._true_T[table]]

    def optimizer_states(self, table: int) -> dict[str, Tensor]:
        """Views of a table's states by name: [rows], or [rows, columns] without padding."""
        states = self._tbe.split_optimizer_states()
        named: dict[str, Tensor] = {}
        names = _STATE_NAMES[self._optimizer]
        for name, state in zip(names, states[table] if names else (), strict=True):
            state = state.detach()
            named[name] = state if state.dim() == 1 else state[:, : self._true_T[table]]
        return named

    def allocated_bytes(self) -> int:
        """Bytes of weights and optimizer state."""
        tensors = list(self._tbe.split_embedding_weights())
        if _STATE_NAMES[self._optimizer]:
            tensors += [state for states in self._tbe.split_optimizer_states() for state in states]
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors)

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use another learning rate from the next update on."""
        self._tbe.set_learning_rate(learning_rate / self._gradient_scale)


def _true_columns(
    true_dims: Sequence[int], padded_dims: Sequence[int], device: torch.device
) -> Tensor | None:
    """Positions of the true columns among the padded ones; None if nothing is padded."""
    if list(true_dims) == list(padded_dims):
        return None
    columns: list[int] = []
    start = 0
    for true, padded in zip(true_dims, padded_dims, strict=True):
        columns.extend(range(start, start + true))
        start += padded
    return torch.tensor(columns, dtype=torch.int64, device=device)


_OPTIMIZER_NAMES = {
    Optimizer.SGD: lambda types: types.EXACT_SGD,
    Optimizer.ADAGRAD: lambda types: types.EXACT_ADAGRAD,
    Optimizer.ROWWISE_ADAGRAD: lambda types: types.EXACT_ROWWISE_ADAGRAD,
    Optimizer.ADAM: lambda types: types.ADAM,
}
_STATE_NAMES: dict[Optimizer, tuple[str, ...]] = {
    Optimizer.SGD: (),
    Optimizer.ADAGRAD: ("sum",),
    Optimizer.ROWWISE_ADAGRAD: ("sum",),
    Optimizer.ADAM: ("exp_avg", "exp_avg_sq"),
}
