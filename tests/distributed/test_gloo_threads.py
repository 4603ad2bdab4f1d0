"""gloo's receiving threads do not preempt the senders that they wait for."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from autoshard.runtime import gloo_threads
from autoshard.runtime.gloo_threads import keep_gloo_from_preempting
from autoshard.runtime.group import WorkerGroup
from tests.distributed import gloo_thread_cases

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="scheduling policies of Linux")

Groups = dict[int, WorkerGroup]


def test_every_group_that_is_opened_has_a_thread_that_does_not_preempt(groups: Groups) -> None:
    for (first, _), (second, others) in groups[2].run(gloo_thread_cases.as_opened):
        assert first.keys() == {os.SCHED_BATCH}
        assert second == {os.SCHED_BATCH: first[os.SCHED_BATCH] + 1}
        assert others == {os.SCHED_OTHER}


def test_the_policy_can_be_put_back_and_is_changed_only_where_it_differs(groups: Groups) -> None:
    for off, still_off, on, still_on in groups[2].run(gloo_thread_cases.switched):
        num_threads = off[0]
        assert num_threads >= 1
        assert off[1][0] == still_off[1][0] == {os.SCHED_OTHER: num_threads}
        assert on[1][0] == still_on[1][0] == {os.SCHED_BATCH: num_threads}
        assert (still_off[0], on[0], still_on[0]) == (0, num_threads, 0)
        assert all(others == {os.SCHED_OTHER} for _, (_, others) in (off, still_off, on, still_on))


def test_a_policy_that_somebody_chose_is_kept(groups: Groups) -> None:
    expected = [(0, os.SCHED_IDLE)] * 2
    assert groups[2].run(gloo_thread_cases.beside_another_policy) == expected


def test_without_proc_nothing_happens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gloo_threads, "_THREADS", tmp_path / "nowhere")
    assert keep_gloo_from_preempting() == 0


def test_a_refusal_is_no_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / str(os.getpid())).mkdir()
    (tmp_path / str(os.getpid()) / "comm").write_text("gloo_tcp_loop\n")

    def refuse(*arguments: object) -> None:
        raise PermissionError(1, "refused")

    monkeypatch.setattr(gloo_threads, "_THREADS", tmp_path)
    monkeypatch.setattr(os, "sched_setscheduler", refuse)
    assert keep_gloo_from_preempting() == 0
