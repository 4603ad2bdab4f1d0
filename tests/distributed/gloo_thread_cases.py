"""Which scheduling policies the threads of a rank have."""

from __future__ import annotations

import os
import threading
from pathlib import Path

from autoshard.runtime.gloo_threads import keep_gloo_from_preempting
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


def as_opened(process: RankProcess) -> tuple[Policies, Policies]:
    """With the groups that there are, and with one more."""
    before = policies()
    process.collectives.new_group()
    return before, policies()


def switched(process: RankProcess) -> list[tuple[int, Policies]]:
    """Back to the usual policy, again, on, and on again: what was changed, what came of it."""
    return [
        (keep_gloo_from_preempting(enabled=enabled), policies())
        for enabled in (False, False, True, True)
    ]


def beside_another_policy(process: RankProcess) -> tuple[int, int]:
    """What a thread of gloo's name that somebody made idle counts for, and keeps."""
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
        return keep_gloo_from_preempting(), os.sched_getscheduler(ids[0])
    finally:
        done.set()
        thread.join()
