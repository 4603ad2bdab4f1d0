"""Ranks that are killed, fail, fall silent or disagree: the others stop by name, in time."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.errors import WorkerError
from autoshard.plan import ShardingPlan
from autoshard.problem import Optimizer
from autoshard.runtime.group import WorkerGroup
from autoshard.runtime.timing import Phase
from autoshard.shards import ShardingType
from autoshard.tables import Table
from tests.distributed import fault_cases, runtime_cases
from tests.distributed.model_cases import SHARDING_TYPES, make_plan, random_case
from tests.distributed.runtime_cases import Case
from tests.reference_trainer import ReferenceBatch

Groups = dict[int, WorkerGroup]


def two_step_case(world_size: int) -> Case:
    """Every sharding type, two steps."""
    rng = random.Random("faults")
    tables = [
        Table(name=kind.value, num_embeddings=7, embedding_dim=5, pooling_factor=1)
        for kind in SHARDING_TYPES
    ]
    case = random_case(rng, world_size, Optimizer.ADAGRAD, tables=tables, num_steps=2)
    case.plan = make_plan(tables, SHARDING_TYPES, world_size, Optimizer.ADAGRAD)
    return case


def alive(process_ids: tuple[int, ...]) -> list[int]:
    found = []
    for process_id in process_ids:
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            continue
        found.append(process_id)
    return found


@pytest.mark.parametrize(
    ("rank", "phase", "step"),
    [(1, None, 0), (0, Phase.IDS, 1), (1, Phase.OUTPUTS, 0), (2, Phase.GRADIENTS, 1)],
)
def test_a_killed_rank_takes_the_others_down_by_name(
    groups: Groups, rank: int, phase: Phase | None, step: int
) -> None:
    world_size = 3 if rank == 2 else 2
    group = groups[world_size]
    process_ids = group.process_ids
    start = time.monotonic()
    with pytest.raises(
        WorkerError, match=rf"rank {rank} .* was killed by SIGKILL after: step {step} of 20"
    ):
        group.run(fault_cases.kill_at, two_step_case(world_size), rank, phase, step)
    assert time.monotonic() - start < 30
    assert not alive(process_ids)
    with pytest.raises(WorkerError, match="closed"):
        group.run(fault_cases.clock_offsets)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_stopped_rank_is_named_by_those_that_wait_for_it(world_size: int) -> None:
    with WorkerGroup(world_size, timeout_s=3.0) as group:
        process_ids = group.process_ids
        with pytest.raises(
            WorkerError,
            match=rf"nothing is heard from rank 1 \(process {process_ids[1]}, stopped by a signal\)"
            r" after: step 1 of 20; got: from another rank: rank [02], step 1, phase ids: the coll",
        ):
            group.run(fault_cases.stop_at, two_step_case(world_size), [1], 1)
    assert not alive(process_ids)


def test_a_rank_that_is_stopped_before_it_joins_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    group = WorkerGroup(2, timeout_s=3.0)
    stopped: list[int] = []
    collect = group._collect

    def stop_one(progress: None) -> list[object]:
        stopped.append(group.process_ids[0])
        os.kill(stopped[0], signal.SIGSTOP)
        return collect(progress)

    monkeypatch.setattr(group, "_collect", stop_one)
    with pytest.raises(
        WorkerError, match=r"nothing is heard from rank 0 \(process \d+, stopped by a signal\)"
    ):
        group.__enter__()
    assert not alive(tuple(stopped))


def test_when_no_rank_answers_all_are_named() -> None:
    with (
        WorkerGroup(2, timeout_s=60.0, stall_timeout_s=4.0) as group,
        pytest.raises(
            WorkerError,
            match=r"no rank answered for 4 s; got: silent are rank 0 \(process \d+, stopped by a "
            r"signal\) after: step 0 of 20; rank 1 \(process \d+, stopped by a signal\) after",
        ),
    ):
        group.run(fault_cases.stop_at, two_step_case(2), [0, 1], 0)


PARENT = """
import time
from autoshard.runtime.group import WorkerGroup

if __name__ == "__main__":
    with WorkerGroup(2) as group:
        print(*group.process_ids, flush=True)
        time.sleep(300)
