"""Bad ids, empty and uneven data, memory, faults of ranks: what a user meets at the edges."""

from __future__ import annotations

import copy
import os
import random
import time

import pytest
import torch

from autoshard.errors import WorkerError
from autoshard.problem import Optimizer
from autoshard.runtime.collectives import CollectiveError
from autoshard.runtime.group import WorkerGroup
from autoshard.runtime.ids import IdsMode
from autoshard.tables import Table
from tests.distributed import runtime_cases
from tests.distributed.model_cases import make_plan, random_case, reference_of
from tests.distributed.runtime_cases import Case
from tests.reference_trainer import ReferenceBatch

Groups = dict[int, WorkerGroup]


def two_table_case(kinds: list[str], bags: list[list[list[list[int]]]]) -> Case:
    """Tables `small` (5 rows) and `large` (50 rows) look up feature `f`; `bags[rank][step]`."""
    tables = [
        Table(name=n, num_embeddings=r, embedding_dim=4, pooling_factor=1, feature_names=("f",))
        for n, r in (("large", 50), ("small", 5))
    ]
    batches = [[ReferenceBatch({"f": step}, {}) for step in own] for own in bags]
    return Case(
        make_plan(tables, kinds, len(bags)),
        batches,
        {"large/f": torch.ones(4), "small/f": torch.full((4,), 2.0)},
        {"large": torch.zeros(50, 4), "small": torch.zeros(5, 4)},
    )


@pytest.mark.parametrize("kind", ["0", "1", "dp"])
@pytest.mark.parametrize("bad", [7, -1])
def test_fatal_mode_stops_every_rank_by_name(groups: Groups, kind: str, bad: int) -> None:
    case = two_table_case(["dp", kind], [[[[1, 2]]], [[[3, bad, 4]]]])
    if bad == -1:  # below every table's range: the first table in the runtime's order is named
        case = two_table_case([kind, kind], [[[[1, 2]]], [[[3, bad, 4]]]])
    messages = groups[2].run(runtime_cases.fatal_messages, case)
    assert messages[0] == messages[1]
    assert messages[0].startswith(
        "InputError: rank 1, step 0: an id of feature 'f' is out of range"
    )
    assert f"got: {bad};" in messages[0]
    assert ("table 'small'" if bad == 7 else "table 'large'") in messages[0]


@pytest.mark.parametrize("kind", ["0", "dp"])
@pytest.mark.parametrize("mode", [IdsMode.WARNING, IdsMode.IGNORE])
def test_other_modes_look_row_0_up(groups: Groups, kind: str, mode: IdsMode) -> None:
    case = two_table_case(["0", kind], [[[[1, 7]]], [[[3, 70, -9]]]])
    case.ids_mode = mode
    outcomes = groups[2].run(runtime_cases.train, case)
    # 70 and -9 are out of range for both tables, 7 for `small` only.
    want = [1, 4] if mode is IdsMode.WARNING else [0, 0]
    assert [outcome.num_out_of_range for outcome in outcomes] == want
    weights = {n: w for outcome in outcomes for n, w in outcome.weights.items()}
    # SGD with learning rate 1/4 and gradients over 2 ranks: 1/8 per occurrence.
    assert weights["large"][[0, 1, 3, 7], 0].tolist() == [-0.25, -0.125, -0.125, -0.125]
    assert weights["small"][[0, 1, 3], 0].tolist() == [-0.75, -0.25, -0.25]


