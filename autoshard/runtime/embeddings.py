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
from autoshard.runtime.collectives import CollectiveError, Collectives, Parcel
from autoshard.runtime.headers import HEADER_SIZE, Header, Status, stop_if_told
from autoshard.runtime.ids import EntryGather, EntryIds, IdsMode
from autoshard.runtime.layout import layout_of
from autoshard.runtime.sharding import MethodState, RankContext, ShardingMethod, method_factories
from autoshard.runtime.timing import Phase
from autoshard.shards import ShardingType


@dataclass(eq=False)
class StepInput:
    """A batch whose ids have reached their tables."""

    batch_size: int
    states: list[MethodState]
    ids: list[list[Tensor]]
    """Per method, per source rank."""
    training: bool
    used: bool = False


class ShardedEmbeddings(nn.Module):
    """The tables of one plan on one rank."""

    def __init__(
        self,
        plan: ShardingPlan,
        collectives: Collectives,
        *,
        ids_mode: IdsMode = IdsMode.FATAL,
        seed: int = 0,
    ) -> None:
        """Allocate this rank's tables.

        Args:
            plan: for as many ranks as the process group has.
            collectives: this rank's.
            ids_mode: what becomes of ids out of range.
            seed: of the initial weights, which depend on it and on the table only.

        Raises:
            UnsupportedError: the runtime does not execute the plan.
            PlanError: the plan is for another number of ranks.
            CollectiveError: another rank was given another plan.
        """
        super().__init__()
        check_plan_supported(plan, Device(collectives.device.type))
        if plan.topology.world_size != collectives.world_size:
            raise PlanError(
                "the plan is for another number of ranks",
                got=f"{collectives.world_size} processes",
                allowed=f"{plan.topology.world_size}, the plan's world_size",
            )
        self.layout = layout_of(plan)
        collectives.check_equal("plan", self.layout.signature)
        self.ids_mode = ids_mode
        self._collectives = collectives
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self._capacity = plan.training.batch_size
        context = RankContext(
            rank=self._rank,
            world_size=self._world_size,
            device=collectives.device,
            training=plan.training,
            seed=seed,
            recorder=collectives.recorder,
        )
        self._methods: list[ShardingMethod] = [
            factory(self.layout.tables[kind], context)
            for kind, factory in method_factories().items()
            if kind in self.layout.tables
        ]
        self._gather = EntryGather(
            [entry for method in self._methods for entry in method.entries],
            ids_mode,
            collectives.device,
        )
        replicated_only = set(self.layout.tables) <= {ShardingType.DATA_PARALLEL}
        self._lengths_phase = Phase.CONTROL if replicated_only else Phase.LENGTHS
        self._exchanges_ids = self._exchanges_outputs = not replicated_only
        self._anchor = torch.zeros((), device=collectives.device, requires_grad=True)
        self.num_out_of_range = 0
        """Ids of this rank that mode `warning` turned into 0."""

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
            if gradients are enabled. Every rank must run the backward, or none.

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

    def input_dist(self, batch: JaggedBatch | None) -> StepInput | None:
        """Send the ids of the local batch to their tables.

        Args:
            batch: None to say that this rank has no more.

        Returns:
            None if any rank has no more batches.

        Raises:
            InputError: as for `forward`.
            CollectiveError: as for `forward`.
        """
        training = torch.is_grad_enabled()
        if batch is None:
            self._exchange_lengths(Status.ENDED, None, None)
            return None
        try:
            gathered = self._checked(batch)
        except InputError:
            self.announce_failure()
            raise
        status = Status.READY if gathered.bad_id is None else Status.BAD_ID
        states = self._states(gathered, training)
        headers, lengths = self._exchange_lengths(status, gathered, states)
        if any(header.status == Status.ENDED for header in headers):
            return None
        if gathered.bad_id is None:
            self.num_out_of_range += gathered.num_out_of_range
        for state in states:
            state.batch_sizes_R = [header.batch_size for header in headers]
        parcels = [
            method.send_ids(state, received)
            for method, state, received in zip(self._methods, states, lengths, strict=True)
        ]
        ids = self._exchange_if(self._exchanges_ids, Phase.IDS, torch.int64, parcels)
        return StepInput(gathered.lengths_EB.shape[1], states, ids, training)

    def announce_failure(self) -> None:
        """Tell the other ranks, which wait for this one's batch, that none will come."""
        try:
            self._exchange_lengths(Status.FAILED, None, None)
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
        return tuple(name for method in self._methods for name in method.held_tables())

    def table_weights(self, name: str) -> Tensor:
        """A view of what this rank holds of a table's weights, without padding.

        Raises:
            KeyError: this rank does not hold the table.
        """
        return self._holder(name).table_weights(name)

    def optimizer_state(self, name: str) -> Tensor | None:
        """A view of what this rank holds of a table's optimizer state; None for SGD.

        Raises:
            KeyError: this rank does not hold the table.
        """
        return self._holder(name).optimizer_state(name)

    def allocated_bytes(self) -> int:
        """Bytes of weights and optimizer state on this rank."""
        return sum(method.allocated_bytes() for method in self._methods)

    def _holder(self, name: str) -> ShardingMethod:
        for method in self._methods:
            if name in method.held_tables():
                return method
        raise KeyError(name)

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

    def _exchange_lengths(
        self, status: Status, gathered: EntryIds | None, states: list[MethodState] | None
    ) -> tuple[list[Header], list[list[Tensor]]]:
        """Exchange headers and lengths; stop on every rank if any rank has to."""
        bad = None if gathered is None else gathered.bad_id
        header = Header(
            step=self._collectives.recorder.step,
            status=status,
            training=torch.is_grad_enabled(),
            batch_size=0 if gathered is None else gathered.lengths_EB.shape[1],
            bad_entry=0 if bad is None else bad.entry,
            bad_value=0 if bad is None else bad.value,
        )
        sent = torch.tensor(header.to_list(), dtype=torch.int64, device=self._collectives.device)
        parcels = [Parcel([sent] * self._world_size, [HEADER_SIZE] * self._world_size)]
        for index, method in enumerate(self._methods):
            state = None if states is None else states[index]
            parcels.append(Parcel(method.send_lengths(state), method.num_lengths_R))
        received = self._collectives.exchange(self._lengths_phase, torch.int64, parcels)
        headers = [Header.from_list(values) for values in torch.stack(received[0]).tolist()]
        stop_if_told(headers, self._rank, self._gather.entries)
        return headers, received[1:]

    def _forward(self, step: StepInput) -> list[Tensor]:
        work = list(zip(self._methods, step.states, strict=True))
        for (method, state), ids in zip(work, step.ids, strict=True):
            method.lookup(state, ids)
        parcels = [method.send_outputs(state) for method, state in work]
        outputs = self._exchange_if(self._exchanges_outputs, Phase.OUTPUTS, torch.float32, parcels)
        return [
            pooled
            for (method, state), received in zip(work, outputs, strict=True)
            for pooled in method.pooled(state, received)
        ]

    def _backward(self, step: StepInput, gradients: tuple[Tensor, ...]) -> None:
        # The loss is the mean over ranks of each rank's loss, whatever its batch size.
        averaged = [gradient / self._world_size for gradient in gradients]
        parcels = []
        start = 0
        for method, state in zip(self._methods, step.states, strict=True):
            end = start + len(method.entries)
            parcels.append(method.send_gradients(state, averaged[start:end]))
            start = end
        received = self._collectives.exchange(Phase.GRADIENTS, torch.float32, parcels)
        for method, state, part in zip(self._methods, step.states, received, strict=True):
            method.update(state, part)

    def _exchange_if(
        self, needed: bool, phase: Phase, dtype: torch.dtype, parcels: list[Parcel]
    ) -> list[list[Tensor]]:
        if needed:
            return self._collectives.exchange(phase, dtype, parcels)
        return [parcel.send for parcel in parcels]


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
