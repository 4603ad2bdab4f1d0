"""Which scheduling policies the threads of a rank have."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from autoshard.runtime.gloo_threads import (
    Clocks,
    GlooThreads,
    keep_from_preempting,
    receiving_threads,
)
from autoshard.runtime.worker import RankProcess

#: (number of gloo's receiving threads with each policy, policies of all other threads)
Policies = tuple[dict[int, int], set[int]]


def policies() -> Policies:
    receiving: dict[int, int] = {}
    others = set()
    for task in Path("/proc/self/task").iterdir():
        policy = os.sched_getscheduler(int(task.name))
        if (task / "comm").read_text().startswith("gloo_tcp"):
            receiving[policy] = receiving.get(policy, 0) + 1
        else:
            others.add(policy)
    return receiving, others


def switched(process: RankProcess) -> list[tuple[int, Policies]]:
    """On, off, off again, on, and on again: what was changed, and what came of it."""
    keep_from_preempting(receiving_threads())
    return [
        (keep_from_preempting(receiving_threads(), enabled=enabled), policies())
        for enabled in (False, False, True, True)
    ]


def in_turn(process: RankProcess, waits_ms: list[float]) -> list[tuple[bool, Policies]]:
    """With threads that wait for so long in each exchange, and in between, what is decided."""
    told_ns = 0
    gloo_threads = GlooThreads(lambda threads: Clocks({1: told_ns}, 0))
    gloo_threads.refresh()
    seen = [(gloo_threads.enabled, policies())]
    for wait_ms in waits_ms:
        for _ in range(gloo_threads._left):
            told_ns += 10**12
            with gloo_threads.exchange():
                told_ns += int(wait_ms * 1e6)
        seen.append((gloo_threads.enabled, policies()))
    return seen


def beside_another_policy(process: RankProcess) -> int:
    """What a thread of gloo's name that somebody made idle keeps."""
    ready, done = threading.Event(), threading.Event()
    ids = []

    def run() -> None:
        Path(f"/proc/self/task/{threading.get_native_id()}/comm").write_text("gloo_tcp_loop")
        os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
        ids.append(threading.get_native_id())
        ready.set()
        done.wait(20)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert ready.wait(20)
        assert ids[0] in receiving_threads()
        keep_from_preempting(receiving_threads())
        return os.sched_getscheduler(ids[0])
    finally:
        done.set()
        thread.join()
