"""`ShardedEmbeddings`: the embedding tables of a plan, spread over ranks, as one module.

A user puts it in front of their own dense layers: features go in, pooled outputs come
out, and `loss.backward()` sends the gradients to the tables and updates them in place.

    pooled = embeddings(batch)            # {"feature": float32 [B, embedding_dim], …}
    loss = my_dense_layers(pooled)        # mean over the local batch
    loss.backward()                       # updates the tables, fused

The step consists of `input_dist` and `lookup`, which a pipelined loop may call apart.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from autoshard.errors import InputError, PlanError
from autoshard.plan import ShardingPlan
from autoshard.runtime.batch import JaggedBatch
from autoshard.runtime.capabilities import Device, check_plan_supported
from autoshard.runtime.collectives import CollectiveError, Collectives, Received
from autoshard.runtime.headers import Header, Status
from autoshard.runtime.ids import EntryGather, EntryIds, IdsMode
from autoshard.runtime.input_dist import InputDistributor
from autoshard.runtime.layout import layout_of
from autoshard.runtime.sharding import (
    LocalShard,
    MethodState,
    RankContext,
    build_methods,
)
from autoshard.runtime.timing import Phase
from autoshard.shards import ShardingType
from autoshard.tables import PoolingType
from autoshard.validate import check_shards


@dataclass(eq=False)
class StepInput:
    """A batch whose ids have reached their tables."""

    batch_size: int
    states: list[MethodState]
    ids: list[Received]
    """Per method."""
    training: bool
    num_ids_EB: Tensor
    """int64: ids per bag of each entry, in the methods' order."""
    used: bool = False


