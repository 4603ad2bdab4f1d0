"""Prepares batches on CUDA streams, one step ahead of the training loop.

Not run on a GPU yet. One thread issues everything, hence all collectives in the same
order on every rank: NCCL communicators used from several threads may deadlock. Once a
step is queued on the device, the next batch is copied on one stream and distributed on
another; the host waits for that while the device computes.

A tensor made on one stream and used on another must not be given to anybody else before
the second one is done with it: `record_stream` tells the allocator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor

from autoshard.runtime.input_feed import BatchSource, InputStage, ReadyBatch


class StreamFeed:
    """See the module's first lines, and `InputFeed`."""

    def __init__(
        self,
        stage: InputStage,
        source: BatchSource,
        device: torch.device,
        *,
        limit: int | None,
        serial: bool,
    ) -> None:
        """Open the streams.

        Args:
            stage: does the work.
            source: of the batches.
            device: a CUDA device.
            limit: steps that will be asked for; batches beyond them are not touched.
            serial: prepare a batch only when it is asked for and the device is idle.
        """
        self.source = source
        self._stage = stage
        self._device = device
        self._limit = limit
        self._serial = serial
        self._copy_stream = torch.cuda.Stream(device)
        self._input_stream = torch.cuda.Stream(device)
        self._next = 0
        self._answer: ReadyBatch | Exception | None = None

    def take(self, step: int) -> ReadyBatch | None:
        """See `InputFeed`."""
        if self._next == step:
            if self._serial:
                torch.cuda.synchronize(self._device)
            if step == 0:
                self._stage.open()
            self._prepare()
            if self._serial:
                torch.cuda.synchronize(self._device)
        answer, self._answer = self._answer, None
        if isinstance(answer, Exception):
            raise answer
        if answer is not None:
            self._hand_over(answer, self._input_stream, torch.cuda.current_stream(self._device))
        return answer

    def step_queued(self, step: int) -> None:
        """Prepare the next batch while the device computes."""
        if not self._serial and self._next != self._limit:
            self._prepare()

    def close(self) -> None:
        """See `InputFeed`."""
        self._answer = None

    def _prepare(self) -> None:
        """Fetch and distribute the next batch; an error is kept for the step it belongs to."""
        step, self._next = self._next, self._next + 1
        try:
            with torch.cuda.stream(self._copy_stream):
                batch = self._stage.fetch(step, non_blocking=True)
            with torch.cuda.stream(self._input_stream):
                self._hand_over(batch, self._copy_stream, self._input_stream)
                self._answer = self._stage.distribute(batch)
        except Exception as error:
            self._answer = error

    def _hand_over(self, value: Any, source: torch.cuda.Stream, target: torch.cuda.Stream) -> None:
        target.wait_stream(source)
        for tensor in tensors_in(value):
            if tensor.is_cuda:
                tensor.record_stream(target)


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor inside dataclasses, mappings, lists and tuples."""
    if isinstance(value, Tensor):
        yield value
    elif is_dataclass(value) and not isinstance(value, type):
        for field in fields(value):
            yield from tensors_in(getattr(value, field.name))
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors_in(part)
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors_in(part)
