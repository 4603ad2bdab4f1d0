"""Compares what ranks hold after training with the reference, and with what the plan says."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.plan import ShardingPlan
from autoshard.problem import Optimizer
from autoshard.shards import Shard, ShardingType
from autoshard.tables import DataType
from tests.distributed.model_cases import describe, reference_of
from tests.distributed.runtime_cases import Case, HeldShard, Outcome


def check_equal(
    case: Case, outcomes: Sequence[Outcome], *, rtol: float = 2e-5, atol: float = 2e-6
) -> None:
    """Outputs and losses of every step, weights and optimizer state: as one process has them."""
    try:
        check_placement(case.plan, outcomes)
        _compare(case, outcomes, rtol, atol)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{describe(case)}") from error


def check_exact(case: Case, outcomes: Sequence[Outcome]) -> None:
    """The same, to the last bit."""
    check_equal(case, outcomes, rtol=0, atol=0)


def check_placement(plan: ShardingPlan, outcomes: Sequence[Outcome]) -> None:
    """Every rank holds what the plan gives it, and nothing else."""
    for rank, outcome in enumerate(outcomes):
        planned = [
            (entry.table.name, shard)
            for entry in plan.tables
            for shard in entry.shards
            if shard.rank == rank and shard.num_rows and shard.num_cols
        ]
        held = [(part.table, part.shard) for part in outcome.shards]
        assert sorted(held, key=_place) == sorted(planned, key=_place), f"shards of rank {rank}"
        names = sorted({name for name, _ in planned})
        assert sorted(outcome.held_tables) == names, f"held_tables of rank {rank}"
        assert outcome.allocated_bytes == shard_bytes(plan, rank), f"bytes of rank {rank}"
        for part in outcome.shards:
            shape = (part.shard.num_rows, part.shard.num_cols)
            assert part.weights.shape == shape
            assert set(part.states) == _state_names(plan.training.optimizer)
            rowwise = plan.training.optimizer is Optimizer.ROWWISE_ADAGRAD
            for state in part.states.values():
                assert state.shape == (shape[:1] if rowwise else shape)


def shard_bytes(plan: ShardingPlan, rank: int) -> int:
    """Weights and fp32 state, columns rounded up to multiples of 4."""
    total = 0
    for entry in plan.tables:
        for shard in entry.shards:
            if shard.rank != rank or not shard.num_cols:
                continue
            columns = (shard.num_cols + 3) // 4 * 4
            element = 4 if entry.table.data_type is DataType.FP32 else 2
            per_row = {
                Optimizer.SGD: 0,
                Optimizer.ROWWISE_ADAGRAD: 4,
                Optimizer.ADAGRAD: 4 * columns,
                Optimizer.ADAM: 8 * columns,
            }[plan.training.optimizer]
            total += shard.num_rows * (columns * element + per_row)
    return total


def assembled(
    plan: ShardingPlan, outcomes: Sequence[Outcome]
) -> dict[str, tuple[Tensor, dict[str, Tensor]]]:
    """Full tables put together from all ranks: weights, and states spread over columns.

    Asserts that shards tile every table exactly once and that replicas are bit-equal.
    """
    whole = {}
    for entry in plan.tables:
        name, size = entry.table.name, (entry.table.num_embeddings, entry.table.embedding_dim)
        parts = [part for outcome in outcomes for part in outcome.shards if part.table == name]
        if entry.sharding_type is ShardingType.DATA_PARALLEL:
            for part in parts[1:]:
                assert _same_bits(part.weights, parts[0].weights), f"replicas of {name} differ"
                for key, state in part.states.items():
                    assert _same_bits(state, parts[0].states[key]), f"{key} of {name} differs"
            parts = parts[:1]
        covered = torch.zeros(size, dtype=torch.int64)
        weights = torch.zeros(size, dtype=parts[0].weights.dtype)
        states = {key: torch.zeros(size) for key in parts[0].states}
        for part in parts:
            where = _slices(part)
            covered[where] += 1
            weights[where] = part.weights
            for key, state in part.states.items():
                wide = state if state.dim() == 2 else state.unsqueeze(1)
                states[key][where] = wide
        assert torch.equal(covered, torch.ones_like(covered)), f"{name} is not tiled once"
        whole[name] = (weights, states)
    return whole


def _compare(case: Case, outcomes: Sequence[Outcome], rtol: float, atol: float) -> None:
    trainer = reference_of(case)

    def close(got: Tensor, want: Tensor, what: str) -> None:
        torch.testing.assert_close(
            got, want, rtol=rtol, atol=atol, msg=lambda text: f"{what}: {text}"
        )

    for step in range(len(case.batches[0])):
        for rank, outcome in enumerate(outcomes):
            want = trainer.outputs(case.batches[rank][step])
            assert set(want) == set(outcome.outputs[step])
            for name, value in want.items():
                close(outcome.outputs[step][name], value, f"step {step}, rank {rank}, {name}")
        loss = trainer.step([own[step] for own in case.batches], case.coefficients)
        mean = sum(outcome.losses[step] for outcome in outcomes) / len(outcomes)
        # A sum over all outputs, so that tolerances of single values do not apply.
        assert abs(mean - loss) <= 1e-4 * (1 + abs(loss)) or rtol > 1e-4, f"loss of step {step}"
    for name, (weights, states) in assembled(case.plan, outcomes).items():
        table = trainer.tables[name]
        close(weights, table.weights, f"weights of {name}")
        assert set(states) == set(table.states)
        for key, state in states.items():
            close(state, table.states[key], f"{key} of {name}")


def _same_bits(left: Tensor, right: Tensor) -> bool:
    """Equal to the last bit, where NaN equals NaN and 0 is not -0."""
    bits = torch.int32 if left.dtype is torch.float32 else torch.int16
    return left.dtype is right.dtype and torch.equal(left.view(bits), right.view(bits))


def _place(held: tuple[str, Shard]) -> tuple[str, int, int]:
    return held[0], held[1].row_offset, held[1].col_offset


def _slices(part: HeldShard) -> tuple[slice, slice]:
    shard = part.shard
    return (
        slice(shard.row_offset, shard.row_offset + shard.num_rows),
        slice(shard.col_offset, shard.col_offset + shard.num_cols),
    )


def _state_names(optimizer: Optimizer) -> set[str]:
    return {
        Optimizer.SGD: set(),
        Optimizer.ADAGRAD: {"sum"},
        Optimizer.ROWWISE_ADAGRAD: {"sum"},
        Optimizer.ADAM: {"exp_avg", "exp_avg_sq"},
    }[optimizer]