@pytest.mark.parametrize("kinds", ["tw", "dp", "mixed"])
def test_empty_batches_are_normal(groups: Groups, kinds: str) -> None:
    case = random_case(random.Random(2), 3, Optimizer.ROWWISE_ADAGRAD, kinds=kinds, num_steps=3)
    features = case.batches[0][0].bags
    nothing = ReferenceBatch({f: [] for f in features}, {f: [] for f in features})
    hollow = ReferenceBatch({f: [[], []] for f in features}, {f: [[], []] for f in features})
    case.batches[0][0] = nothing
    for rank in range(3):
        case.batches[rank][1] = nothing
        case.batches[rank][2] = hollow
    outcomes = groups[3].run(runtime_cases.train, case)
    trainer = reference_of(case)
    for step in range(3):
        trainer.step([own[step] for own in case.batches], case.coefficients)
    for outcome in outcomes:
        for name, weights in outcome.weights.items():
            torch.testing.assert_close(weights, trainer.tables[name].weights, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("as_generator", [False, True])
def test_uneven_data_stop_all_ranks_at_the_shortest(groups: Groups, as_generator: bool) -> None:
    case = two_table_case(["0", "dp"], [[[[1]]] * 5, [[[2]]] * 3])
    case.as_generator = as_generator
    outcomes = groups[2].run(runtime_cases.train, case)
    assert [len(outcome.losses) for outcome in outcomes] == [3, 3]
    # A generator does not tell how many are left, only that one was drawn in vain.
    assert [o.unused_batches for o in outcomes] == ([1, 0] if as_generator else [2, 0])
    assert outcomes[0].unused_is_exact is not as_generator


def test_integer_types_may_be_mixed(groups: Groups) -> None:
    case = random_case(random.Random(9), 2, Optimizer.SGD)
    mixed = copy.copy(case)
    mixed.id_dtype, mixed.length_dtype = torch.int32, torch.int64
    other = copy.copy(case)
    other.id_dtype, other.length_dtype = torch.int64, torch.int32
    want = groups[2].run(runtime_cases.train, case)
    for variant in (mixed, other):
        for got, expected in zip(groups[2].run(runtime_cases.train, variant), want, strict=True):
            for name, weights in expected.weights.items():
                assert torch.equal(got.weights[name], weights)


def test_a_batch_beyond_the_plan_stops_everybody(groups: Groups) -> None:
    case = two_table_case(["0", "dp"], [[[[1]]], [[[1]] * 5]])
    messages = groups[2].run(runtime_cases.fatal_messages, case)
    assert "rank 0, step 0: rank 1 failed to prepare its batch" in messages[0]
    assert messages[1].startswith("InputError: rank 1: the batch is larger than the plan allows")


def test_a_missing_feature_is_named(groups: Groups) -> None:
    case = two_table_case(["0", "1"], [[[[1]]], [[[1]]]])
    case.batches[0][0] = ReferenceBatch({"other": [[1]]}, {})
    messages = groups[2].run(runtime_cases.fatal_messages, case)
    assert "lacks features of the plan; got: ['f']" in messages[0]
    assert "rank 0 failed" in messages[1]


def test_ranks_with_different_plans_are_found_out(groups: Groups) -> None:
    bags = [[[[1]]], [[[1]]]]
    cases = [two_table_case(kinds, bags) for kinds in (["0", "1"], ["1", "1"])]
    messages = groups[2].run(runtime_cases.different_plans, cases)
    for rank, message in enumerate(messages):
        assert f"rank {rank}: rank {1 - rank} was given another plan" in message


def test_a_rank_holds_its_own_tables_only(groups: Groups) -> None:
    tables = [
        Table(name="a", num_embeddings=1000, embedding_dim=8, pooling_factor=1),
        Table(name="b", num_embeddings=500, embedding_dim=6, pooling_factor=1),
        Table(name="c", num_embeddings=100, embedding_dim=4, pooling_factor=1),
    ]
    batch = ReferenceBatch({"a": [[1]], "b": [[2]], "c": [[3]]}, {})
    coefficients = {f"{n}/{n}": torch.ones(d) for n, d in (("a", 8), ("b", 6), ("c", 4))}
    plan = make_plan(tables, ["0", "1", "dp"], 2, Optimizer.ROWWISE_ADAGRAD)
    outcomes = groups[2].run(runtime_cases.train, Case(plan, [[batch], [batch]], coefficients))
    assert [set(outcome.weights) for outcome in outcomes] == [{"a", "c"}, {"b", "c"}]
    # Padded fp32 columns and one fp32 state per row.
    replica = 100 * (4 * 4 + 4)
    want = [1000 * (8 * 4 + 4) + replica, 500 * (8 * 4 + 4) + replica]
    assert [outcome.allocated_bytes for outcome in outcomes] == want


def test_each_step_has_one_collective_per_phase(groups: Groups) -> None:
    bags = [[[[1]]], [[[1]]]]
    mixed, replicated = (
        groups[2].run(runtime_cases.train, two_table_case(kinds, bags))[0].phases[0]
        for kinds in (["0", "dp"], ["dp", "dp"])
    )
    assert mixed == {"lengths", "ids", "outputs", "gradients", "dense"}
    assert replicated == {"control", "gradients", "dense"}


def test_clock_offsets_of_one_host_are_small(groups: Groups) -> None:
    offsets = groups[2].run(runtime_cases.clock_offsets)
    assert offsets[0] == offsets[1]
    assert offsets[0][0] == 0
    assert abs(offsets[0][1]) < 1_000_000_000


def alive(process_ids: tuple[int, ...]) -> list[int]:
    found = []
    for process_id in process_ids:
        try:
            os.kill(process_id, 0)
        except ProcessLookupError:
            continue
        found.append(process_id)
    return found


def test_a_killed_rank_takes_the_others_down_by_name(groups: Groups) -> None:
    group = groups[2]
    process_ids = group.process_ids
    start = time.monotonic()
    with pytest.raises(WorkerError, match=r"rank 1 .* was killed by SIGKILL after: step 7"):
        group.run(runtime_cases.die, 1)
    assert time.monotonic() - start < 30
    assert not alive(process_ids)
    with pytest.raises(WorkerError, match="closed"):
        group.run(runtime_cases.die, 1)


def test_an_unexpected_fault_comes_with_its_cause(groups: Groups) -> None:
    group = groups[2]
    process_ids = group.process_ids
    with pytest.raises(WorkerError, match="rank 0 failed: ZeroDivisionError: a fault of this rank"):
        group.run(runtime_cases.fail, 0)
    assert not alive(process_ids)


def test_a_silent_rank_is_waited_for_only_so_long() -> None:
    case = two_table_case(["0", "1"], [[[[1]], [[1]]], [[[1]], [[1]]]])
    start = time.monotonic()
    with (
        WorkerGroup(2, timeout_s=8) as group,
        pytest.raises(CollectiveError, match=r"rank 0, step 1, phase lengths: .* within 8 s"),
    ):
        group.run(runtime_cases.hang, 1, case)
    assert time.monotonic() - start < 60
