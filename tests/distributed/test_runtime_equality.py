"""W ranks give what one process on the concatenated batch gives."""

from __future__ import annotations

import random

import pytest
import torch

from autoshard.plan import plan_from_slices
from autoshard.problem import Optimizer
from autoshard.runtime.dense import DenseHead
from autoshard.runtime.group import WorkerGroup
from autoshard.runtime.layout import layout_of
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import DataType, Table
from tests.distributed import runtime_cases
from tests.distributed.model_cases import (
    EPS,
    LEARNING_RATE,
    make_plan,
    random_case,
    reference_of,
)
from tests.distributed.runtime_cases import Case, Outcome
from tests.reference_trainer import ReferenceBatch

WORLD_SIZES = (1, 2, 3)


def compare(case: Case, outcomes: list[Outcome], *, rtol: float, atol: float) -> None:
    """Compare outputs of every step, final weights and optimizer state with the reference."""
    trainer = reference_of(case)
    for step in range(len(case.batches[0])):
        weights = {n: t.weights.to(torch.float32) for n, t in trainer.tables.items()}
        for rank, outcome in enumerate(outcomes):
            want = trainer.pooled(weights, case.batches[rank][step])
            assert set(want) == set(outcome.outputs[step])
            for name, value in want.items():
                torch.testing.assert_close(
                    outcome.outputs[step][name], value, rtol=rtol, atol=atol, msg=name
                )
        trainer.step([own[step] for own in case.batches], case.coefficients)
    held = set()
    for outcome in outcomes:
        for name, weights in outcome.weights.items():
            held.add(name)
            table = trainer.tables[name]
            torch.testing.assert_close(weights, table.weights, rtol=rtol, atol=atol)
            if table.state is None:
                assert outcome.states[name] is None
            else:
                torch.testing.assert_close(
                    outcome.states[name], table.state, rtol=max(rtol, 1e-5), atol=max(atol, 1e-6)
                )
    assert held == set(trainer.tables)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("kinds", ["tw", "dp", "mixed"])
def test_exact_values_are_equal_to_the_last_bit(
    groups: dict[int, WorkerGroup], world_size: int, kinds: str
) -> None:
    for seed in range(4):
        rng = random.Random(1000 * world_size + seed)
        case = random_case(rng, world_size, Optimizer.SGD, exact=True, kinds=kinds)
        compare(case, groups[world_size].run(runtime_cases.train, case), rtol=0, atol=0)


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ADAGRAD, Optimizer.ROWWISE_ADAGRAD])
def test_random_models_agree(
    groups: dict[int, WorkerGroup], world_size: int, optimizer: Optimizer
) -> None:
    for seed in range(8):
        rng = random.Random(f"{world_size}/{optimizer.value}/{seed}")
        case = random_case(rng, world_size, optimizer)
        compare(case, groups[world_size].run(runtime_cases.train, case), rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ROWWISE_ADAGRAD, Optimizer.ADAGRAD])
def test_half_precision_weights_agree(groups: dict[int, WorkerGroup], optimizer: Optimizer) -> None:
    for world_size in WORLD_SIZES:
        rng = random.Random(f"half/{world_size}/{optimizer.value}")
        case = random_case(rng, world_size, optimizer, data_type=DataType.FP16)
        # One unit in the last place of fp16 per step.
        compare(case, groups[world_size].run(runtime_cases.train, case), rtol=4e-3, atol=4e-3)


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ADAGRAD, Optimizer.ROWWISE_ADAGRAD])
def test_replicas_stay_equal_to_the_last_bit(
    groups: dict[int, WorkerGroup], world_size: int, optimizer: Optimizer
) -> None:
    case = random_case(random.Random(7), world_size, optimizer, kinds="dp", num_steps=6)
    outcomes = groups[world_size].run(runtime_cases.train, case)
    for outcome in outcomes[1:]:
        for name, weights in outcomes[0].weights.items():
            assert torch.equal(weights, outcome.weights[name])
            if outcomes[0].states[name] is not None:
                assert torch.equal(outcomes[0].states[name], outcome.states[name])


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_dense_layers_are_averaged_over_ranks(
    groups: dict[int, WorkerGroup], world_size: int
) -> None:
    case = random_case(random.Random(11), world_size, Optimizer.ROWWISE_ADAGRAD, num_steps=4)
    case.dense_seed = 3
    dims = layout_of(case.plan).output_dims
    layers = [m for m in DenseHead(dims, hidden=(6,), seed=3).layers if hasattr(m, "weight")]
    trainer = reference_of(case, [(m.weight.detach(), m.bias.detach()) for m in layers])
    losses = [
        trainer.step([own[step] for own in case.batches], {})
        for step in range(len(case.batches[0]))
    ]
    outcomes = groups[world_size].run(runtime_cases.train, case)
    mean_losses = [sum(s) / world_size for s in zip(*(o.losses for o in outcomes), strict=True)]
    assert mean_losses == pytest.approx(losses, rel=1e-5)
    for outcome in outcomes:
        for got, want in zip(
            outcome.dense, [p for layer in trainer.dense for p in layer], strict=True
        ):
            torch.testing.assert_close(got, want.detach(), rtol=2e-5, atol=2e-6)
        for name, weights in outcome.weights.items():
            torch.testing.assert_close(weights, trainer.tables[name].weights, rtol=2e-5, atol=2e-6)


def test_one_duplicated_id_is_updated_once(groups: dict[int, WorkerGroup]) -> None:
    """Row 1 four times with gradient 1 each: the state is 4² = 16, not 4 · 1²."""
    table = Table(
        name="t", num_embeddings=3, embedding_dim=4, pooling_factor=1, feature_names=("f",)
    )
    for kind in ("0", "dp"):
        batch = ReferenceBatch({"f": [[1, 1, 1, 1]]}, {})
        case = Case(
            make_plan([table], [kind], 2, Optimizer.ADAGRAD),
            [[batch], [batch]],
            {"t/f": torch.ones(4)},
            {"t": torch.zeros(3, 4)},
        )
        # Two ranks with 4 each, divided by 2 ranks.
        outcome = groups[2].run(runtime_cases.train, case)[0]
        assert torch.equal(outcome.states["t"][1], torch.full((4,), 16.0))
        want = torch.full((4,), -LEARNING_RATE * 4 / (4 + EPS))
        torch.testing.assert_close(outcome.weights["t"][1], want)
        assert torch.equal(outcome.weights["t"][0], torch.zeros(4))


def test_initial_weights_do_not_depend_on_the_plan(groups: dict[int, WorkerGroup]) -> None:
    case = random_case(random.Random(3), 3, Optimizer.SGD, kinds="tw")
    problem = case.plan.problem
    replicated = plan_from_slices(
        problem,
        [
            (ShardSlice.whole(table, ShardingType.DATA_PARALLEL), rank)
            for table in problem.tables
            for rank in range(3)
        ],
    )
    spread = groups[3].run(runtime_cases.initial_weights, case)
    everywhere = groups[3].run(runtime_cases.initial_weights, Case(replicated, case.batches))
    for weights_of_rank in spread:
        for name, weights in weights_of_rank.items():
            assert weights.abs().max() > 0
            for replica in everywhere:
                assert torch.equal(weights, replica[name])


def test_lookup_without_gradients_changes_nothing(groups: dict[int, WorkerGroup]) -> None:
    case = random_case(random.Random(5), 3, Optimizer.SGD)
    for pooled, same in groups[3].run(runtime_cases.lookup_only, case):
        assert same
        assert not any(value.requires_grad for value in pooled.values())
