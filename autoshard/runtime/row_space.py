"""The kernel of replicas that are kept equal row by row, without any exchange.

Tables of equal dimension and kind share one kernel whose rows are laid end to end. All its
features address that one row space, so any list of rows can be spread over them. A rank
sums its gradients per row (`find_rows`, `row_gradients`), and applies the optimizer to the
sums of all ranks (`spread`, `update`).

Shapes: F=features of the kernel, B=samples, U=distinct rows of one rank, N=rows from all
ranks, D=true columns of one table, L=ids.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from autoshard.problem import TrainingConfig
from autoshard.runtime.bags import Bags
from autoshard.runtime.kernels import EmbeddingKernel, KernelKey
from autoshard.tables import Table


@dataclass(eq=False)
class RowLookup:
    """One rank's ids of one step."""

    bags: Bags
    unique_rows_U: Tensor | None = None
    """None where no gradients follow."""
    order_L: Tensor | None = None
    """Sorts the ids by row."""
    start_U: Tensor | None = None
    """Where each distinct row starts among the sorted ids."""

    @property
    def rows_U(self) -> Tensor:
        """The distinct rows; only after `find_rows`."""
        assert self.unique_rows_U is not None
        return self.unique_rows_U

    def find_rows(self) -> None:
        """Sort the ids and find where each distinct row starts."""
        sorted_L, self.order_L = torch.sort(self.bags.values_L, stable=True)
        self.unique_rows_U, counts_U = torch.unique_consecutive(sorted_L, return_counts=True)
        self.start_U = counts_U.cumsum(0) - counts_U

    def row_gradients(self, gradient_FBD: Tensor) -> Tensor:
        """Sum the gradients of each distinct row, float32 [U, D].

        The lookup turned round: a row pools the output gradients of the bags that it occurs
        in, with the weights that it had there.
        """
        assert self.order_L is not None
        assert self.start_U is not None
        bags = self.bags
        gradient = gradient_FBD.reshape(-1, gradient_FBD.shape[-1])
        if not bags.values_L.numel():
            return gradient.new_zeros(0, gradient.shape[1])
        bag_L = torch.repeat_interleave(
            bags.lengths_FB.flatten(), output_size=bags.values_L.numel()
        )
        weights = None if bags.weights_L is None else bags.weights_L[self.order_L]
        return torch.nn.functional.embedding_bag(
            bag_L[self.order_L], gradient, self.start_U, mode="sum", per_sample_weights=weights
        )


class RowSpace:
    """See the module's first lines."""

    def __init__(
        self,
        key: KernelKey,
        tables: Sequence[Table],
        *,
        training: TrainingConfig,
        device: torch.device,
        host_buffers: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Allocate the kernel.

        Args:
            key: what the tables have in common.
            tables: at least one, all of one dimension.
            training: optimizer, learning rate and eps.
            device: of the tables.
            host_buffers: see `EmbeddingKernel`.
        """
        self.tables = tuple(tables)
        self.embedding_dim = tables[0].embedding_dim
        first_row = [0, *accumulate(table.num_embeddings for table in tables)]
        self._rows = [slice(first, last) for first, last in pairwise(first_row)]
        self._base_F = [
            rows.start
            for rows, table in zip(self._rows, tables, strict=True)
            for _ in table.feature_names
        ]
        self.kernel = EmbeddingKernel(
            key,
            num_rows_T=[first_row[-1]],
            embedding_dim_T=[self.embedding_dim],
            table_of_feature_F=[0] * len(self._base_F),
            training=training,
            device=device,
            host_buffers=host_buffers,
        )

    @property
    def num_features(self) -> int:
        """F, table by table."""
        return len(self._base_F)

    def prepare(
        self, values_F: Sequence[Tensor], lengths_FB: Tensor, weights_F: Sequence[Tensor] | None
    ) -> RowLookup:
        """Map each feature's ids to the kernel's rows.

        Args:
            values_F: per feature, ids of its table, int64.
            lengths_FB: ids per bag, int64.
            weights_F: per feature, float32; read only by a weighted kernel.
        """
        rows_L = torch.cat([v + base for v, base in zip(values_F, self._base_F, strict=True)])
        weights_L = None
        if self.kernel.key.weighted:
            assert weights_F is not None  # checked when the ids were gathered
            weights_L = torch.cat(list(weights_F))
        return RowLookup(Bags(rows_L, lengths_FB, weights_L))

    def spread(self, rows_N: Tensor, sums: Sequence[Tensor]) -> tuple[Bags, Tensor]:
        """What `kernel.update` takes to apply the optimizer once to each of the given rows.

        Each row becomes a bag of one id whose output gradient is the row's sum. The bags
        are dealt out to the kernel's features in turn, which all address the same rows,
        so that the sums, one after the other, already are the output gradient.

        Args:
            rows_N: int64, N >= 1; a row that several ranks touched occurs several times.
            sums: float32, flat pieces that together hold [N, D].
        """
        num_rows, num_features = rows_N.numel(), self.num_features
        bags = -(-num_rows // num_features)
        missing = bags * num_features - num_rows
        filler = sums[0].new_zeros(missing * self.embedding_dim)
        gradient = torch.cat([*sums, filler]).view(bags, num_features * self.embedding_dim)
        lengths_FB = torch.ones(num_features, bags, dtype=torch.int64, device=rows_N.device)
        lengths_FB[num_features - missing :, -1] = 0
        values = torch.cat([rows_N[feature::num_features] for feature in range(num_features)])
        return Bags(values, lengths_FB), self.kernel.pad(gradient)

    def weights(self, table: int) -> Tensor:
        """Weights of table number `table`, a view [rows, columns] without padding."""
        return self.kernel.weights(0)[self._rows[table]]

    def optimizer_states(self, table: int) -> dict[str, Tensor]:
        """Views of a table's states by name: [rows], or [rows, columns] without padding."""
        rows = self._rows[table]
        return {name: state[rows] for name, state in self.kernel.optimizer_states(0).items()}