"""


def test_a_killed_parent_leaves_neither_processes_nor_files(tmp_path: Path) -> None:
    script, temporary = tmp_path / "parent.py", tmp_path / "temporary"
    script.write_text(PARENT)
    temporary.mkdir()
    parent = subprocess.Popen(
        [sys.executable, str(script)],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary)},
    )
    try:
        assert parent.stdout is not None
        process_ids = tuple(map(int, parent.stdout.readline().split()))
        assert len(process_ids) == 2
        assert list(temporary.iterdir())
    finally:
        parent.kill()
        parent.wait()
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline and (alive(process_ids) or list(temporary.iterdir())):
        time.sleep(0.1)
    assert not alive(process_ids)
    assert not list(temporary.iterdir())


def test_an_unexpected_fault_comes_with_its_cause(groups: Groups) -> None:
    group = groups[2]
    process_ids = group.process_ids
    with pytest.raises(WorkerError, match="rank 0 failed: ZeroDivisionError: a fault of this rank"):
        group.run(fault_cases.fail, 0)
    assert not alive(process_ids)


def test_a_silent_rank_is_waited_for_only_so_long(groups: Groups) -> None:
    phases = (Phase.IDS, Phase.OUTPUTS, Phase.GRADIENTS)
    messages = groups[2].run(fault_cases.stall_at, two_step_case(2), 1, phases, 2.0)
    for phase, message in zip(phases, messages[0], strict=True):
        assert message.startswith(
            f"CollectiveError: rank 0, step 1, phase {phase.value}: the collective failed or did "
            f"not end within 2 s"
        )
    assert messages[1] == ["WorkerError: this rank was silent"] * len(phases)


@pytest.mark.parametrize("world_size", [2, 3])
def test_a_rank_that_skips_a_backward_is_an_error_on_every_rank(
    groups: Groups, world_size: int
) -> None:
    """In one process group, gloo would end the processes: the sizes of the messages differ."""
    rng = random.Random("skipped")
    tables = [
        Table(name=kind.value, num_embeddings=7, embedding_dim=5, pooling_factor=1)
        for kind in SHARDING_TYPES
    ]
    case = random_case(rng, world_size, Optimizer.SGD, tables=tables, num_steps=4)
    messages = groups[world_size].run(fault_cases.skip_a_backward, case, 1, 2.0)
    places = [
        "step 2, phase ids" if rank == 1 else "step 1, phase gradients"
        for rank in range(world_size)
    ]
    for rank, (place, message) in enumerate(zip(places, messages, strict=True)):
        assert message.startswith(f"CollectiveError: rank {rank}, {place}: the collective failed")


def plan_with(tables: list[Table], **changes: object) -> ShardingPlan:
    plan = make_plan(tables, ["dp", ShardingType.ROW_WISE], 2)
    return replace(plan, training=replace(plan.training, **changes))  # type: ignore[arg-type]


def test_ranks_with_different_plans_are_found_out(groups: Groups) -> None:
    tables = [
        Table(name=name, num_embeddings=8, embedding_dim=4, pooling_factor=1) for name in "ab"
    ]
    plan = plan_with(tables)
    others = {
        "shards": make_plan(tables, ["dp", "0"], 2),
        "rows": plan_with([tables[0], replace(tables[1], num_embeddings=9)]),
        "columns": plan_with([replace(tables[0], embedding_dim=5), tables[1]]),
        "features": plan_with([replace(tables[0], feature_names=("b",)), tables[1]]),
        "order": replace(plan, tables=plan.tables[::-1]),
        "learning rate": plan_with(tables, learning_rate=0.5),
        "optimizer": plan_with(tables, optimizer=Optimizer.ADAGRAD),
        "batch size": plan_with(tables, batch_size=3),
    }
    batch = ReferenceBatch({"a": [[1]], "b": [[1]]}, {})
    cases = [[Case(p, [[batch], [batch]]) for p in (plan, other)] for other in others.values()]
    per_rank = [[pair[rank] for pair in cases] for rank in range(2)]
    messages = groups[2].run(runtime_cases.messages_of_ranks, per_rank)
    for rank in range(2):
        for what, message in zip(others, messages[rank], strict=True):
            assert f"rank {rank}: rank {1 - rank} was given another plan" in message, what


def test_clock_offsets_of_one_host_are_small(groups: Groups) -> None:
    offsets = groups[2].run(fault_cases.clock_offsets)
    assert offsets[0] == offsets[1]
    assert offsets[0][0] == 0
    assert abs(offsets[0][1]) < 1_000_000_000
