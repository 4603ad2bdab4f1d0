"""Explanations add up to the plan's cost, and name the tables that make it."""

from __future__ import annotations

import json

import pytest

from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.explain import explain_plan
from autoshard.features import WORK_FEATURES
from autoshard.plan import ShardingPlan, TablePlan
from autoshard.problem import Optimizer, TrainingConfig
from autoshard.shards import Shard, ShardingType
from autoshard.tables import Table
from autoshard.topology import GIB, Topology

#: Only lookups cost something: 1 ms forward and 2 ms backward for each.
COSTS = {"fwd_lookups": (1, 0), "bwd_lookups": (0, 2)}
MODEL = AnalyticCostModel(
    coefficients_ms_KP=tuple(COSTS.get(name, (0, 0)) for name in WORK_FEATURES),
    shard_ms_P=(0, 0),
    overhead_ms_P=(0, 0),
    latency_ms=0.5,
    bytes_per_ms=100.0,
)


def plan_of(*placed: tuple[str, float, int], dim: int = 4) -> ShardingPlan:
    """A table-wise plan of (name, pooling factor, rank) on 2 ranks, 1 sample each."""
    return ShardingPlan(
        topology=Topology.uniform(2, GIB),
        training=TrainingConfig(batch_size=1, optimizer=Optimizer.SGD),
        tables=tuple(
            TablePlan(
                Table(name=name, num_embeddings=10, embedding_dim=dim, pooling_factor=pooling),
                ShardingType.TABLE_WISE,
                (Shard(rank, 0, 0, 10, dim),),
            )
            for name, pooling, rank in placed
        ),
    )


def test_terms_and_bottlenecks_by_hand():
    # Two samples a step: rank 0 looks up 2 × (6 + 3 + 1) = 20 ids, rank 1 looks up 2 × 4 = 8.
    explanation = explain_plan(plan_of(("a", 6, 0), ("b", 3, 0), ("c", 1, 0), ("d", 4, 1)), MODEL)
    assert explanation.cost.fwd_compute_ms == (20.0, 8.0)
    assert explanation.cost.bwd_compute_ms == (40.0, 16.0)
    forward, _, _, backward = explanation.bottlenecks
    assert (forward.term, forward.rank, forward.ms) == ("fwd_compute", 0, 20.0)
    assert forward.tables == ("a",)
    assert forward.tables_share == pytest.approx(0.6)
    assert forward.excess == pytest.approx(20 / 14 - 1)
    assert backward.ms == 40.0
    by_name = {table.name: table for table in explanation.tables}
    assert (by_name["b"].fwd_alone_ms, by_name["b"].bwd_alone_ms) == (6.0, 12.0)
    assert by_name["d"].ranks == (1,)
    assert by_name["d"].shard_sizes == ((10, 4),)


def test_bytes_of_each_rank():
    # One peer sends 1 length and the sample's ids of each table, 8 bytes each; outputs of one
    # sample are 4 columns of 4 bytes.
    explanation = explain_plan(plan_of(("a", 6, 0), ("b", 3, 0), ("d", 4, 1)), MODEL)
    rank_0, rank_1 = explanation.ranks
    assert rank_0.ids_bytes == (6 + 1) * 8 + (3 + 1) * 8
    assert rank_1.ids_bytes == (4 + 1) * 8
    assert (rank_0.output_bytes, rank_1.output_bytes) == (32, 16)
    assert (rank_0.num_shards, rank_1.num_shards) == (2, 1)


def test_sentences_begin_with_the_largest_term():
    explanation = explain_plan(plan_of(("a", 6, 0), ("b", 5, 0), ("d", 4, 1)), MODEL)
    first, second, *_ = explanation.sentences()
    total = explanation.cost.step_ms
    assert first == f"The largest term is bwd_compute: 44.000 of {total:.3f} ms ({44 / total:.0%})."
    assert second == (
        "Rank 0 is the slowest in backward (bwd_compute 44.000 ms); 47% above the ranks' mean; "
        "table a makes 55% of its time."
    )


def test_at_most_three_tables_are_named():
    many = [(f"t{index}", 1, 0) for index in range(20)]
    (forward, *_) = explain_plan(plan_of(*many), MODEL).bottlenecks
    assert forward.tables == ("t0", "t1", "t2")
    assert forward.tables_share == pytest.approx(3 / 20)


def test_a_plan_without_work():
    explanation = explain_plan(
        plan_of(("a", 0, 0), dim=4),
        AnalyticCostModel(
            coefficients_ms_KP=((0, 0),) * len(WORK_FEATURES),
            shard_ms_P=(0, 0),
            overhead_ms_P=(0, 0),
            latency_ms=0,
        ),
    )
    assert explanation.bottlenecks[0].rank is None
    assert "backward" not in explanation.sentences()[0]
    json.dumps(explanation.to_json(), allow_nan=False)
