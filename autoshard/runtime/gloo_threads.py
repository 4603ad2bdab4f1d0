"""Keeps gloo's receiving threads from taking the core from the threads that they wait for.

Every gloo group has one thread, `gloo_tcp_loop`, that waits for its sockets. Where a socket
becomes readable while another thread of the rank holds the connection's lock, because it
is sending, the receiving thread tries the lock again and again instead of sleeping (gloo's
`Pair::handleEvents`; pytorch/gloo#246 knows it). Where both have the same core, as in a
rank pinned to one, that goes on until the scheduler's time slice is used up: 2 to 5 ms were
seen on Linux 6.18, in an exchange that takes 0.3 ms. A thread of the scheduling policy
`SCHED_BATCH` gets as much of the core as any other, but does not preempt others when it
wakes up, so the sender comes to its end first. The change needs no privileges.

It has a price where other processes keep the core busy: a receiving thread then waits for
their time slices. `GlooThreads` notices, and leaves the threads as they are for a while. It
tells them from its own process, whose threads may compute while others exchange, by the
time that this process has computed meanwhile.
"""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_NAME = "gloo_tcp_loop"
_THREADS = Path("/proc/self/task")
_NS_PER_MS = 1e6
#: Exchanges between two decisions.
DECIDE_EVERY = 32
#: The last of them, during which it is read how long the threads are held up. In between it
#: means nothing: they wake up every 10 ms, and may find their own rank computing.
NUM_READ = 8
#: What other processes may hold them up in an exchange, in the median of those. Seen in `python -m
#: benchmarks.gloo_threads` with a core per rank: 0.00 ms, and 3.1 to 3.6 with `--busy`.
MAX_DELAY_MS = 0.5
#: Exchanges for which they are left alone after they waited longer: at first, and at most.
FIRST_PAUSE, LONGEST_PAUSE = 512, 32_768


def receiving_threads() -> list[int]:
    """Ids of this process's receiving threads of gloo; none on systems without /proc."""
    found = []
    with suppress(OSError):
        for entry in _THREADS.iterdir():
            with suppress(OSError):  # it has ended meanwhile
                if (entry / "comm").read_text(encoding="utf-8").strip() == _NAME:
                    found.append(int(entry.name))
    return found


def keep_from_preempting(threads: Sequence[int], *, enabled: bool = True) -> int:
    """Set the scheduling policy of threads that have the usual one, or put that back.

    Threads that somebody gave another policy are left alone.

    Args:
        threads: as `receiving_threads` gives them; those that have ended are passed over.
        enabled: False puts the usual policy back.

    Returns:
        How many were changed; 0 on systems other than Linux, or where it is refused.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return 0
    policies = (os.SCHED_OTHER, os.SCHED_BATCH)
    old, new = policies if enabled else reversed(policies)
    num_changed = 0
    for thread in threads:
        with suppress(OSError):
            # By now the number may be that of another process's thread.
            if (_THREADS / str(thread)).exists() and os.sched_getscheduler(thread) == old:
                os.sched_setscheduler(thread, new, os.sched_param(0))
                num_changed += 1
    return num_changed


@dataclass(frozen=True)
class Clocks:
    """What the scheduler has counted so far, in nanoseconds."""

    waited_ns: Mapping[int, int]
    """By thread: how long it could have run since it was started, but had no core."""
    computed_ns: int
    """CPU time of this process, all threads together."""


def read_clocks(threads: Sequence[int]) -> Clocks:
    """Those of this process and of these of its threads; of none that has ended."""
    waited_ns = {}
    for thread in threads:
        with suppress(OSError, ValueError, IndexError):
            text = (_THREADS / str(thread) / "schedstat").read_text(encoding="ascii")
            waited_ns[thread] = int(text.split()[1])
    return Clocks(waited_ns, time.process_time_ns())


def held_up_ns(before: Clocks, after: Clocks) -> int:
    """How long other processes held threads up in between, at least.

    That is what the one that waited longest waited beyond what its own process computed.
    """
    waited_ns = max(
        (
            total - before.waited_ns[t]
            for t, total in after.waited_ns.items()
            if t in before.waited_ns
        ),
        default=0,
    )
    return max(0, waited_ns - (after.computed_ns - before.computed_ns))


class GlooThreads:
    """Sets the policy of a process's receiving threads, as long as that does not hold them up."""

    def __init__(self, read: Callable[[Sequence[int]], Clocks] = read_clocks) -> None:
        """Begin with the threads kept from preempting.

        Args:
            read: what reads the clocks of threads.
        """
        self._read = read
        self._lock = threading.Lock()
        self._threads: list[int] = []
        self.enabled = True
        """Whether they are kept from preempting at present."""
        self._next_pause = FIRST_PAUSE
        self._left = DECIDE_EVERY
        self._delays_ns: list[int] = []
        self._is_warm = False

    def refresh(self) -> None:
        """Find the threads and set them.

        Call it after a group was opened, or after somebody else set them.
        """
        with self._lock:
            self._threads = receiving_threads()
            keep_from_preempting(self._threads, enabled=self.enabled)

    @contextmanager
    def exchange(self) -> Iterator[None]:
        """Count the enclosed exchange, and decide from time to time."""
        with self._lock:
            self._left -= 1
            threads = self._threads if self.enabled and self._left < NUM_READ else None
        before = None if threads is None else self._read(threads)
        yield
        delay_ns = None
        if threads is not None and before is not None:
            delay_ns = held_up_ns(before, self._read(threads))
        with self._lock:
            if delay_ns is not None:
                self._delays_ns.append(delay_ns)
            if self._left <= 0:
                self._decide()

    def _decide(self) -> None:
        if not self.enabled:  # others may have left the core meanwhile
            self.enabled = True
        elif not self._is_warm:  # the first steps allocate, and say nothing of those that follow
            self._is_warm = True
        elif self._delays_ns:
            self.enabled = statistics.median(self._delays_ns) <= MAX_DELAY_MS * _NS_PER_MS
            if self.enabled:
                self._next_pause = FIRST_PAUSE
        self._delays_ns.clear()
        self._left = DECIDE_EVERY
        if not self.enabled:
            self._left = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        keep_from_preempting(self._threads, enabled=self.enabled)


GLOO_THREADS = GlooThreads()
"""Of this process."""