class ShardedEmbeddings(nn.Module):
    """The tables of one plan on one rank."""

    def __init__(
        self,
        plan: ShardingPlan,
        collectives: Collectives,
        *,
        input_collectives: Collectives | None = None,
        ids_mode: IdsMode = IdsMode.FATAL,
        seed: int = 0,
    ) -> None:
        """Allocate this rank's tables.

        Args:
            plan: for as many ranks as the process group has.
            collectives: this rank's.
            input_collectives: what `input_dist` uses; `collectives.new_group()` lets it run
                in another thread than the rest; `collectives.input()` if None.
            ids_mode: what becomes of ids out of range.
            seed: of the initial weights, which depend on it and on the table only.

        Raises:
            UnsupportedError: the runtime does not execute the plan.
            PlanError: the plan is for another number of ranks, or the shards of a table do
                not tile it.
            CollectiveError: another rank was given another plan, seed or ids_mode.
        """
        super().__init__()
        check_plan_supported(plan, Device(collectives.device.type))
        if plan.topology.world_size != collectives.world_size:
            raise PlanError(
                "the plan is for another number of ranks",
                got=f"{collectives.world_size} processes",
                allowed=f"{plan.topology.world_size}, the plan's world_size",
            )
        for entry in plan.tables:
            check_shards(entry, plan.topology)
        self.layout = layout_of(plan)
        collectives.check_equal("plan", self.layout.signature)
        collectives.check_equal("seed", seed)
        collectives.check_equal("ids_mode", list(IdsMode).index(ids_mode))
        self.ids_mode = ids_mode
        self._collectives = collectives
        self._input_collectives = input_collectives or collectives.input()
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self._capacity = plan.training.batch_size
        context = RankContext(
            rank=self._rank,
            world_size=self._world_size,
            device=collectives.device,
            training=plan.training,
            seed=seed,
            recorder=collectives.recorder,
            input_recorder=self._input_collectives.recorder,
            node=self._node_collectives(plan),
        )
        self._methods = build_methods(self.layout.tables, context)
        self._gather = EntryGather(
            [entry for method in self._methods for entry in method.entries],
            ids_mode,
        )
        self._distribute = InputDistributor(
            self._methods, self._gather.entries, self._input_collectives
        )
        self._exchanges_outputs = any(method.exchanges_outputs for method in self._methods)
        self._mean_entries = [
            index
            for index, entry in enumerate(self._gather.entries)
            if entry.table.pooling is PoolingType.MEAN
        ]
        self._anchor = torch.zeros((), device=collectives.device, requires_grad=True)
        self.num_out_of_range = 0
        """Ids of this rank that mode `warning` turned into 0."""

    @property
    def input_collectives(self) -> Collectives:
        """What `input_dist` uses."""
        return self._input_collectives

    @property
    def output_dims(self) -> dict[str, int]:
        """Columns of each pooled output, by output name, in output order."""
        return self.layout.output_dims

    def forward(self, batch: JaggedBatch) -> dict[str, Tensor]:
        """Look the batch up.

        Args:
            batch: this rank's; of any size from 0 to the plan's batch size.

        Returns:
            Per output name, float32 [B, embedding_dim], connected to the fused backward
            if gradients are enabled. Every rank must run the backward, or none; otherwise
            all of them fail at the time limit.

        Raises:
            InputError: the batch is malformed, or holds an id out of range in mode `fatal`.
            CollectiveError: another rank failed, or ran out of batches.
        """
        step = self.input_dist(batch)
        if step is None:
            raise CollectiveError(
                f"rank {self._rank}: another rank has no more batches",
                remedy="let autoshard.runtime.loop.PlainLoop end all ranks together",
            )
        return self.lookup(step)

    def input_dist(
        self, batch: JaggedBatch | None, *, training: bool | None = None
    ) -> StepInput | None:
        """Send the ids of the local batch to their tables.

        Args:
            batch: None to say that this rank has no more.
            training: whether gradients will follow; whether they are enabled, if None.

        Returns:
            None if any rank has no more batches.

        Raises:
            InputError: as for `forward`.
            CollectiveError: as for `forward`.
        """
        training = torch.is_grad_enabled() if training is None else training
        if batch is None:
            self._distribute(self._header(Status.ENDED, training), None)
            return None
        try:
            gathered = self._checked(batch)
        except InputError:
            self.announce_failure(training=training)
            raise
        states = self._states(gathered, training)
        ids = self._distribute(self._header_of(gathered, training), states)
        if ids is None:
            return None
        self.num_out_of_range += gathered.num_out_of_range
        return StepInput(gathered.lengths_EB.shape[1], states, ids, training, gathered.lengths_EB)

    def announce_failure(self, *, training: bool | None = None) -> None:
        """Tell the other ranks, which wait for this one's batch, that none will come."""
        training = torch.is_grad_enabled() if training is None else training
        try:
            self._distribute(self._header(Status.FAILED, training), None)
        except (CollectiveError, InputError):
            return  # they stop anyway

    def lookup(self, step: StepInput) -> dict[str, Tensor]:
        """Pool the ids and bring the outputs back; the second half of `forward`."""
        if step.used:
            raise InputError("a StepInput can be looked up only once")
        step.used = True
        if step.training:
            pooled = _FusedLookup.apply(self._anchor, self, step)
        else:
            pooled = self._forward(step)
        by_name = {
            entry.output_name: output
            for entry, output in zip(self._gather.entries, pooled, strict=True)
        }
        return {name: by_name[name] for name in self.output_dims}

    def held_tables(self) -> tuple[str, ...]:
        """Names of the tables that this rank holds, whole or in part."""
        return tuple(dict.fromkeys(shard.table.name for shard in self.local_shards()))

    def local_shards(self) -> tuple[LocalShard, ...]:
        """What this rank holds, as writable views; shards of zero size are left out."""
        return tuple(shard for method in self._methods for shard in method.local_shards())

    def set_learning_rate(self, learning_rate: float) -> None:
        """Use another learning rate from the next update on; call it on every rank."""
        for method in self._methods:
            method.set_learning_rate(learning_rate)

    def allocated_bytes(self) -> int:
        """Bytes of weights and optimizer state on this rank."""
        return sum(method.allocated_bytes() for method in self._methods)

    def _node_collectives(self, plan: ShardingPlan) -> Collectives | None:
        """Of the ranks of this node, where tables are split within one of several nodes."""
        num_local = plan.topology.local_world_size
        kinds = {entry.sharding_type for entry in plan.tables}
        if ShardingType.TABLE_ROW_WISE not in kinds or not 1 < num_local < self._world_size:
            return None
        return self._collectives.node(num_local)

    def _checked(self, batch: JaggedBatch) -> EntryIds:
        if batch.batch_size > self._capacity:
            raise InputError(
                f"rank {self._rank}: the batch is larger than the plan allows for",
                got=f"{batch.batch_size} samples",
                allowed=f"0..{self._capacity}, the plan's batch size per rank",
            )
        return self._gather(batch.to(self._collectives.device))

    def _states(self, gathered: EntryIds, training: bool) -> list[MethodState]:
        states = []
        start = 0
        for method in self._methods:
            entries = slice(start, start + len(method.entries))
            start = entries.stop
            weights = None if gathered.weights is None else gathered.weights[entries]
            part = EntryIds(
                gathered.lengths_EB[entries], gathered.values[entries], weights, 0, None
            )
            states.append(MethodState(part, training))
        return states

    def _header(self, status: Status, training: bool) -> Header:
        step = self._input_collectives.recorder.step
        return Header(step=step, status=status, training=training)

    def _header_of(self, gathered: EntryIds, training: bool) -> Header:
        bad = gathered.bad_id
        return Header(
            step=self._input_collectives.recorder.step,
            status=Status.READY if bad is None else Status.BAD_ID,
            training=training,
            batch_size=gathered.lengths_EB.shape[1],
            bad_entry=0 if bad is None else bad.entry,
            bad_value=0 if bad is None else bad.value,
        )

    def _forward(self, step: StepInput) -> list[Tensor]:
        work = list(zip(self._methods, step.states, strict=True))
        for (method, state), ids in zip(work, step.ids, strict=True):
            method.lookup(state, ids)
        with torch.no_grad():
            parcels = [method.send_outputs(state) for method, state in work]
            if self._exchanges_outputs:
                outputs = self._collectives.exchange(Phase.OUTPUTS, torch.float32, parcels)
            else:
                outputs = [Received([parcel.send] * self._world_size) for parcel in parcels]
            pooled = [
                output
                for (method, state), received in zip(work, outputs, strict=True)
                for output in method.pooled(state, received)
            ]
            for entry, divisor_B1 in self._mean_divisors(step):
                pooled[entry].div_(divisor_B1)
            # A caller may change one of them in place; autograd refuses that for views.
            return [_alias(output) if output._is_view() else output for output in pooled]

    def _backward(self, step: StepInput, gradients: tuple[Tensor, ...]) -> None:
        # The methods divide by the number of ranks: the loss is the mean over ranks of each
        # rank's loss, whatever its batch size.
        of_sums = list(gradients)
        for entry, divisor_B1 in self._mean_divisors(step):
            of_sums[entry] = gradients[entry] / divisor_B1
        parcels = []
        start = 0
        for method, state in zip(self._methods, step.states, strict=True):
            end = start + len(method.entries)
            parcels.append(method.send_gradients(state, of_sums[start:end]))
            start = end
        received = self._collectives.exchange(Phase.GRADIENTS, torch.float32, parcels, joined=True)
        for method, state, part in zip(self._methods, step.states, received, strict=True):
            method.update(state, part)

    def _mean_divisors(self, step: StepInput) -> list[tuple[int, Tensor]]:
        """What turns the sums of entries with mean pooling into means, float32 [B, 1]."""
        if not self._mean_entries:
            return []
        lengths = step.num_ids_EB[self._mean_entries].clamp(min=1).to(torch.float32)
        return list(zip(self._mean_entries, lengths.unsqueeze(2), strict=True))


def _alias(tensor: Tensor) -> Tensor:
    """The same memory, but no view to autograd, so that a caller may change it in place."""
    alias = tensor.new_empty(0)
    return alias.set_(
        tensor.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride()
    )


class _FusedLookup(torch.autograd.Function):
    """Connects the step to autograd: its backward updates the tables."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, embeddings: ShardedEmbeddings, step: StepInput
    ) -> tuple[Tensor, ...]:
        ctx.embeddings, ctx.step = embeddings, step
        return tuple(embeddings._forward(step))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None, None]:
        if ctx.step is None:
            raise InputError("the fused backward can run only once per step")
        step, ctx.step = ctx.step, None
        ctx.embeddings._backward(step, gradients)
        return None, None, None
