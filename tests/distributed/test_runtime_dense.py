"""Dense layers: equal starts, averages by hand, faults that must not hang or pass silently."""

from __future__ import annotations

import pytest
import torch

from autoshard.errors import InputError
from autoshard.runtime.dense_replicas import DenseReplicas
from autoshard.runtime.group import WorkerGroup
from autoshard.shards import ShardingType
from autoshard.tables import Table
from tests.distributed import dense_cases, pipeline_cases
from tests.distributed.model_cases import make_plan
from tests.distributed.runtime_cases import Case, alone, run_ranks

Groups = dict[int, WorkerGroup]


def one_table_case(world_size: int) -> Case:
    """Table t, 50 rows of zeros, feature f."""
    table = Table(
        name="t", num_embeddings=50, embedding_dim=4, pooling_factor=1, feature_names=("f",)
    )
    plan = make_plan([table], [ShardingType.ROW_WISE], world_size)
    return pipeline_cases.plan_of_one_table(plan)


@pytest.mark.parametrize(
    ("factors", "sizes", "gradient"),
    [
        ([1.0, 2.0, 6.0], [1, 3, 2], 3.0),
        ([1.0, 2.0, 6.0], [1, 3, 0], 1.0),  # the rank without samples counts
        ([1.0, 2.0, 6.0], [0, 0, 0], 0.0),
        ([1.0, 6.0], [1, 3], 3.5),
        ([4.0], [2], 4.0),
    ],
)
def test_gradients_are_averaged_over_ranks(
    groups: Groups, factors: list[float], sizes: list[int], gradient: float
) -> None:
    world_size = len(factors)
    ranks = run_ranks(groups, world_size, dense_cases.average, factors, sizes)
    for rank, ((start, trained, shared), gradients) in enumerate(ranks):
        assert gradients == [gradient, gradient]
        assert start["scale"] == start["frozen"] == start["steps"] == 5  # rank 0's
        assert trained["scale"] == 5 - 2 * gradient
        assert trained["frozen"] == 5
        # Running values are each rank's own until they are shared.
        assert trained["steps"] == 5 + 2 * factors[rank]
        assert shared["steps"] == 5 + 2 * factors[0]
        assert shared["flags"].tolist() == [True, True, False]


def test_gradients_of_several_messages_are_averaged(groups: Groups) -> None:
    # The ranks' gradients are 1 and 2 everywhere.
    assert groups[2].run(dense_cases.average_in_buckets) == [[[1.5]] * 3] * 2


FAULTS = {
    "bare": r"InputError: the dense layers return something else than a DenseOutput; got: Tensor",
    "vector": r"InputError: the dense layers return tensors of another shape; got: loss (1,)",
    "logits": r"InputError: the dense layers return tensors of another shape; got: loss (), "
    "logits (1, 1); allowed: a scalar loss and one logit per sample, (1,)",
    "detached": "InputError: the loss of the dense layers is not connected",
    "inside": "RuntimeError: inconsistent tensor size",
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("world_size", [1, 2])
def test_layers_that_are_called_wrongly_say_so(groups: Groups, world_size: int, fault: str) -> None:
    case = one_table_case(world_size)
    for message in run_ranks(groups, world_size, dense_cases.odd_layers, case, fault):
        assert FAULTS[fault] in message


def test_a_parameter_without_gradient_is_named(groups: Groups) -> None:
    for message in groups[2].run(dense_cases.odd_layers, one_table_case(2), "unused"):
        assert message.startswith("InputError: the loss of the dense layers does not depend on all")
        assert "no gradient for spare" in message


def test_ranks_with_different_layers_are_found_out(groups: Groups) -> None:
    for rank, message in enumerate(groups[2].run(dense_cases.different_layers)):
        assert f"rank {1 - rank} was given another set of dense layers" in message


def test_a_missing_rank_is_waited_for_only_so_long(groups: Groups) -> None:
    messages = groups[2].run(dense_cases.stall, 1.0)[0]
    assert len(messages) == 2
    for message in messages:
        assert message.startswith("CollectiveError: rank 0, step 7, phase dense: ")
        assert "within 1 s" in message


def test_layers_on_another_device_are_refused() -> None:
    layers = torch.nn.Linear(2, 1, device="meta")
    with pytest.raises(InputError, match="weight of the dense layers is on another device"):
        DenseReplicas(layers, alone().collectives)


def test_loops_may_share_layers(groups: Groups) -> None:
    case = one_table_case(2)
    want = groups[2].run(dense_cases.switch_loops, case, ["plain"] * 4)
    for kinds in (["plain", "pipelined"] * 2, ["pipelined", "pipelined", "serial", "plain"]):
        for got, expected in zip(
            groups[2].run(dense_cases.switch_loops, case, kinds), want, strict=True
        ):
            assert all(map(torch.equal, got, expected))


@pytest.mark.parametrize("world_size", [1, 2])
def test_nothing_is_kept_after_use(groups: Groups, world_size: int) -> None:
    for freed in run_ranks(groups, world_size, dense_cases.is_freed, one_table_case(world_size)):
        assert freed == [True, True, True]
