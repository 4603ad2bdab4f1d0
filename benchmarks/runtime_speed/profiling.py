"""Where one rank's time goes: torch's operators by the CPU time that they take themselves.

The profiler slows a step down, most of all one of many small operators: the shares are
to be read, not the total.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch.profiler import ProfilerActivity, profile, schedule

#: Operators that are listed.
NUM_OPERATORS = 25
#: How the profiler calls what encloses all recorded steps.
_PHASE = "ProfilerStep"
_US_PER_MS = 1e3
_NS_PER_MS = 1e6


def profile_steps(
    contender: Any, num_steps: int, common_start: Callable[[], int]
) -> dict[str, Any]:
    """Run steps under `torch.profiler`; every rank must, at the same time.

    Args:
        contender: a `Contender` or a `BlockContender`.
        num_steps: at least 1.
        common_start: meets the other ranks, and gives the common start in nanoseconds of
            the monotonic clock.

    Returns:
        `total_ms`, milliseconds per step on this rank; `outside_ms`, what of it the main
        thread spent in no operator; and `operators`, a list of `name`, `self_cpu_ms` per
        step over all threads, and `calls` per step, largest first.
    """
    # Threads start and buffers are allocated in the first step, which stands for no other.
    _run(contender, 1)
    # Ranks meet in a phase of its own, which is not recorded.
    phases = schedule(wait=0, warmup=1, active=1)
    with profile(activities=[ProfilerActivity.CPU], schedule=phases) as profiler:
        common_start()
        profiler.step()
        start_ns = time.monotonic_ns()
        _run(contender, num_steps)
        spent_ns = time.monotonic_ns() - start_ns
    outside_us = 0.0
    operators = []
    for event in sorted(profiler.key_averages(), key=lambda event: -event.self_cpu_time_total):
        if event.key.startswith(_PHASE):
            outside_us += event.self_cpu_time_total
            continue
        operators.append(
            {
                "name": event.key,
                "self_cpu_ms": event.self_cpu_time_total / _US_PER_MS / num_steps,
                "calls": event.count / num_steps,
            }
        )
    return {
        "num_steps": num_steps,
        "total_ms": spent_ns / _NS_PER_MS / num_steps,
        "outside_ms": outside_us / _US_PER_MS / num_steps,
        "operators": operators[:NUM_OPERATORS],
    }


def _run(contender: Any, num_steps: int) -> None:
    if hasattr(contender, "run"):
        contender.run(num_steps)
        return
    for index in range(num_steps):
        contender.step(index)
