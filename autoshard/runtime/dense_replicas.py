"""Keeps the ranks' copies of the dense layers equal: one start, averaged gradients.

`DistributedDataParallel` sends gradients while the backward still computes others. It
runs on a process group of its own, so that its all-reduces never come between the
tables' all-to-alls of one group in another order than on other ranks.

Gradients are divided by the number of ranks and then summed, ranks with an empty batch
included: gloo's own averaging is not to be relied on (pytorch/pytorch#162338).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn

from autoshard.errors import AutoshardError, InputError
from autoshard.files import fingerprint
from autoshard.runtime.collectives import CollectiveError, Collectives
from autoshard.runtime.dense import DenseOutput, TrainingBatch
from autoshard.runtime.timing import Phase

#: One group for all dense layers that are used beside one `Collectives`, one after the other.
_GROUPS: WeakKeyDictionary[Collectives, Collectives] = WeakKeyDictionary()


class DenseReplicas:
    """This rank's copy of the dense layers, and its ties to the other ranks'."""

    def __init__(self, dense: nn.Module, collectives: Collectives) -> None:
        """Give every rank the weights of rank 0.

        Args:
            dense: called as `dense(pooled, batch)`; may have no parameters.
            collectives: this rank's; the dense layers get a process group beside it.

        Raises:
            InputError: parameters are not where the tables are.
            CollectiveError: other ranks' layers have other names, shapes or data types, or
                these ranks did not answer in time.
        """
        self.module = dense
        self._collectives = collectives
        self._trainable = {n: p for n, p in dense.named_parameters() if p.requires_grad}
        state = {**dict(dense.named_parameters()), **dict(dense.named_buffers())}
        for name, tensor in state.items():
            if tensor.device != collectives.device:
                raise InputError(
                    f"{name} of the dense layers is on another device than the tables",
                    got=tensor.device,
                    allowed=collectives.device,
                )
        self._layers = _Layers(dense)
        self._ddp: nn.Module = self._layers
        self._averaging: _Averaging | None = None
        if collectives.world_size == 1:
            return
        collectives.check_equal("set of dense layers", _signature(state, self._trainable))
        if not state:
            return
        self._broadcast(list(state.values()))
        if self._trainable:
            self._averaging = _Averaging(self._group)
            ddp = nn.parallel.DistributedDataParallel(
                self._layers,
                process_group=self._group.group,
                init_sync=False,
                forward_sync_buffers=False,
                gradient_as_bucket_view=True,
            )
            ddp.register_comm_hook(self._averaging, lambda state, bucket: state.start(bucket))
            self._ddp = ddp

    def forward(self, pooled: Mapping[str, Tensor], batch: TrainingBatch) -> DenseOutput:
        """Call the layers for a step that will run `backward`.

        Raises:
            InputError: they return something else than a `DenseOutput`.
            CollectiveError: the ranks could not agree on how to group their gradients.
        """
        self._layers.entered = False
        try:
            output = self._ddp(pooled, batch)
        except RuntimeError as error:
            if self._averaging is not None and not self._layers.entered:
                raise self._failure(error) from error
            raise
        return checked_output(output, batch)

    def backward(self, loss: Tensor) -> None:
        """Compute the gradients: of the layers, averaged over ranks, and of the tables.

        Raises:
            InputError: the loss is not connected to all parameters.
            CollectiveError: the averaging failed or did not end within the time limit.
        """
        if not loss.requires_grad:
            raise InputError(
                "the loss of the dense layers is not connected to the pooled outputs",
                remedy="compute it from them; for an empty batch, as the sum of no values",
            )
        self.module.zero_grad(set_to_none=True)
        try:
            loss.backward()
        except AutoshardError:
            raise
        except RuntimeError as error:
            if self._averaging is not None and self._averaging.error is not None:
                raise self._failure(self._averaging.error) from error
            raise
        if self._averaging is None:
            return
        if missing := [name for name, p in self._trainable.items() if p.grad is None]:
            raise InputError(
                "the loss of the dense layers does not depend on all of their parameters",
                got=f"no gradient for {', '.join(missing[:5])}",
                remedy="remove them, set requires_grad to False, or add 0 times their sum",
            )

    def share_buffers(self) -> None:
        """Give every rank the buffers of rank 0, such as running statistics.

        Raises:
            CollectiveError: it failed or did not end within the time limit.
        """
        if self._collectives.world_size > 1 and (buffers := list(self.module.buffers())):
            self._broadcast(buffers)

    @torch.no_grad()
    def _broadcast(self, tensors: Sequence[Tensor]) -> None:
        # As bytes: one message for all data types.
        parts = [tensor.detach().contiguous().flatten().view(torch.uint8) for tensor in tensors]
        flat = torch.cat(parts)
        try:
            dist.broadcast(flat, src=0, group=self._group.group)
        except RuntimeError as error:
            raise self._failure(error) from error
        for tensor, values in zip(tensors, flat.split([p.numel() for p in parts]), strict=True):
            # A copy, since a data type may not be viewed at any byte.
            tensor.copy_(values.clone().view(tensor.dtype).view(tensor.shape))

    @property
    def _group(self) -> Collectives:
        if self._collectives not in _GROUPS:
            _GROUPS[self._collectives] = self._collectives.new_group()
        return _GROUPS[self._collectives]

    def _failure(self, error: RuntimeError) -> CollectiveError:
        self._group.recorder.step = self._collectives.recorder.step
        return self._group._failure(Phase.DENSE, error)


class _Layers(nn.Module):
    """The user's layers, noting whether an error came from inside them."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module
        self.entered = False

    def forward(self, pooled: Mapping[str, Tensor], batch: TrainingBatch) -> DenseOutput:
        self.entered = True
        return self.module(pooled, batch)  # type: ignore[no-any-return]


