"""Evaluation: results by hand, nothing changed, ranks with different amounts of data."""

from __future__ import annotations

import pytest
import torch

from autoshard.problem import Optimizer
from autoshard.runtime.batch import JaggedBatch
from autoshard.runtime.dense import TrainingBatch
from autoshard.runtime.group import WorkerGroup
from autoshard.shards import ShardingType
from autoshard.tables import Table
from tests.distributed import dense_cases
from tests.distributed.model_cases import make_plan
from tests.distributed.runtime_cases import Case, run_ranks

Groups = dict[int, WorkerGroup]


def counting_case(world_size: int, optimizer: Optimizer = Optimizer.SGD) -> Case:
    """Row i of table t is [i, 0, 0, 0], so that a bag's pooled values sum to its ids' sum."""
    table = Table(
        name="t", num_embeddings=50, embedding_dim=4, pooling_factor=1, feature_names=("f",)
    )
    weights = torch.zeros(50, 4)
    weights[:, 0] = torch.arange(50)
    plan = make_plan([table], [ShardingType.ROW_WISE], world_size, optimizer)
    return Case(plan, [], {}, {"t": weights})


def batch(*bags: list[int]) -> TrainingBatch:
    labels = [float(sum(bag) % 2) for bag in bags]
    return TrainingBatch(JaggedBatch.from_bags({"f": list(bags)}), torch.tensor(labels))


BATCHES = [
    [batch([1], [2, 3]), batch(), batch([10])],
    [batch([4, 4], []), batch([7]), batch([11]), batch([12])],
]


@pytest.mark.parametrize("kind", ["plain", "pipelined", "serial"])
def test_results_are_those_computed_by_hand(groups: Groups, kind: str) -> None:
    found = groups[2].run(dense_cases.evaluate, kind, counting_case(2), BATCHES)
    results = [result for result, _, _ in found]
    assert [result.logits_N.tolist() for result in results] == [[1, 5, 10], [8, 0, 7, 11]]
    assert [result.labels_N.tolist() for result in results] == [[1, 1, 0], [0, 0, 1, 1]]
    assert {t.dtype for r in results for t in (r.logits_N, r.labels_N)} == {torch.float32}
    # Ranks' means of the three steps: 3 and 4, 0 (no samples) and 7, 10 and 11.
    assert [result.loss for result in results] == [35 / 6] * 2
    assert [result.num_steps for result in results] == [3, 3]
    assert [result.unused_batches for result in results] == [0, 1]
    assert [result.stopped_early for result in results] == [False, True]
    for _, modes, progress in found:
        assert progress == [1, 2, 3]
        # Of the module, of a part in training mode, of one that was not; gradients; tables.
        assert modes == [(False,) * 5] * 3 + [(True, True, False, True, True)]


def test_one_process_evaluates_alike(groups: Groups) -> None:
    ((result, _, _),) = run_ranks(
        groups, 1, dense_cases.evaluate, "pipelined", counting_case(1), BATCHES[1:]
    )
    assert result.logits_N.tolist() == [8, 0, 7, 11, 12]
    assert result.loss == (4 + 7 + 11 + 12) / 4
    assert not result.stopped_early
    assert result.unused_batches == 0


@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ROWWISE_ADAGRAD])
@pytest.mark.parametrize("kind", ["plain", "pipelined"])
def test_weights_and_states_stay(groups: Groups, kind: str, optimizer: Optimizer) -> None:
    case = counting_case(2, optimizer)
    assert groups[2].run(dense_cases.evaluate_only, kind, case, 2) == [True, True]


def test_a_failed_evaluation_leaves_the_layers_in_training_mode(groups: Groups) -> None:
    for message, training in groups[2].run(dense_cases.fail_in_evaluation, counting_case(2)):
        assert "ZeroDivisionError" in message
        assert training
