"""The pipelined loop against the plain one: same numbers, same batches, same errors."""

from __future__ import annotations

import random
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

import pytest
import torch

from autoshard.errors import InputError, WorkerError
from autoshard.problem import Optimizer
from autoshard.runtime import pipelined_loop
from autoshard.runtime.collectives import Collectives
from autoshard.runtime.dense import TrainingBatch
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.group import WorkerGroup
from autoshard.runtime.input_streams import tensors_in
from autoshard.runtime.pipelined_loop import PipelinedLoop
from autoshard.shards import ShardingType
from autoshard.tables import Table
from tests.distributed import pipeline_cases
from tests.distributed.model_cases import CPU_OPTIMIZERS, make_plan, random_case, reference_of
from tests.distributed.pipeline_cases import LOOPS, numbered
from tests.distributed.runtime_cases import Case, alone, run_ranks

Groups = dict[int, WorkerGroup]


def one_table_case(world_size: int, kind: str | ShardingType = ShardingType.ROW_WISE) -> Case:
    """Table t, 50 rows of zeros, feature f."""
    table = Table(
        name="t", num_embeddings=50, embedding_dim=4, pooling_factor=1, feature_names=("f",)
    )
    return pipeline_cases.plan_of_one_table(make_plan([table], [kind], world_size))