class _Averaging:
    """What `DistributedDataParallel` does with each bucket of gradients.

    Knows nothing of the layers: a cycle through the C++ side would never be freed.
    """

    def __init__(self, group: Collectives) -> None:
        self._group = group
        self.error: RuntimeError | None = None
        """Why an all-reduce failed; what the backward raises does not tell its origin."""

    def start(self, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
        gradients = bucket.buffer().div_(self._group.world_size)
        try:
            work = dist.all_reduce(
                gradients, op=dist.ReduceOp.SUM, group=self._group.group, async_op=True
            )
        except RuntimeError as error:
            self.error = error
            raise
        assert work is not None
        return work.get_future().then(self._ended)

    def _ended(self, future: torch.futures.Future[list[Tensor]]) -> Tensor:
        try:
            return future.value()[0]
        except RuntimeError as error:
            self.error = error
            raise


def checked_output(output: object, batch: TrainingBatch) -> DenseOutput:
    """`output`, if dense layers may return it.

    Raises:
        InputError: it is no `DenseOutput` with a scalar loss and one logit per sample.
    """
    if not isinstance(output, DenseOutput):
        raise InputError(
            "the dense layers return something else than a DenseOutput",
            got=type(output).__name__,
            remedy="return autoshard.runtime.dense.DenseOutput(loss, logits_B)",
        )
    if output.loss.dim() or output.logits_B.shape != batch.labels_B.shape:
        raise InputError(
            "the dense layers return tensors of another shape",
            got=f"loss {tuple(output.loss.shape)}, logits {tuple(output.logits_B.shape)}",
            allowed=f"a scalar loss and one logit per sample, {tuple(batch.labels_B.shape)}",
        )
    return output


def _signature(state: Mapping[str, Tensor], trainable: Mapping[str, Tensor]) -> int:
    body = [[n, list(t.shape), str(t.dtype), n in trainable] for n, t in state.items()]
    return int(fingerprint(body)[:12], 16)
