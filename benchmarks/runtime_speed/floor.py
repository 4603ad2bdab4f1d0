"""The floor: the bare kernels and collectives of a step, and nothing else.

What any runtime has to do on the same ids: exchange ids and lengths, pool them, exchange
the outputs, exchange their gradients, and run the fused backward. Everything else was
done before the clock starts: ids are cut and brought into the kernel's order, sizes are
known, gradients lie ready to be sent, and receive buffers exist. Written without
autoshard's runtime; only the initial values come from it, so that numbers compare.

Three contenders: `sliced` for tables whose shards lie on one rank each, and two ways of
keeping replicas equal, `rows` (exchange the touched rows and their summed gradients) and
`bags` (exchange the ids and the gradients of the bags). The faster of the two is the floor.

Shapes: B=samples of this rank, G=samples of all ranks, R=ranks, F=features of the kernel,
L=ids, C=columns of this rank's kernel, U=touched rows, D=columns of a row.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
    BoundsCheckMode,
    EmbeddingLocation,
    PoolingMode,
)
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

from autoshard.errors import InputError
from autoshard.problem import Optimizer
from autoshard.runtime.initialization import initialize_rows
from autoshard.shards import Shard
from autoshard.tables import Table
from benchmarks.runtime_speed.cases import CaseData, RawBatch, read_case

_FP32 = 0  # fbgemm_gpu's SparseType.FP32 as an operator argument


def make(variant: str, folder: Path, rank: int) -> Any:
    """The contender `sliced`, `rows` or `bags`."""
    case = read_case(folder, rank)
    optimizer = case.plan.training.optimizer
    if optimizer is not Optimizer.ROWWISE_ADAGRAD:
        raise InputError("the floor has no kernel for this optimizer", got=optimizer.value)
    kinds = {"sliced": SlicedFloor, "rows": RowFloor, "bags": BagFloor}
    if variant not in kinds:
        raise InputError("contender is not known", got=f"floor/{variant}")
    return kinds[variant](case, rank)


@dataclass(frozen=True, eq=False)
class KernelInput:
    """Ids in the kernel's order: feature-major."""

    values_L: Tensor
    offsets: Tensor
    """int64 [F·samples + 1]."""


def kernel_input(values: list[Tensor], lengths: list[Tensor]) -> KernelInput:
    """Join the features' ids and lengths."""
    flat = torch.cat(lengths)
    offsets = torch.zeros(flat.numel() + 1, dtype=torch.int64)
    torch.cumsum(flat, 0, out=offsets[1:])
    return KernelInput(torch.cat(values), offsets)


class BareKernel:
    """FBGEMM's two CPU operators on one set of rows."""

    def __init__(self, rows_cols: list[tuple[int, int]], feature_table: list[int], case: CaseData):
        """Allocate tables of the given (rows, columns)."""
        training = case.plan.training
        self._tbe = tbe = SplitTableBatchedEmbeddingBagsCodegen(
            [(r, c, EmbeddingLocation.HOST, ComputeDevice.CPU) for r, c in rows_cols],
            feature_table_map=feature_table,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=training.learning_rate,
            eps=training.eps,
            stochastic_rounding=False,
            pooling_mode=PoolingMode.SUM,
            bounds_check_mode=BoundsCheckMode.NONE,
            device=torch.device("cpu"),
        )
        self._eps = training.eps
        self.dims = [rows_cols[table][1] for table in feature_table]
        self.weights: list[Tensor] = [w.detach() for w in tbe.split_embedding_weights()]

    def forward(self, ids: KernelInput) -> Tensor:
        """Pool: float32 [samples, columns]."""
        tbe = self._tbe
        output: Tensor = torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
            tbe.weights_host,
            tbe.weights_offsets,
            tbe.D_offsets,
            tbe.total_D,
            tbe.hash_size_cumsum,
            ids.values_L,
            ids.offsets,
            int(PoolingMode.SUM),
            None,
            _FP32,
        )
        return output

    def backward(self, ids: KernelInput, gradient: Tensor, *, one_feature: bool = False) -> None:
        """Update, from the gradient of what `forward` returns.

        Args:
            ids: the kernel's features, or those of the first one only.
            gradient: float32 [samples, columns].
            one_feature: whether `ids` are those of the first feature only.
        """
        tbe = self._tbe
        features = slice(0, 1) if one_feature else slice(None)
        d_offsets = tbe.D_offsets[:2] if one_feature else tbe.D_offsets
        torch.ops.fbgemm.split_embedding_backward_codegen_rowwise_adagrad_cpu(
            gradient,
            tbe.weights_host,
            tbe.weights_placements[features],
            tbe.weights_offsets[features],
            d_offsets,
            tbe.max_D,
            tbe.hash_size_cumsum if not one_feature else tbe.hash_size_cumsum[[0, -1]],
            tbe.total_hash_size_bits,
            ids.values_L,
            ids.offsets,
            int(PoolingMode.SUM),
            None,
            False,
            tbe.momentum1_host,
            tbe.momentum1_placements[features],
            tbe.momentum1_offsets[features],
            tbe.learning_rate_tensor,
            self._eps,
        )


