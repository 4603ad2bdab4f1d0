"""FBGEMM's CPU operators, called without the autograd module around them.

The module spends time in Python at every forward, and its backward exists only after a
forward of the same bags, which replicas never need.

Shapes: B=bags per feature, C=padded columns of all features together.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autoshard.problem import Optimizer
from autoshard.runtime.bags import Bags


class CpuOperators:
    """Forward and fused backward of one TBE on the host."""

    def __init__(self, tbe: Any, optimizer: Optimizer, eps: float) -> None:
        """Take over the tensors of a TBE on the host."""
        stochastic_rounding = False
        operators = torch.ops.fbgemm
        self._forward = operators.split_embedding_codegen_forward_cpu
        self._forward_head = (
            tbe.weights_host,
            tbe.weights_offsets,
            tbe.D_offsets,
            tbe.total_D,
            tbe.hash_size_cumsum,
        )
        self._output_dtype = int(tbe.output_dtype)
        self._pooling = int(tbe.pooling_mode)
        self._backward = {
            Optimizer.SGD: operators.split_embedding_backward_codegen_sgd_cpu,
            Optimizer.ADAGRAD: operators.split_embedding_backward_codegen_adagrad_cpu,
            Optimizer.ROWWISE_ADAGRAD: (
                operators.split_embedding_backward_codegen_rowwise_adagrad_cpu
            ),
        }[optimizer]
        self._backward_head = (
            tbe.weights_host,
            tbe.weights_placements,
            tbe.weights_offsets,
            tbe.D_offsets,
            tbe.max_D,
            tbe.hash_size_cumsum,
            tbe.total_hash_size_bits,
        )
        state = (tbe.momentum1_host, tbe.momentum1_placements, tbe.momentum1_offsets)
        has_state = optimizer is not Optimizer.SGD
        self._backward_tail = (
            stochastic_rounding,
            *(state if has_state else ()),
            tbe.learning_rate_tensor,
            *((eps,) if has_state else ()),
        )

    def forward(self, bags: Bags) -> Tensor:
        """float32 [B, C]."""
        with torch.no_grad():
            output: Tensor = self._forward(
                *self._forward_head,
                bags.values_L,
                bags.offsets,
                self._pooling,
                bags.weights_L,  # None reaches the operator as an undefined tensor
                self._output_dtype,
            )
        return output

    def backward(self, bags: Bags, gradient_BC: Tensor) -> None:
        """Update weights and state in place."""
        with torch.no_grad():
            self._backward(
                gradient_BC,
                *self._backward_head,
                bags.values_L,
                bags.offsets,
                self._pooling,
                bags.weights_L,
                *self._backward_tail,
            )
