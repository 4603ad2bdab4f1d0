"""Steps as users take them apart: evaluation between them, ids ahead, other learning rates."""

from __future__ import annotations

import random

import pytest
import torch

from autoshard.problem import Optimizer
from autoshard.runtime.group import WorkerGroup
from tests.distributed import step_cases
from tests.distributed.equality_checks import assembled, check_equal
from tests.distributed.model_cases import (
    CPU_OPTIMIZERS,
    SHARDING_TYPES,
    describe,
    random_case,
    reference_of,
    two_table_case,
)
from tests.distributed.runtime_cases import per_case, run_ranks

Groups = dict[int, WorkerGroup]


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_evaluation_between_steps_changes_nothing(groups: Groups, world_size: int) -> None:
    cases = [
        random_case(random.Random(f"eval/{kind.value}"), world_size, optimizer, kinds=[kind])
        for kind, optimizer in zip(SHARDING_TYPES, CPU_OPTIMIZERS * 2, strict=True)
    ]
    ranks = run_ranks(groups, world_size, step_cases.train_and_evaluate, cases)
    for case, of_ranks in zip(cases, zip(*ranks, strict=True), strict=True):
        check_equal(case, [outcome for outcome, _, _ in of_ranks])
        for outcome, evaluated, wants_gradient in of_ranks:
            assert not wants_gradient
            for trained, looked_up in zip(outcome.outputs, evaluated, strict=True):
                for name, value in trained.items():
                    torch.testing.assert_close(looked_up[name], value, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("world_size", [1, 3])
def test_ids_may_be_sent_ahead(groups: Groups, world_size: int) -> None:
    cases = [
        random_case(random.Random(f"ahead/{kind.value}"), world_size, optimizer, kinds=[kind])
        for kind, optimizer in zip(SHARDING_TYPES, CPU_OPTIMIZERS * 2, strict=True)
    ]
    ranks = run_ranks(groups, world_size, step_cases.train_with_ids_ahead, cases)
    for case, outcomes in zip(cases, per_case(ranks), strict=True):
        check_equal(case, outcomes)


def test_outputs_that_no_loss_uses_get_no_update(groups: Groups) -> None:
    """Only `small` enters the loss; the gradient of `large` is missing, not wrong."""
    bags = [[[[1, 4], [2]]], [[[4]]]]
    cases = [two_table_case([kind, kind], bags) for kind in SHARDING_TYPES]
    ranks = groups[2].run(step_cases.train_on_one_output, cases, "f@small")
    for case, outcomes in zip(cases, per_case(ranks), strict=True):
        whole = assembled(case.plan, outcomes)
        assert not whole["large"][0].any()
        # Learning rate 1/4, 2 ranks; rank 0 has two samples: 1/16 each, rank 1's 1/8.
        want = [0, -0.0625, -0.0625, 0, -0.1875]
        assert whole["small"][0][:, 3].tolist() == want


def test_input_dist_ends_at_the_shortest_rank(groups: Groups) -> None:
    bags = [[[[1]]] * 3, [[[2]]] * 1, [[[0]]] * 2]
    cases = [two_table_case([kind, kind], bags) for kind in SHARDING_TYPES]
    for own in groups[3].run(step_cases.end_of_data, cases):
        assert own == [[True, False]] * len(SHARDING_TYPES)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_step_is_used_once(groups: Groups, world_size: int) -> None:
    bags = [[[[1]]]] * world_size
    cases = [two_table_case([kind, kind], bags) for kind in SHARDING_TYPES]
    for own in run_ranks(groups, world_size, step_cases.misuse, cases):
        for lookup, backward in own:
            assert lookup == "InputError: a StepInput can be looked up only once"
            assert backward == "InputError: the fused backward can run only once per step"


def test_ranks_that_disagree_about_gradients_are_found_out(groups: Groups) -> None:
    case = two_table_case(["0", "dp"], [[[[1]]], [[[1]]]])
    messages = groups[2].run(step_cases.one_rank_without_gradients, case)
    for rank, message in enumerate(messages):
        assert f"rank {rank}, step 0: rank {1 - rank} runs another step" in message


@pytest.mark.parametrize("world_size", [1, 2])
def test_lookups_in_inference_mode_change_nothing(groups: Groups, world_size: int) -> None:
    cases = [
        random_case(random.Random(f"inference/{kind.value}"), world_size, optimizer, kinds=[kind])
        for kind, optimizer in zip(SHARDING_TYPES, CPU_OPTIMIZERS * 2, strict=True)
    ]
    ranks = run_ranks(groups, world_size, step_cases.infer_and_train, cases)
    for case, outcomes in zip(cases, per_case(ranks), strict=True):
        check_equal(case, outcomes)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("optimizer", CPU_OPTIMIZERS)
def test_the_learning_rate_may_change(
    groups: Groups, optimizer: Optimizer, world_size: int
) -> None:
    rates = (0.5, 0.125, 0.0)
    cases = [
        random_case(random.Random(f"rate/{kind.value}"), world_size, optimizer, kinds=[kind])
        for kind in SHARDING_TYPES
    ]
    ranks = run_ranks(groups, world_size, step_cases.train_at_other_rates, cases, rates)
    for case, outcomes in zip(cases, per_case(ranks), strict=True):
        trainer = reference_of(case)
        for step, rate in enumerate(rates):
            trainer.learning_rate = rate
            trainer.step([own[step] for own in case.batches], case.coefficients)
        for name, (weights, _) in assembled(case.plan, outcomes).items():
            torch.testing.assert_close(
                weights, trainer.tables[name].weights, rtol=2e-5, atol=2e-6, msg=describe(case)
            )


@pytest.mark.parametrize("world_size", [1, 2])
def test_outputs_may_be_changed_in_place(groups: Groups, world_size: int) -> None:
    """As those of `nn.EmbeddingBag` may: here they are doubled, so that gradients double."""
    cases = []
    for kind, optimizer in zip(SHARDING_TYPES, CPU_OPTIMIZERS * 2, strict=True):
        rng = random.Random(f"in place/{kind.value}")
        cases.append(random_case(rng, world_size, optimizer, kinds=[kind], num_steps=1))
        cases[-1].coefficients.pop("quadratic")
    ranks = run_ranks(groups, world_size, step_cases.train_on_doubled_outputs, cases)
    for case, outcomes in zip(cases, per_case(ranks), strict=True):
        trainer = reference_of(case)
        doubled = {name: 2 * value for name, value in case.coefficients.items()}
        trainer.step([own[0] for own in case.batches], doubled)
        for name, (weights, _) in assembled(case.plan, outcomes).items():
            torch.testing.assert_close(
                weights, trainer.tables[name].weights, rtol=2e-5, atol=2e-6, msg=describe(case)
            )
