"""`PipelinedLoop`: the next batch is on its way while the current one is trained on.

    input thread   │ next, copy, ids of 1 │ next, copy, ids of 2 │ …
    main thread    │ lookup, dense, backward, update of 0 │ … of 1 │ …

Only the input runs ahead. A lookup sees the weights that every earlier step has updated,
as in the plain loop, so the losses are the same bit for bit.

One step ahead: two batches are in memory at once, the one in training and the next one
with the ids that have reached this rank. Plan with `batches_in_flight=2`.
"""

from __future__ import annotations

import torch
from torch import nn

from autoshard.errors import InputError, WorkerError
from autoshard.runtime.collectives import Collectives, stall_timeout_s
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.input_feed import BatchSource, InputFeed, InputStage
from autoshard.runtime.input_streams import StreamFeed
from autoshard.runtime.input_thread import ThreadFeed
from autoshard.runtime.loop import TrainingLoop
from autoshard.runtime.timing import StepRecord


class PipelinedLoop(TrainingLoop):
    """Trains `dense` on top of `embeddings`, with the input one step ahead.

    The interface and the numbers are those of `PlainLoop`. Its records hold each step's
    start and end only: what overlaps cannot be told apart as the objective's four terms.

    On CUDA, streams take the place of the thread (`autoshard.runtime.input_streams`),
    which has not been run on a GPU yet.
    """

    _times_terms = False

    def __init__(
        self,
        embeddings: ShardedEmbeddings,
        dense: nn.Module,
        dense_optimizer: torch.optim.Optimizer | None,
        collectives: Collectives,
        *,
        serial: bool = False,
    ) -> None:
        """Put the parts of a model together; every rank must, in the same order.

        Args:
            embeddings: the sharded tables, built with `input_collectives` of their own:
                `collectives.new_group()`.
            dense: as for `PlainLoop`.
            dense_optimizer: as for `PlainLoop`.
            collectives: the ones that `embeddings` was built with.
            serial: run the same code without overlap, to tell whether a difference comes
                from it.

        Raises:
            InputError: `embeddings` distributes its input on `collectives`.
            CollectiveError: other ranks have other dense layers, or did not answer in time.
        """
        if embeddings.input_collectives.recorder is collectives.recorder:
            raise InputError(
                "the embeddings have no collectives of their own for the input",
                remedy="build ShardedEmbeddings with input_collectives=collectives.new_group()",
            )
        super().__init__(embeddings, dense, dense_optimizer, collectives)
        self._serial = serial
        self._last_thread: ThreadFeed | None = None

    def _open(self, source: BatchSource, stage: InputStage, limit: int | None) -> InputFeed:
        device = self._collectives.device
        if device.type == "cuda":
            return StreamFeed(stage, source, device, limit=limit, serial=self._serial)
        if self._last_thread is not None and not self._last_thread.wait(
            self._collectives.timeout_s
        ):
            raise WorkerError(
                f"rank {self._collectives.rank}: the source of an earlier call still blocks",
                remedy="let the batch source end, or start a new process",
            )
        self._last_thread = ThreadFeed(
            stage,
            source,
            limit=limit,
            serial=self._serial,
            name=self._collectives.name,
            timeout_s=stall_timeout_s(self._collectives.timeout_s),
        )
        return self._last_thread

    def _record(self) -> StepRecord:
        recorder = self._collectives.recorder
        recorder.end_step()
        record = recorder.records.pop()
        return StepRecord(start_ns=record.start_ns, end_ns=record.end_ns)