def exchange(received: Tensor, sent: Tensor, received_sizes: list[int], sizes: list[int]) -> None:
    """The bare collective."""
    dist.all_to_all_single(received, sent, received_sizes, sizes)


def feature_parts(batch: RawBatch) -> list[tuple[Tensor, Tensor]]:
    """(ids, lengths) of each feature."""
    counts = batch.lengths_FB.sum(1).tolist()
    return list(zip(batch.values_L.split(counts), batch.lengths_FB, strict=True))


def rows_of(values_L: Tensor, lengths_B: Tensor, shard: Shard) -> tuple[Tensor, Tensor]:
    """The part of a feature's ids that falls into a shard's rows, relative to it."""
    inside = (values_L >= shard.row_offset) & (values_L < shard.row_offset + shard.num_rows)
    bag = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
    lengths = torch.bincount(bag[inside], minlength=len(lengths_B))
    return values_L[inside] - shard.row_offset, lengths


class SlicedFloor:
    """Shards that lie on one rank each."""

    def __init__(self, case: CaseData, rank: int) -> None:
        """Allocate this rank's shards and arrange all ids."""
        self._case = case
        self._batch_size = batch_size = case.plan.training.batch_size
        self._world_size = world_size = case.plan.topology.world_size
        held: list[list[tuple[int, Shard]]] = [[] for _ in range(world_size)]
        for index, entry in enumerate(case.plan.tables):
            for shard in entry.shards:
                if shard.num_rows and shard.num_cols:
                    held[shard.rank].append((index, shard))
        self._held = held
        own = held[rank]
        tables: list[Table] = [entry.table for entry in case.plan.tables]
        self._kernel = BareKernel(
            [(s.num_rows, s.num_cols) for _, s in own], list(range(len(own))), case
        )
        for weights, (index, shard) in zip(self._kernel.weights, own, strict=True):
            initialize_rows(
                weights,
                tables[index],
                seed=case.seed,
                row_offset=shard.row_offset,
                col_offset=shard.col_offset,
            )
        self._cols_R = [sum(s.num_cols for _, s in shards) for shards in held]
        self._own_cols = own_cols = self._cols_R[rank]
        self._steps = [_arrange(case, held, rank, number) for number in range(len(case.batches))]
        self._pooled_sizes = [batch_size * cols for cols in self._cols_R]
        self._own_sizes = [batch_size * own_cols] * world_size
        self._pooled = torch.empty(sum(self._pooled_sizes))
        self._additions = self._partial_sums()
        gradients = case.gradient_BC.split(case.dims, dim=1)
        parts = [
            torch.cat([gradients[i][:, _columns(s)] for i, s in shards], dim=1).flatten()
            for shards in held
            if shards
        ]
        self._gradients_sent = torch.cat(parts) / world_size
        self._gradient_GC = torch.empty(batch_size * world_size, own_cols)

    def step(self, index: int) -> None:
        """See `Contender`."""
        ids, sent, sizes, received, received_sizes = self._steps[index % len(self._steps)]
        exchange(received, sent, received_sizes, sizes)
        output = self._kernel.forward(ids)
        exchange(self._pooled, output.view(-1), self._pooled_sizes, self._own_sizes)
        for target, source in self._additions:
            target.add_(source)
        gradients = self._gradient_GC.view(-1)
        exchange(gradients, self._gradients_sent, self._own_sizes, self._pooled_sizes)
        self._kernel.backward(ids, self._gradient_GC)

    def outputs(self) -> Tensor:
        """See `Contender`."""
        tables = self._case.plan.tables
        columns: list[dict[int, Tensor]] = [{} for _ in tables]
        for shards, views in zip(self._held, self._views(), strict=True):
            for (index, shard), view in zip(shards, views, strict=True):
                columns[index].setdefault(shard.col_offset, view)  # the sum lies in the first
        return torch.cat([own[start] for own in columns for start in sorted(own)], dim=1)

    def _views(self) -> list[list[Tensor]]:
        """Per rank and shard, where its outputs of this rank's samples arrive."""
        parts = self._pooled.split(self._pooled_sizes)
        return [
            list(part.view(self._batch_size, -1).split([s.num_cols for _, s in shards], dim=1))
            if shards
            else []
            for part, shards in zip(parts, self._held, strict=True)
        ]

    def _partial_sums(self) -> list[tuple[Tensor, Tensor]]:
        """What is added to what where slices of rows meet."""
        first: dict[tuple[int, int], Tensor] = {}
        additions = []
        for shards, views in zip(self._held, self._views(), strict=True):
            for (index, shard), view in zip(shards, views, strict=True):
                target = first.setdefault((index, shard.col_offset), view)
                if target is not view:
                    additions.append((target, view))
        layouts = [[(i, s.col_offset, s.num_cols) for i, s in shards] for shards in self._held]
        if additions and all(layout == layouts[0] for layout in layouts):
            whole = self._pooled.split(self._pooled_sizes)
            return [(whole[0], other) for other in whole[1:]]
        return additions


