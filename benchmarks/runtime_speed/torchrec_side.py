"""TorchRec's `DistributedModelParallel` as a contender, executing our plan.

Runs in an environment of its own: `make torchrec-env`. Every shard lies where our plan
puts it and starts with the same values.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import Tensor, nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist
from torchrec.distributed.types import (
    EmbeddingModuleShardingPlan,
    ParameterSharding,
    ShardingEnv,
    ShardingPlan,
)
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor
from torchrec.streamable import Pipelineable

from autoshard.errors import InputError
from autoshard.plan import TablePlan
from autoshard.problem import Optimizer
from autoshard.runtime.initialization import initialize_rows
from autoshard.shards import ShardingType
from benchmarks.runtime_speed.cases import (
    SOURCE_WAIT_S,
    WAITING,
    CaseData,
    RawBatch,
    read_case,
    read_labels,
)
from benchmarks.runtime_speed.dense_layers import DenseLayers, make_optimizer, mean_loss


class Sharder(EmbeddingBagCollectionSharder):  # type: ignore[misc]
    """TorchRec offers no row-wise types on CPU, although they run; this one offers all."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """Every sharding type of our plans."""
        return [kind.value for kind in ShardingType]


def make(variant: str, folder: Path, rank: int) -> Any:
    """The contender `plain`, or `loop` and `pipelined` with dense layers; see `WAITING`."""
    case = read_case(folder, rank)
    optimizer = case.plan.training.optimizer
    if optimizer is not Optimizer.ROWWISE_ADAGRAD:
        raise InputError("this side is not set up for the optimizer", got=optimizer.value)
    if variant == "plain":
        return PlainStep(case)
    kind, waits = variant.removesuffix(WAITING), variant.endswith(WAITING)
    if kind in ("loop", "pipelined"):
        labels = read_labels(folder, rank)
        return LoopSteps(case, labels, pipelined=kind == "pipelined", waits=waits)
    raise InputError("contender is not known", got=f"torchrec/{variant}")


def collection_of(case: CaseData) -> EmbeddingBagCollection:
    """The unsharded collection, without memory of its own."""
    return EmbeddingBagCollection(
        tables=[
            EmbeddingBagConfig(
                name=entry.table.name,
                embedding_dim=entry.table.embedding_dim,
                num_embeddings=entry.table.num_embeddings,
                feature_names=list(entry.table.feature_names),
                pooling=PoolingType.SUM,
            )
            for entry in case.plan.tables
        ],
        device=torch.device("meta"),
    )


def parameter_sharding(entry: TablePlan) -> ParameterSharding:
    """One table of our plan, as TorchRec writes it."""
    if entry.sharding_type is ShardingType.DATA_PARALLEL:
        return ParameterSharding(
            sharding_type=entry.sharding_type.value,
            compute_kernel=EmbeddingComputeKernel.DENSE.value,
            ranks=[shard.rank for shard in entry.shards],
        )
    return ParameterSharding(
        sharding_type=entry.sharding_type.value,
        compute_kernel=EmbeddingComputeKernel.FUSED.value,
        ranks=[shard.rank for shard in entry.shards],
        sharding_spec=EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=[shard.row_offset, shard.col_offset],
                    shard_sizes=[shard.num_rows, shard.num_cols],
                    placement=f"rank:{shard.rank}/cpu",
                )
                for shard in entry.shards
            ]
        ),
    )


def shard(module: torch.nn.Module, path: str, case: CaseData) -> DistributedModelParallel:
    """`module`, whose collection of embedding bags lies at `path`, under our plan."""
    training = case.plan.training
    sharder = Sharder(
        fused_params={
            "optimizer": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "learning_rate": training.learning_rate,
            "eps": training.eps,
        }
    )
    plan = EmbeddingModuleShardingPlan(
        {entry.table.name: parameter_sharding(entry) for entry in case.plan.tables}
    )
    model = DistributedModelParallel(
        module,
        env=ShardingEnv.from_process_group(dist.group.WORLD),
        device=torch.device("cpu"),
        plan=ShardingPlan({path: plan}),
        sharders=[sharder],
    )
    _initialize(model, case)
    return model


def _initialize(model: DistributedModelParallel, case: CaseData) -> None:
    """Give every local shard the values that our runtime starts with."""
    tables = {entry.table.name: entry.table for entry in case.plan.tables}
    for name, value in model.state_dict().items():
        if "embedding_bags" not in name:
            continue
        table = tables[name.split(".")[-2]]
        with torch.no_grad():
            if isinstance(value, Tensor) and not hasattr(value, "local_shards"):
                initialize_rows(value, table, seed=case.seed)
                continue
            for local in value.local_shards():
                row, column = local.metadata.shard_offsets
                initialize_rows(
                    local.tensor, table, seed=case.seed, row_offset=row, col_offset=column
                )


def replica_optimizer(
    candidates: list[nn.Parameter], model: DistributedModelParallel, case: CaseData
) -> torch.optim.Optimizer | None:
    """Replicas have no fused optimizer in TorchRec; theirs is a dense one.

    Args:
        candidates: parameters of the sharded collection.
        model: what holds them.
        case: for the plan.
    """
    if all(entry.sharding_type is not ShardingType.DATA_PARALLEL for entry in case.plan.tables):
        return None
    fused = {id(p) for group in model.fused_optimizer.param_groups for p in group["params"]}
    training = case.plan.training
    return RowWiseAdagrad(
        [p for p in candidates if id(p) not in fused], lr=training.learning_rate, eps=training.eps
    )


def jagged(case: CaseData, raw: RawBatch) -> KeyedJaggedTensor:
    """A batch as TorchRec takes it."""
    return KeyedJaggedTensor(
        keys=list(case.feature_names), values=raw.values_L, lengths=raw.lengths_FB.flatten()
    )


class PlainStep:
    """Forward and backward of the sharded collection, from given gradients of the outputs."""

    def __init__(self, case: CaseData) -> None:
        self._case = case
        # DistributedModelParallel unwraps a bare collection under the empty path.
        self._model = shard(collection_of(case), "", case)
        self._optimizer = replica_optimizer(list(self._model.parameters()), self._model, case)
        self._gradient_BC: Tensor | None = None
        self._output: KeyedTensor | None = None

    def step(self, index: int) -> None:
        """See `Contender`."""
        raw = self._case.batches[index % len(self._case.batches)]
        self._output = self._model(jagged(self._case, raw))
        values_BC = self._output.values()
        if self._gradient_BC is None:
            self._gradient_BC = self._in_output_order()
        if self._optimizer is not None:
            self._optimizer.zero_grad()
        values_BC.backward(self._gradient_BC)
        if self._optimizer is not None:
            self._optimizer.step()

    def outputs(self) -> Tensor:
        """See `Contender`."""
        assert self._output is not None
        by_name = self._output.to_dict()
        return torch.cat([by_name[name] for name in self._case.feature_names], dim=1)

    def _in_output_order(self) -> Tensor:
        """The gradient with its columns in the order in which TorchRec returns outputs."""
        assert self._output is not None
        names = self._case.feature_names
        parts = dict(zip(names, self._case.gradient_BC.split(self._case.dims, dim=1), strict=True))
        return torch.cat([parts[name] for name in self._output.keys()], dim=1)  # noqa: SIM118


@dataclass(eq=False)
class Batch(Pipelineable):  # type: ignore[misc]
    """Ids and labels, as TorchRec's pipeline moves them about."""

    sparse: KeyedJaggedTensor
    labels_B: Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        """The same batch on `device`."""
        return Batch(
            self.sparse.to(device=device, non_blocking=non_blocking),
            self.labels_B.to(device=device, non_blocking=non_blocking),
        )

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses the tensors."""
        self.sparse.record_stream(stream)
        self.labels_B.record_stream(stream)

    def pin_memory(self) -> Batch:
        """The same batch in pinned memory."""
        return Batch(self.sparse.pin_memory(), self.labels_B.pin_memory())


class Head(nn.Module):
    """The common dense layers and their loss.

    A module of its own, because the pipeline traces symbolically what holds the sharded
    collection, and only calls the modules beside it.
    """

    def __init__(self, case: CaseData) -> None:
        super().__init__()
        self._names = list(case.feature_names)
        self.layers = DenseLayers(sum(case.dims))

    def forward(self, pooled: KeyedTensor, labels_B: Tensor) -> tuple[Tensor, Tensor]:
        """Mean loss of the local batch, a scalar, and the logits, float32 [B]."""
        if pooled.keys() == self._names:
            pooled_BC = pooled.values()
        else:
            by_name = pooled.to_dict()
            pooled_BC = torch.cat([by_name[name] for name in self._names], dim=1)
        logits_B = self.layers(pooled_BC)
        return mean_loss(logits_B, labels_B), logits_B


class Model(nn.Module):
    """The collection and the dense layers; the pipeline wants (loss, output) of it."""

    def __init__(self, case: CaseData) -> None:
        super().__init__()
        self.embeddings = collection_of(case)
        self.head = Head(case)

    def forward(self, batch: Batch) -> tuple[Tensor, Tensor]:
        """The loss, and the loss without gradient."""
        loss, _ = self.head(self.embeddings(batch.sparse), batch.labels_B)
        return loss, loss.detach()


class Optimizers:
    """Those of the dense layers and of the replicas, as one; fused ones need no call."""

    def __init__(self, optimizers: list[torch.optim.Optimizer]) -> None:
        self._optimizers = optimizers

    def zero_grad(self) -> None:
        """Forget the gradients."""
        for optimizer in self._optimizers:
            optimizer.zero_grad()

    def step(self) -> None:
        """Update."""
        for optimizer in self._optimizers:
            optimizer.step()


class LoopSteps:
    """A training loop with dense layers: by hand, or `TrainPipelineSparseDist`.

    `DistributedModelParallel` puts the dense layers into `DistributedDataParallel`.
    """

    def __init__(
        self, case: CaseData, labels: list[Tensor], *, pipelined: bool, waits: bool
    ) -> None:
        self._case = case
        self._wait_s = SOURCE_WAIT_S if waits else 0.0
        self._labels = labels
        model = Model(case)
        dense = make_optimizer(model.head.parameters())
        self._model = shard(model, "embeddings", case)
        named = self._model.named_parameters()
        replicas = replica_optimizer(
            [p for name, p in named if "embedding_bags" in name], self._model, case
        )
        self._optimizer = Optimizers([dense] if replicas is None else [dense, replicas])
        self._pipeline = (
            TrainPipelineSparseDist(self._model, self._optimizer, torch.device("cpu"))
            if pipelined
            else None
        )
        self._losses: list[float] = []

    def run(self, num_steps: int) -> None:
        """See `BlockContender`."""
        batches = self._batches(num_steps)
        # Read as soon as they are there, as our loops do.
        self._losses = [float(self._step(batches)) for _ in range(num_steps)]

    def losses(self) -> Tensor:
        """See `BlockContender`."""
        return torch.tensor(self._losses)

    def _step(self, batches: Iterator[Batch]) -> Tensor:
        if self._pipeline is not None:
            return self._pipeline.progress(batches)  # type: ignore[no-any-return]
        self._optimizer.zero_grad()
        loss, output = self._model(next(batches))
        loss.backward()
        self._optimizer.step()
        return output  # type: ignore[no-any-return]

    def _batches(self, num_steps: int) -> Iterator[Batch]:
        """As a loader would deliver them: put together when they are asked for."""
        for step in range(num_steps):
            index = step % len(self._case.batches)
            if self._wait_s:
                time.sleep(self._wait_s)
            yield Batch(jagged(self._case, self._case.batches[index]), self._labels[index])