def dense_layers(widths: list[int], seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """`DenseHead`'s documented start: uniform in ±1/sqrt(fan-in), layer by layer."""
    generator = torch.Generator().manual_seed(seed)
    layers = []
    for fan_in, fan_out in pairwise(widths):
        bound = fan_in**-0.5
        weight = torch.empty(fan_out, fan_in).uniform_(-bound, bound, generator=generator)
        bias = torch.empty(fan_out).uniform_(-bound, bound, generator=generator)
        layers.append((weight, bias))
    return layers


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_all_loops_compute_what_one_process_does(groups: Groups, world_size: int) -> None:
    cases = [
        random_case(random.Random(7 + index), world_size, optimizer, num_steps=5)
        for index, optimizer in enumerate(CPU_OPTIMIZERS)
    ]
    plain, pipelined, serial = (
        run_ranks(groups, world_size, pipeline_cases.train_with, kind, cases) for kind in LOOPS
    )
    for index, case in enumerate(cases):
        widths = [sum(t.table.embedding_dim * len(t.table.feature_names) for t in case.plan.tables)]
        trainer = reference_of(case, dense_layers([*widths, 6, 1], seed=3))
        steps = [[own[step] for own in case.batches] for step in range(5)]
        want = [trainer.step(batches, {}) for batches in steps * 2]
        got = [sum(r[index].losses[step] for r in plain) / world_size for step in range(10)]
        torch.testing.assert_close(torch.tensor(got), torch.tensor(want), rtol=1e-4, atol=1e-5)
        for rank in range(world_size):
            mine = plain[rank][index]
            weights = [w.detach() for layer in trainer.dense for w in layer]
            torch.testing.assert_close(mine.dense, weights, rtol=1e-4, atol=1e-5)
            for other in (pipelined[rank][index], serial[rank][index]):
                assert other.losses == mine.losses
                assert torch.equal(other.logits_N, mine.logits_N)
                assert other.evaluation_loss == mine.evaluation_loss
                assert all(map(torch.equal, other.dense, mine.dense))
                for held, expected in zip(other.shards, mine.shards, strict=True):
                    assert torch.equal(held.weights, expected.weights)
                    assert all(torch.equal(held.states[n], s) for n, s in expected.states.items())


def test_only_the_plain_loop_records_the_terms(groups: Groups) -> None:
    case = random_case(
        random.Random(1), 2, Optimizer.SGD, kinds=[ShardingType.TABLE_WISE], num_steps=2
    )
    plain, pipelined = (
        groups[2].run(pipeline_cases.train_with, kind, [case])[0][0].phases
        for kind in ("plain", "pipelined")
    )
    # Although the input has a process group of its own.
    assert {"ids", "outputs", "gradients"} <= plain
    assert not pipelined


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_every_batch_is_used_once_and_in_order(groups: Groups, world_size: int, kind: str) -> None:
    case = one_table_case(world_size)
    for usage in run_ranks(groups, world_size, pipeline_cases.train_in_pieces, kind, case):
        assert usage.seen == [0, 1, 2, 20, 21, 3, 4, 5, 6, 30, 7, 8, 9]
        assert usage.taken == [3, 3, 7, 10]
        assert [len(result.losses) for result in usage.results] == [3, 0, 4, 3]
        assert [len(result.records) for result in usage.results] == [3, 0, 2, 3]
        assert all(r.end_ns > r.start_ns for result in usage.results for r in result.records)
        assert usage.progress == [1, 2, 3, 1, 2, 3, 4, 1, 2, 3]
        assert not any(result.stopped_early for result in usage.results)


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("num_steps", [None, 9])
def test_all_ranks_stop_at_the_shortest(groups: Groups, kind: str, num_steps: int | None) -> None:
    found = groups[2].run(pipeline_cases.train_unevenly, kind, one_table_case(2), [6, 4], num_steps)
    for usage, evaluation in found:
        assert usage.seen == [0, 1, 2, 3]
        assert evaluation.num_steps == 4
    results = [usage.results[0] for usage, _ in found]
    assert [result.unused_batches for result in results] == [2, 0]
    # Without a number of steps, the rank that used all of its batches did not stop early.
    assert [result.stopped_early for result in results] == [True, num_steps is not None]
    assert [evaluation.unused_batches for _, evaluation in found] == [2, 0]
    assert [evaluation.stopped_early for _, evaluation in found] == [True, False]


@pytest.mark.parametrize("kind", LOOPS[:2])
def test_a_rank_without_batches_stops_all(groups: Groups, kind: str) -> None:
    for usage, evaluation in groups[2].run(
        pipeline_cases.train_unevenly, kind, one_table_case(2), [0, 2], None
    ):
        assert usage.seen == []
        assert evaluation.num_steps == 0
        assert evaluation.loss != evaluation.loss  # nan
        assert evaluation.logits_N.shape == evaluation.labels_N.shape == (0,)


@pytest.mark.parametrize("world_size", [1, 2])
def test_epochs_of_a_loader_with_persistent_workers(groups: Groups, world_size: int) -> None:
    for seen in run_ranks(
        groups, world_size, pipeline_cases.train_epochs, "pipelined", one_table_case(world_size)
    ):
        assert seen == [[0, 1, 2, 3, 4], [0, 1], [0, 1, 2, 3, 4]]


@pytest.mark.parametrize("kind", [ShardingType.ROW_WISE, "dp"])
def test_the_next_ids_travel_while_a_step_runs(groups: Groups, kind: str | ShardingType) -> None:
    case = one_table_case(2, kind)
    for met in groups[2].run(pipeline_cases.overlap, "pipelined", case):
        assert met == [True, True, True]
    for met in groups[2].run(pipeline_cases.overlap, "serial", case):
        assert met == [False, False, False]


FAULTS = {
    "source": ("ZeroDivisionError: the source broke", "step 2: rank 1 failed to prepare"),
    "id": ("InputError: rank 1, step 2: an id of feature 'f' is out of range",) * 2,
    "type": ("InputError: item 3 of the batches is not a batch; got: str", "step 2: rank 1 failed"),
    "feature": ("InputError: the batch lacks features", "step 2: rank 1 failed to prepare"),
    "iterable": ("InputError: batches are not iterable; got: int", "step 0: rank 1 failed"),
}


@pytest.mark.parametrize("kind", LOOPS)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_batch_stops_all_ranks_at_its_step(groups: Groups, kind: str, fault: str) -> None:
    case = one_table_case(2)
    (other, *other_rest), (own, *own_rest) = groups[2].run(
        pipeline_cases.fault_messages, kind, case, fault
    )
    of_own, of_other = FAULTS[fault]
    assert of_own in own
    assert of_other in other
    assert own_rest == other_rest == [0 if fault == "iterable" else 2, []]


def test_a_bad_batch_stops_an_evaluation_too(groups: Groups) -> None:
    found = groups[2].run(
        pipeline_cases.fault_messages, "pipelined", one_table_case(2), "source", True
    )
    assert [steps for _, steps, _ in found] == [2, 2]
    assert "ZeroDivisionError" in found[1][0]
    assert "step 2: rank 1 failed" in found[0][0]


def test_a_source_that_never_answers_is_waited_for_only_so_long() -> None:
    start = time.monotonic()
    with (
        WorkerGroup(2, timeout_s=3) as group,
        pytest.raises(
            WorkerError, match=r"heard from rank 1 .*: rank 0, step 2, phase ids: .* within 3 s"
        ),
    ):
        group.run(pipeline_cases.hold_the_source, "pipelined", one_table_case(2))
    assert time.monotonic() - start < 60


def test_an_error_of_the_layers_does_not_wait_for_the_source(groups: Groups) -> None:
    for message, left_alone, after in groups[2].run(
        pipeline_cases.fail_while_the_source_works, one_table_case(2)
    ):
        assert message == "ZeroDivisionError: the layers broke"
        assert left_alone
        assert after == "[0, 1, 2] []"


BLOCKED = """
import threading
from tests.distributed import pipeline_cases as c
from tests.distributed.runtime_cases import alone
from tests.distributed.test_runtime_pipeline import one_table_case

asked = threading.Event()
def source():
    yield c.numbered(0)
    yield c.numbered(1)
    asked.set()
    threading.Event().wait()

process = alone()
loop = c.make_loop("pipelined", process, c.build(process, one_table_case(1)), c.Failing(asked))
loop.train_steps(source(), num_steps=None)
"""


def test_a_blocked_source_does_not_keep_the_process_alive() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", BLOCKED], capture_output=True, text=True, timeout=90, check=False
    )
    assert ended.returncode == 1
    assert "ZeroDivisionError: the layers broke" in ended.stderr


