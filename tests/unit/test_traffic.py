"""All-to-alls of a placement against a simulation in which ranks really send to each other."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.costing import predict_step
from autoshard.problem import ShardingProblem, TrainingConfig
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import Table
from autoshard.topology import GIB, Topology


class Recorder(AnalyticCostModel):
    """Remembers what it was asked, and prices every byte and rank differently."""

    asked: list[NDArray[np.float64]]

    def collective_ms(self, traffic_NC: NDArray[np.float64]) -> NDArray[np.float64]:
        self.asked.append(np.array(traffic_NC))
        return traffic_NC @ np.array([1e3, 1.0, 1e-3, 1e-6])


def recorder() -> Recorder:
    model = Recorder()
    object.__setattr__(model, "asked", [])
    return model


def simulate(
    problem: ShardingProblem, held: list[list[ShardSlice]]
) -> dict[str, NDArray[np.float64]]:
    """Bytes that rank i sends rank j, [R, R], for each exchange; integral batches only."""
    ranks, batch = problem.topology.world_size, problem.training.batch_size
    sent = {name: np.zeros((ranks, ranks)) for name in ("ids", "outputs", "gradients", "replicas")}
    for owner, slices in enumerate(held):
        for slice_ in slices:
            table = slice_.table
            if slice_.sharding_type is ShardingType.DATA_PARALLEL:
                lookups = batch * table.pooling_factor * len(table.feature_names)
                rows = table.num_embeddings
                touched = rows * (1 - np.exp(-lookups / rows))
                bags = batch * len(table.feature_names)
                by_row = touched * (8 + 4 * slice_.num_cols)
                ids = bags * 8 + lookups * (12 if table.weighted else 8)
                by_bag = bags * 4 * slice_.num_cols
                for other in range(ranks):
                    if ids + by_bag < by_row:
                        sent["ids"][owner, other] += ids
                        sent["replicas"][owner, other] += by_bag
                    else:
                        sent["replicas"][owner, other] += by_row
                continue
            for source in range(ranks):
                for _feature in table.feature_names:
                    for _sample in range(batch):
                        ids = table.pooling_factor * slice_.num_rows / table.num_embeddings
                        each = 12 if table.weighted else 8
                        sent["ids"][source, owner] += 8 + ids * each
                        sent["outputs"][owner, source] += 4 * slice_.num_cols
                        sent["gradients"][source, owner] += 4 * slice_.num_cols
    for matrix in sent.values():
        np.fill_diagonal(matrix, 0.0)  # nobody sends to itself
    return sent


def tables() -> list[Table]:
    return [
        Table(name="a", num_embeddings=100, embedding_dim=8, pooling_factor=3.0),
        Table(
            name="b",
            num_embeddings=200,
            embedding_dim=10,
            pooling_factor=2.0,
            feature_names=("x", "y"),
            weighted=True,
        ),
        Table(name="c", num_embeddings=64, embedding_dim=12, pooling_factor=4.0),
        Table(name="d", num_embeddings=3, embedding_dim=6, pooling_factor=2.0),
        Table(name="e", num_embeddings=900, embedding_dim=6, pooling_factor=7.0),
    ]


def placements(ranks: int) -> dict[str, list[list[ShardSlice]]]:
    a, b, c, d, e = tables()
    empty: list[list[ShardSlice]] = [[] for _ in range(ranks)]
    together = [list(r) for r in empty]
    together[ranks - 1] = [ShardSlice.whole(t) for t in (a, b, c, d)]
    spread = [list(r) for r in empty]
    for index, table in enumerate((a, b, c, d)):
        spread[index % ranks].append(ShardSlice.whole(table))
    split = [
        [ShardSlice.whole(t, ShardingType.DATA_PARALLEL) for t in (d, e)] for _ in range(ranks)
    ]
    split[0].append(ShardSlice(a, ShardingType.ROW_WISE, 0, 0, 25, 8))
    split[-1].append(ShardSlice(a, ShardingType.ROW_WISE, 25, 0, 75, 8))
    split[0].append(ShardSlice(c, ShardingType.COLUMN_WISE, 0, 0, 64, 4))
    split[ranks // 2].append(ShardSlice(c, ShardingType.COLUMN_WISE, 0, 4, 64, 8))
    split[ranks // 2].append(ShardSlice.whole(b))
    return {"together": together, "spread": spread, "split": split}


@pytest.mark.parametrize("ranks", [1, 2, 3, 5])
@pytest.mark.parametrize("kind", ["together", "spread", "split"])
def test_every_exchange_is_described_as_it_happens(ranks: int, kind: str) -> None:
    problem = ShardingProblem(
        tables=tuple(tables()),
        topology=Topology.uniform(ranks, GIB),
        training=TrainingConfig(batch_size=5),
    )
    held = placements(ranks)[kind]
    model = recorder()
    cost = predict_step(problem, held, model)
    (asked,) = model.asked
    sent = simulate(problem, held)
    prices = {}
    for row, name in zip(asked, ("ids", "outputs", "gradients", "replicas"), strict=True):
        matrix = sent[name]
        expected = [ranks, matrix.sum(1).max(), matrix.sum(0).max(), matrix.sum()]
        np.testing.assert_allclose(row, expected, rtol=1e-12, err_msg=name)
        prices[name] = float(np.dot(expected, [1e3, 1.0, 1e-3, 1e-6]))
    assert cost.fwd_comms_ms == pytest.approx(prices["ids"] + prices["outputs"])
    assert cost.bwd_comms_ms == pytest.approx(prices["gradients"] + prices["replicas"])


def test_one_rank_alone_sends_nothing() -> None:
    problem = ShardingProblem(
        tables=tuple(tables()),
        topology=Topology.uniform(1, GIB),
        training=TrainingConfig(batch_size=5),
    )
    cost = predict_step(problem, [[ShardSlice.whole(t) for t in tables()]], AnalyticCostModel())
    assert cost.fwd_comms_ms == cost.bwd_comms_ms == 0.0
