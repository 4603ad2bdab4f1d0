"""No placement costs less than the bound of the whole step, by enumeration and by every model."""

from __future__ import annotations

import itertools
from pathlib import Path

import numpy as np
import pytest

from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.cost_models.exported import load_cost_model
from autoshard.costing import lower_bound_ms, predict_step
from autoshard.problem import ShardingProblem, TrainingConfig
from autoshard.protocols import CostModel
from autoshard.shards import ShardingType, ShardSlice
from autoshard.topology import GIB, Topology
from cost_net.pipeline import MODEL_FOLDER, train_cost_model
from cost_net.training import CostNetConfig
from tests.synthetic_measurements import measured, pool


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, CostModel]:
    folder: Path = tmp_path_factory.mktemp("model")
    config = CostNetConfig(num_epochs=8, collective_epochs=40, learning_rate=1e-2)
    train_cost_model(measured(200), config, folder)
    return {
        "analytic": AnalyticCostModel(),
        "network": load_cost_model(folder / MODEL_FOLDER),
        "simulated": load_cost_model("simulated:a100-80gb"),
    }


def sliced() -> tuple[ShardingProblem, list[ShardSlice], list[ShardSlice]]:
    """Column halves, uneven row parts, two whole tables, and two tables to replicate."""
    first, second, *rest = pool(6, seed=77)
    half, rows = first.embedding_dim // 2, second.num_embeddings // 3
    lower = second.num_embeddings - rows
    slices = [
        ShardSlice(first, ShardingType.COLUMN_WISE, 0, 0, first.num_embeddings, half),
        ShardSlice(first, ShardingType.COLUMN_WISE, 0, half, first.num_embeddings, half),
        ShardSlice(second, ShardingType.ROW_WISE, 0, 0, rows, second.embedding_dim),
        ShardSlice(second, ShardingType.ROW_WISE, rows, 0, lower, second.embedding_dim),
        *map(ShardSlice.whole, rest[:2]),
    ]
    problem = ShardingProblem(
        tables=(first, second, *rest),
        topology=Topology.uniform(1, GIB),
        training=TrainingConfig(batch_size=64),
    )
    return problem, slices, [ShardSlice.whole(t, ShardingType.DATA_PARALLEL) for t in rest[2:]]


@pytest.mark.parametrize("name", ["analytic", "network", "simulated"])
@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("num_replicas", [0, 1, 2])
def test_no_step_is_below_its_bound(
    models: dict[str, CostModel], name: str, world_size: int, num_replicas: int
) -> None:
    alone, slices, tables = sliced()
    model, replicas = models[name], tables[:num_replicas]
    problem = ShardingProblem(
        tables=alone.tables,
        topology=Topology.uniform(world_size, GIB),
        training=alone.training,
    )
    bound = lower_bound_ms(problem, [*slices, *replicas * world_size], model)
    assert bound is not None
    assert bound == lower_bound_ms(problem, [*replicas, *slices], model)
    least = np.inf
    for ranks in itertools.product(range(world_size), repeat=len(slices)):
        held = [list(replicas) for _ in range(world_size)]
        for slice_, rank in zip(slices, ranks, strict=True):
            held[rank].append(slice_)
        least = min(least, predict_step(problem, held, model).step_ms)
    assert 0.3 * least < bound <= least * (1 + 1e-9)
    if replicas:
        # The exchange of their gradients counts in full, their work on top of the slices'.
        without = lower_bound_ms(problem, slices, model)
        only = predict_step(problem, [replicas] * world_size, model)
        assert without is not None
        assert bound >= without + only.bwd_comms_ms * (1 - 1e-5)
        assert bound - only.bwd_comms_ms > without