def _columns(shard: Shard) -> slice:
    return slice(shard.col_offset, shard.col_offset + shard.num_cols)


def _arrange(
    case: CaseData, held: list[list[tuple[int, Shard]]], rank: int, number: int
) -> tuple[KernelInput, Tensor, list[int], Tensor, list[int]]:
    """One batch: kernel input, what is sent and how much to whom, and what arrives."""
    values: list[Tensor] = []
    lengths: list[Tensor] = []
    batches = [feature_parts(batches[number]) for batches in case.other_batches]
    for index, shard in held[rank]:
        cut = [rows_of(*parts[index], shard) for parts in batches]
        values.append(torch.cat([ids for ids, _ in cut]))
        lengths.append(torch.cat([bags for _, bags in cut]))
    sent = [_message(batches[rank], shards) for shards in held]
    received_sizes = [_message(parts, held[rank]).numel() for parts in batches]
    return (
        kernel_input(values, lengths),
        torch.cat(sent),
        [part.numel() for part in sent],
        torch.empty(sum(received_sizes), dtype=torch.int64),
        received_sizes,
    )


def _message(parts: list[tuple[Tensor, Tensor]], shards: list[tuple[int, Shard]]) -> Tensor:
    """Lengths and ids of the streams that one rank's shards need, each stream once."""
    streams = {(index, s.row_offset, s.num_rows): (index, s) for index, s in shards}
    cut = [rows_of(*parts[index], shard) for index, shard in streams.values()]
    pieces = [lengths for _, lengths in cut] + [ids for ids, _ in cut]
    return torch.cat(pieces) if pieces else torch.empty(0, dtype=torch.int64)


class _Replicas:
    """What both floors of `data_parallel` share: the whole tables, and the local lookup."""

    def __init__(self, case: CaseData, rank: int) -> None:
        self.case = case
        self.rank = rank
        self.world_size = case.plan.topology.world_size
        self.others = [r for r in range(self.world_size) if r != rank]
        self.tables = [entry.table for entry in case.plan.tables]
        self._output: Tensor | None = None

    def to_others(self, part: Tensor) -> tuple[Tensor, list[int]]:
        """`part` for every other rank, and nothing for this one."""
        sizes = [0 if rank == self.rank else part.numel() for rank in range(self.world_size)]
        return part.repeat(len(self.others)), sizes

    def outputs(self) -> Tensor:
        """See `Contender`."""
        assert self._output is not None
        return self._output


class BagFloor(_Replicas):
    """Ids and gradients of the bags go to every rank, which updates with all of them."""

    def __init__(self, case: CaseData, rank: int) -> None:
        """Allocate the replicas and arrange all ids."""
        super().__init__(case, rank)
        self._kernel = BareKernel(
            [(t.num_embeddings, t.embedding_dim) for t in self.tables],
            list(range(len(self.tables))),
            case,
        )
        for weights, table in zip(self._kernel.weights, self.tables, strict=True):
            initialize_rows(weights, table, seed=case.seed)
        self._steps = []
        for number in range(len(case.batches)):
            parts = [feature_parts(batches[number]) for batches in case.other_batches]
            own = kernel_input([v for v, _ in parts[rank]], [b for _, b in parts[rank]])
            everyone = kernel_input(
                [torch.cat([p[i][0] for p in parts]) for i in range(len(self.tables))],
                [torch.cat([p[i][1] for p in parts]) for i in range(len(self.tables))],
            )
            batch = case.batches[number]
            message = torch.cat([batch.lengths_FB.flatten(), batch.values_L])
            sent, sizes = self.to_others(message)
            received = [
                0 if r == rank else b[number].lengths_FB.numel() + b[number].values_L.numel()
                for r, b in enumerate(case.other_batches)
            ]
            self._steps.append((
                own, everyone, sent, sizes,
                torch.empty(sum(received), dtype=torch.int64), received,
            ))  # fmt: skip
        gradient = (case.gradient_BC / self.world_size).flatten()
        self._sent, self._sizes = self.to_others(gradient)
        self._gradient_GC = torch.cat(case.gradients_RBC) / self.world_size
        # The own part is in place; those of the others arrive in one piece or in several.
        self._received = torch.empty(gradient.numel() * len(self.others))
        chunks = self._gradient_GC.view(self.world_size, -1)
        self._places = [chunks[r] for r in self.others]
        self._contiguous = len(self.others) == 1

    def step(self, index: int) -> None:
        """See `Contender`."""
        own, everyone, sent, sizes, received, received_sizes = self._steps[index % len(self._steps)]
        exchange(received, sent, received_sizes, sizes)
        self._output = self._kernel.forward(own)
        target = self._places[0] if self._contiguous else self._received
        exchange(target, self._sent, self._sizes, self._sizes)
        if not self._contiguous:
            parts = self._received.chunk(len(self._places))
            for place, part in zip(self._places, parts, strict=True):
                place.copy_(part)
        self._kernel.backward(everyone, self._gradient_GC)


