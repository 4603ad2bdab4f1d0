"""gloo's receiving threads do not preempt the senders that they wait for, while that helps."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from autoshard.runtime import gloo_threads
from autoshard.runtime.gloo_threads import (
    DECIDE_EVERY,
    FIRST_PAUSE,
    MAX_DELAY_MS,
    NUM_READ,
    Clocks,
    GlooThreads,
    held_up_ns,
    keep_from_preempting,
    read_clocks,
    receiving_threads,
)
from autoshard.runtime.group import WorkerGroup
from tests.distributed import gloo_thread_cases

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies of Linux")

Groups = dict[int, WorkerGroup]


def test_the_policy_can_be_put_back_and_is_changed_only_where_it_differs(groups: Groups) -> None:
    for off, still_off, on, still_on in groups[2].run(gloo_thread_cases.switched):
        num_threads = off[0]
        assert num_threads >= 1
        assert off[1][0] == still_off[1][0] == {os.SCHED_OTHER: num_threads}
        assert on[1][0] == still_on[1][0] == {os.SCHED_BATCH: num_threads}
        assert (still_off[0], on[0], still_on[0]) == (0, num_threads, 0)
        assert all(others == {os.SCHED_OTHER} for _, (_, others) in (off, still_off, on, still_on))


def test_threads_that_wait_for_a_core_are_left_alone_for_a_while(groups: Groups) -> None:
    waits_ms = [9 * MAX_DELAY_MS, 0.9 * MAX_DELAY_MS, 1.1 * MAX_DELAY_MS, 5 * MAX_DELAY_MS, 0.0]
    for seen in groups[2].run(gloo_thread_cases.in_turn, waits_ms):
        # Neither the first steps count, nor the pause, nor what is between exchanges.
        assert [enabled for enabled, _ in seen] == [True, True, True, False, True, True]
        for enabled, (receiving, _) in seen:
            assert receiving.keys() == {os.SCHED_BATCH if enabled else os.SCHED_OTHER}


def test_pauses_grow_while_the_core_is_taken_and_only_then() -> None:
    told_ns, more_ns = 0, 10**12

    def read(threads: object) -> Clocks:
        nonlocal told_ns
        told_ns += more_ns
        return Clocks({1: told_ns}, 0)

    threads = GlooThreads(read)

    def exchange(count: int) -> None:
        for _ in range(count):
            with threads.exchange():
                pass

    exchange(DECIDE_EVERY)
    assert threads.enabled
    pauses = []
    for number in range(4):
        if number == 3:  # in between, the core is free for a while
            more_ns = 0
            exchange(DECIDE_EVERY)
            more_ns = 10**12
        exchange(DECIDE_EVERY)
        assert not threads.enabled
        count = 0
        while not threads.enabled:
            exchange(1)
            count += 1
        pauses.append(count)
    assert pauses == [FIRST_PAUSE, 2 * FIRST_PAUSE, 4 * FIRST_PAUSE, FIRST_PAUSE]


def test_a_process_that_computes_does_not_hold_its_own_threads_up() -> None:
    before = Clocks({1: 100, 2: 500, 3: 0}, 1_000)
    # 2 waited for 900, of which its process may have had the core for 700; 3 has ended.
    assert held_up_ns(before, Clocks({1: 150, 2: 1_400}, 1_700)) == 200
    assert held_up_ns(before, Clocks({1: 150, 2: 1_400}, 2_000)) == 0
    assert held_up_ns(before, Clocks({4: 900}, 1_000)) == 0


def test_what_any_thread_of_the_process_computes_is_read() -> None:
    spent_ns = 0

    def compute() -> None:
        nonlocal spent_ns
        while spent_ns < 50_000_000:
            sum(range(10_000))
            spent_ns = time.thread_time_ns()

    own = threading.get_native_id()
    before = read_clocks([own])
    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    after = read_clocks([own])
    assert before.waited_ns.keys() == after.waited_ns.keys() == {own}
    assert after.computed_ns - before.computed_ns >= spent_ns


def test_few_long_waits_decide_nothing() -> None:
    told_ns = 0

    def read(threads: object) -> Clocks:
        return Clocks({1: told_ns}, 0)

    threads = GlooThreads(read)
    for number in range(2 * DECIDE_EVERY):
        with threads.exchange():
            if number % NUM_READ < NUM_READ // 2 - 1:
                told_ns += 10**12
    assert threads.enabled


def test_a_policy_that_somebody_chose_is_kept(groups: Groups) -> None:
    assert groups[2].run(gloo_thread_cases.beside_another_policy) == [os.SCHED_IDLE] * 2


def test_without_proc_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gloo_threads, "_THREADS", tmp_path / "nowhere")
    assert receiving_threads() == []
    assert read_clocks([os.getpid()]).waited_ns == {}


def test_threads_of_another_process_are_left_alone() -> None:
    with subprocess.Popen(["sleep", "20"]) as other:
        try:
            assert keep_from_preempting([other.pid]) == 0
            assert os.sched_getscheduler(other.pid) == os.SCHED_OTHER
        finally:
            other.kill()


def test_a_refusal_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "refused")

    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert keep_from_preempting([os.getpid()]) == 0
