"""Keeps gloo's receiving threads from taking the core from the threads that they wait for.

Every gloo group has one thread, `gloo_tcp_loop`, that waits for its sockets. Where a socket
becomes readable while another thread of the rank holds the connection's lock, because it
is sending on it, the receiving thread tries the lock again and again instead of sleeping
(gloo's `Pair::handleEvents`; pytorch/gloo#246 knows it). Where both have the same core, as
in a rank pinned to one, that goes on until the scheduler's time slice is used up: 2 to 5 ms
were seen on Linux 6.18, for an exchange that takes 0.3 ms. A thread of the scheduling policy
`SCHED_BATCH` gets as much of the core as any other, but does not preempt others when it
wakes up, so the sender comes to its end first. The change needs no privileges.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

_NAME = "gloo_tcp_loop"
_THREADS = Path("/proc/self/task")


def keep_gloo_from_preempting(*, enabled: bool = True) -> int:
    """Set the scheduling policy of this process's receiving threads of gloo.

    Threads that somebody gave another policy are left alone. Call it after a group was
    opened: each has its own thread.

    Args:
        enabled: False puts the usual policy back, for comparisons.

    Returns:
        How many threads were changed; 0 on systems other than Linux, or where it is refused.
    """
    if not hasattr(os, "SCHED_BATCH"):
        return 0
    policies = (os.SCHED_OTHER, os.SCHED_BATCH)
    old, new = policies if enabled else reversed(policies)
    num_changed = 0
    for thread in _receiving_threads():
        with suppress(OSError):  # it has ended meanwhile, or a sandbox refuses
            if os.sched_getscheduler(thread) == old:
                os.sched_setscheduler(thread, new, os.sched_param(0))
                num_changed += 1
    return num_changed


def _receiving_threads() -> list[int]:
    """Their thread ids."""
    found = []
    with suppress(OSError):  # no /proc
        for entry in _THREADS.iterdir():
            with suppress(OSError):
                if (entry / "comm").read_text(encoding="utf-8").strip() == _NAME:
                    found.append(int(entry.name))
    return found