class RowFloor(_Replicas):
    """Touched rows and their summed gradients go to every rank, which updates those rows."""

    def __init__(self, case: CaseData, rank: int) -> None:
        """Allocate the replicas, laid end to end, and sum the gradients of every batch."""
        super().__init__(case, rank)
        dims = {table.embedding_dim for table in self.tables}
        if len(dims) > 1:
            raise InputError("this floor needs tables of one dimension", got=sorted(dims))
        self._dim = dims.pop()
        first = [0]
        for table in self.tables:
            first.append(first[-1] + table.num_embeddings)
        self._kernel = BareKernel([(first[-1], self._dim)], [0] * len(self.tables), case)
        for index, table in enumerate(self.tables):
            weights = self._kernel.weights[0][first[index] : first[index + 1]]
            initialize_rows(weights, table, seed=case.seed)
        self._steps = []
        for number in range(len(case.batches)):
            parts = feature_parts(case.batches[number])
            own = kernel_input(
                [v + base for (v, _), base in zip(parts, first, strict=False)],
                [bags for _, bags in parts],
            )
            sums = [
                _row_sums(feature_parts(batches[number]), gradient, first, self._dim)
                for batches, gradient in zip(case.other_batches, case.gradients_RBC, strict=True)
            ]
            rows_RU = [rows for rows, _ in sums]
            gradient = torch.cat([total for _, total in sums]) / self.world_size
            rows = torch.cat(rows_RU)
            update = KernelInput(rows, torch.arange(rows.numel() + 1))
            rows_sent, rows_sizes = self.to_others(rows_RU[rank])
            sums_sent, sums_sizes = self.to_others(sums[rank][1].flatten() / self.world_size)
            counts = [0 if r == rank else own_rows.numel() for r, own_rows in enumerate(rows_RU)]
            self._steps.append((
                own, update, gradient, rows_sent, rows_sizes, sums_sent, sums_sizes, counts,
                torch.empty(sum(counts), dtype=torch.int64), torch.empty(sum(counts) * self._dim),
            ))  # fmt: skip

    def step(self, index: int) -> None:
        """See `Contender`; what arrives is already in the update's input."""
        (
            own, update, gradient, rows_sent, rows_sizes, sums_sent, sums_sizes, counts,
            rows_received, sums_received,
        ) = self._steps[index % len(self._steps)]  # fmt: skip
        self._output = self._kernel.forward(own)
        exchange(rows_received, rows_sent, counts, rows_sizes)
        exchange(sums_received, sums_sent, [n * self._dim for n in counts], sums_sizes)
        self._kernel.backward(update, gradient, one_feature=True)


def _row_sums(
    parts: list[tuple[Tensor, Tensor]], gradient_BC: Tensor, first: list[int], dim: int
) -> tuple[Tensor, Tensor]:
    """Touched rows, int64 [U], and the sums of their bags' gradients, float32 [U, D]."""
    rows, sums = [], []
    for index, (values_L, lengths_B) in enumerate(parts):
        bag = torch.repeat_interleave(torch.arange(len(lengths_B)), lengths_B)
        unique, position = torch.unique(values_L, return_inverse=True)
        gradient_BD = gradient_BC[:, index * dim : (index + 1) * dim]
        total = torch.zeros(unique.numel(), dim).index_add_(0, position, gradient_BD[bag])
        rows.append(unique + first[index])
        sums.append(total)
    return torch.cat(rows), torch.cat(sums)