def test_a_blocked_source_is_waited_for_only_so_long(monkeypatch: pytest.MonkeyPatch) -> None:
    released = threading.Event()

    def source() -> Iterator[TrainingBatch]:
        yield numbered(0)
        released.wait(60)

    monkeypatch.setattr(pipelined_loop, "stall_timeout_s", lambda timeout_s: timeout_s / 100)
    process = alone()
    embeddings = pipeline_cases.build(process, one_table_case(1))
    loop = pipeline_cases.make_loop("pipelined", process, embeddings, pipeline_cases.Tracing())
    try:
        with pytest.raises(WorkerError, match=r"rank 0, step 1: the source .* none for 0.6 s"):
            loop.train_steps(source(), num_steps=None)
    finally:
        released.set()


def test_the_input_needs_a_group_of_its_own() -> None:
    process = alone()
    embeddings = ShardedEmbeddings(one_table_case(1).plan, process.collectives)
    with pytest.raises(InputError, match=r"input_collectives=collectives.new_group\(\)"):
        PipelinedLoop(embeddings, pipeline_cases.Tracing(), None, process.collectives)


@pytest.mark.parametrize("number", [-1, 2.0, True])
def test_numbers_of_steps_are_checked(number: object) -> None:
    process = alone()
    embeddings = pipeline_cases.build(process, one_table_case(1))
    loop = pipeline_cases.make_loop("pipelined", process, embeddings, pipeline_cases.Tracing())
    with pytest.raises(InputError, match="number of steps"):
        loop.train_steps([], num_steps=number)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="number of steps"):
        loop.train_steps([], num_steps=1, warmup_steps=number)  # type: ignore[arg-type]


def test_every_tensor_of_a_prepared_batch_is_found() -> None:
    """What is not found would not be kept from being overwritten on CUDA."""
    process = alone()
    step_input = pipeline_cases.build(process, one_table_case(1)).input_dist(numbered(7).sparse)
    assert step_input is not None
    found = {t.data_ptr() for t in tensors_in(step_input)}
    assert {t.data_ptr() for received in step_input.ids for t in received.pieces} <= found
    assert {s.ids.lengths_EB.data_ptr() for s in step_input.states} <= found
    assert {t.data_ptr() for t in tensors_in([{"a": (torch.ones(1),)}, None])} != set()


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_streams_compute_what_the_plain_loop_does() -> None:
    case = random_case(random.Random(5), 1, Optimizer.ROWWISE_ADAGRAD, num_steps=8)
    process = alone()
    device = torch.device("cuda", 0)
    process.collectives = Collectives(0, 1, device=device)
    want, *others = (pipeline_cases.train_with(process, kind, [case])[0] for kind in LOOPS)
    for got in others:
        torch.testing.assert_close(got.losses, want.losses, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(got.dense, want.dense, rtol=1e-5, atol=1e-6)
