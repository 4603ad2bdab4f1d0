"""Prepares batches in a thread, one step ahead of the training loop; for CPU.

The thread takes a batch, copies it and distributes its ids on the input's own process
group. Torch's operators and gloo's waits release the interpreter's lock, so it runs
beside the kernels of the main thread.
"""

from __future__ import annotations

import threading
from queue import Empty, SimpleQueue

import torch

from autoshard.errors import WorkerError
from autoshard.runtime.input_feed import BatchSource, InputStage, ReadyBatch

#: How long to wait for the thread after an error elsewhere. It may sit in a source that
#: never answers, or in a collective until the time limit, and ends by itself after that.
_JOIN_S = 2.0


class ThreadFeed:
    """See the module's first lines, and `InputFeed`."""

    def __init__(
        self,
        stage: InputStage,
        source: BatchSource,
        *,
        limit: int | None,
        serial: bool,
        name: str,
        timeout_s: float,
    ) -> None:
        """Describe the feed; the thread starts with the first `take`.

        Args:
            stage: does the work.
            source: of the batches.
            limit: steps that will be asked for; batches beyond them are not touched.
            serial: prepare a batch only when it is asked for.
            name: of this rank in error messages.
            timeout_s: how long a batch may take. Collectives have limits of their own; this
                one is for the source.
        """
        self.source = source
        self._stage = stage
        self._limit = limit
        self._serial = serial
        self._name = name
        self._timeout_s = timeout_s
        self._requests: SimpleQueue[int | None] = SimpleQueue()
        self._answers: SimpleQueue[ReadyBatch | BaseException | None] = SimpleQueue()
        self._next = 0
        """The first step that was not requested."""
        # A daemon, so that a source that never answers cannot keep the process alive.
        self._thread = threading.Thread(target=self._run, name="autoshard-input", daemon=True)

    def take(self, step: int) -> ReadyBatch | None:
        """See `InputFeed`; errors of the thread are raised here, as they are."""
        if not self._thread.ident:
            self._stage.open()  # here, since a DataLoader's workers belong to the main thread
            self._thread.start()
        if self._next == step:
            self._request()
        try:
            answer = self._answers.get(timeout=self._timeout_s)
        except Empty:
            raise WorkerError(
                f"{self._name}, step {step}: the source of the batches gave none for "
                f"{self._timeout_s:g} s",
                remedy="look for what it waits for; where it is only slow, raise the timeout, of "
                "which this is five times, and 300 s at least",
            ) from None
        if isinstance(answer, BaseException):
            raise answer
        if answer is not None and not self._serial and self._next != self._limit:
            self._request()
        return answer

    def step_queued(self, step: int) -> None:
        """See `InputFeed`."""

    def close(self) -> None:
        """See `InputFeed`."""
        self._requests.put(None)
        self.wait(_JOIN_S)

    def wait(self, timeout_s: float) -> bool:
        """Wait for the thread to end; False if it did not in time."""
        if self._thread.ident:
            self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _request(self) -> None:
        self._requests.put(self._next)
        self._next += 1

    def _run(self) -> None:
        # Each thread has a gradient mode of its own; a source finds the one of a plain loop.
        with torch.set_grad_enabled(self._stage.training):
            while (step := self._requests.get()) is not None:
                try:
                    answer = self._stage.distribute(self._stage.fetch(step))
                except BaseException as error:
                    self._answers.put(error)
                    return
                self._answers.put(answer)
                if answer is None:
                    return
