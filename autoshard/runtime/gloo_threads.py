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
their time slices. `GlooThreads` notices, and leaves the threads as they are for a while.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

_NAME = "gloo_tcp_loop"
_THREADS = Path("/proc/self/task")
_NS_PER_MS = 1e6
#: Exchanges between two decisions.
DECIDE_EVERY = 32
#: The last of them, during which it is read how long the threads wait for a core. In between it
#: means nothing: they wake up every 10 ms, and may find their own rank computing.
NUM_READ = 8
#: What they may wait in an exchange: 0.01 to 0.16 ms were seen where nothing else ran, 1.4 to 3.1
#: beside another process.
MAX_DELAY_MS = 1.0
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
        threads: as `receiving_threads` gives them.
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
            if os.sched_getscheduler(thread) == old:
                os.sched_setscheduler(thread, new, os.sched_param(0))
                num_changed += 1
    return num_changed


def waited_ns(threads: Sequence[int]) -> int:
    """How long threads could have run since they were started, but had no core."""
    total = 0
    for thread in threads:
        with suppress(OSError, ValueError, IndexError):
            text = (_THREADS / str(thread) / "schedstat").read_text(encoding="ascii")
            total += int(text.split()[1])
    return total


class GlooThreads:
    """Sets the policy of a process's receiving threads, as long as that does not hold them up."""

    def __init__(self, waited: Callable[[Sequence[int]], int] = waited_ns) -> None:
        """Begin with the threads kept from preempting.

        Args:
            waited: what tells how long threads waited for a core, in nanoseconds.
        """
        self._waited = waited
        self._lock = threading.Lock()
        self._threads: list[int] = []
        self.enabled = True
        """Whether they are kept from preempting at present."""
        self._next_pause = FIRST_PAUSE
        self._left = DECIDE_EVERY
        self._delay_ns = 0
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
            is_read = self.enabled and self._left < NUM_READ
        before_ns = self._waited(self._threads) if is_read else 0
        yield
        after_ns = self._waited(self._threads) if is_read else 0
        with self._lock:
            self._delay_ns += after_ns - before_ns
            if self._left <= 0:
                self._decide()

    def _decide(self) -> None:
        if not self.enabled:  # others may have left the core meanwhile
            self.enabled = True
        elif not self._is_warm:  # the first steps allocate, and say nothing of those that follow
            self._is_warm = True
        else:
            self.enabled = self._delay_ns <= MAX_DELAY_MS * _NS_PER_MS * NUM_READ
            if self.enabled:
                self._next_pause = FIRST_PAUSE
        self._delay_ns = 0
        self._left = DECIDE_EVERY
        if not self.enabled:
            self._left = self._next_pause
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
        keep_from_preempting(self._threads, enabled=self.enabled)


GLOO_THREADS = GlooThreads()
"""Of this process."""
