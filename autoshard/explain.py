"""Why a plan costs what it costs: each table alone, each rank, and what holds each term up.

The explanation is a prediction under one cost model, whoever made the plan; `report` and
the command line print it.

Shapes: S=shards, F=shard features, P=phases (forward, backward).
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from autoshard.costing import lower_bound_ms, predict_plan
from autoshard.features import shard_features
from autoshard.memory import RankLedger
from autoshard.objective import StepCost
from autoshard.plan import ShardingPlan
from autoshard.protocols import CostModel
from autoshard.shards import ShardingType, ShardLoad, shard_load
from autoshard.validate import listed, validate_plan

#: A bottleneck names its rank's costliest tables until they make up this share, or this many.
_NAMED_SHARE, _NAMED_TABLES = 0.5, 3
_PHASES = ("forward", "backward")


@dataclass(frozen=True, kw_only=True)
class TableExplanation:
    """One table: where it is and what it asks for."""

    name: str
    sharding_type: str
    ranks: tuple[int, ...]
    """The rank of each shard, in the plan's order."""
    shard_sizes: tuple[tuple[int, int], ...]
    """(rows, columns) of each shard."""
    memory_bytes: int
    """Over all its shards."""
    fwd_alone_ms: float
    """Sum over its shards of what each would cost alone on a rank."""
    bwd_alone_ms: float


@dataclass(frozen=True, kw_only=True)
class RankExplanation:
    """One rank: what it holds, computes and exchanges in a step."""

    rank: int
    num_shards: int
    memory_bytes: int
    hbm_bytes: int
    fwd_compute_ms: float
    bwd_compute_ms: float
    ids_bytes: float
    """Ids, lengths and weights that it receives from the other ranks."""
    output_bytes: float
    """Pooled outputs that it sends to the other ranks; their gradients come back."""


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """What holds one term of the objective up."""

    term: str
    """Such as `bwd_compute`."""
    ms: float
    rank: int | None
    """The rank that decides it; None if nothing is computed or sent."""
    excess: float
    """How far that rank's time (of a collective: its bytes) is above the mean, 0.2 for 20%."""
    tables: tuple[str, ...]
    """That rank's tables that cost most, largest first."""
    tables_share: float
    """Their share of that rank's total, each table taken alone."""

    @property
    def sentence(self) -> str:
        """The bottleneck in words."""
        direction = _PHASES[self.term.startswith("bwd")]
        if self.rank is None:
            return f"Nothing happens in {self.term}."
        what = "is the slowest in" if self.term.endswith("compute") else "exchanges most in"
        unit = "time" if self.term.endswith("compute") else "bytes"
        parts = [f"Rank {self.rank} {what} {direction} ({self.term} {self.ms:.3f} ms)"]
        if self.excess >= 0.005:
            parts.append(f"{self.excess:.0%} above the ranks' mean")
        plural = "tables" if len(self.tables) > 1 else "table"
        verb = "make" if len(self.tables) > 1 else "makes"
        parts.append(f"{plural} {listed(self.tables)} {verb} {self.tables_share:.0%} of its {unit}")
        return "; ".join(parts) + "."


@dataclass(frozen=True, kw_only=True)
class PlanExplanation:
    """All of it."""

    cost_model: str
    cost: StepCost
    lower_bound_ms: float | None
    tables: tuple[TableExplanation, ...]
    ranks: tuple[RankExplanation, ...]
    bottlenecks: tuple[Bottleneck, ...]
    """One for each term, in the objective's order."""
    ledgers: tuple[RankLedger, ...]

    def sentences(self) -> list[str]:
        """What holds the step up, in words, the largest term first."""
        largest = sorted(self.bottlenecks, key=lambda b: -b.ms)
        total = self.cost.step_ms
        if total <= 0:
            return ["The plan costs nothing under this cost model."]
        first = largest[0]
        return [
            f"The largest term is {first.term}: {first.ms:.3f} of {total:.3f} ms "
            f"({first.ms / total:.0%}).",
            *(bottleneck.sentence for bottleneck in largest if bottleneck.ms > 0),
        ]

    def to_json(self) -> dict[str, Any]:
        """The explanation as a plain dictionary."""
        return {
            "cost_model": self.cost_model,
            "cost": self.cost.to_json(),
            "lower_bound_ms": self.lower_bound_ms,
            "tables": [asdict(table) for table in self.tables],
            "ranks": [asdict(rank) for rank in self.ranks],
            "bottlenecks": [asdict(bottleneck) for bottleneck in self.bottlenecks],
            "sentences": self.sentences(),
        }


@dataclass(frozen=True)
class _PlacedShard:
    table: str
    rank: int
    load: ShardLoad
    alone_ms_P: tuple[float, float]


def explain_plan(plan: ShardingPlan, cost_model: CostModel) -> PlanExplanation:
    """Explain a plan, also one that was written by hand and has no cost.

    Args:
        plan: validated here.
        cost_model: predicts every figure.

    Raises:
        PlanError: the plan is malformed.
        InfeasibleError: it does not fit.
    """
    ledgers = validate_plan(plan)
    cost = predict_plan(plan, cost_model)
    shards = _placed_shards(plan, cost_model)
    placed = [
        slice_
        for entry in plan.tables
        for _, slice_ in entry.slices()
        if entry.sharding_type is not ShardingType.DATA_PARALLEL
    ]
    replicas = [
        entry.slices()[0][1]
        for entry in plan.tables
        if entry.sharding_type is ShardingType.DATA_PARALLEL
    ]
    return PlanExplanation(
        cost_model=cost_model.name,
        cost=cost,
        lower_bound_ms=lower_bound_ms(plan.problem, placed + replicas, cost_model),
        tables=_explain_tables(plan, shards),
        ranks=_explain_ranks(plan, cost, ledgers, shards),
        bottlenecks=_bottlenecks(plan, cost, shards),
        ledgers=ledgers,
    )


def _placed_shards(plan: ShardingPlan, cost_model: CostModel) -> list[_PlacedShard]:
    pairs = [pair for entry in plan.tables for pair in entry.slices()]
    training, world_size = plan.training, plan.topology.world_size
    slices = [slice_ for _, slice_ in pairs]
    encoding_SD = cost_model.encode(shard_features(slices, training, world_size))
    alone_SP = cost_model.compute_ms(encoding_SD, np.ones(len(slices), dtype=np.int64))
    return [
        _PlacedShard(
            slice_.table.name,
            rank,
            shard_load(slice_, training, world_size),
            (float(forward), float(backward)),
        )
        for (rank, slice_), (forward, backward) in zip(pairs, alone_SP, strict=True)
    ]


def _explain_tables(plan: ShardingPlan, shards: list[_PlacedShard]) -> tuple[TableExplanation, ...]:
    of_table: dict[str, list[_PlacedShard]] = defaultdict(list)
    for shard in shards:
        of_table[shard.table].append(shard)
    return tuple(
        TableExplanation(
            name=entry.table.name,
            sharding_type=entry.sharding_type.value,
            ranks=tuple(shard.rank for shard in entry.shards),
            shard_sizes=tuple((shard.num_rows, shard.num_cols) for shard in entry.shards),
            memory_bytes=sum(s.load.memory_bytes for s in of_table[entry.table.name]),
            fwd_alone_ms=sum(s.alone_ms_P[0] for s in of_table[entry.table.name]),
            bwd_alone_ms=sum(s.alone_ms_P[1] for s in of_table[entry.table.name]),
        )
        for entry in plan.tables
    )


def _explain_ranks(
    plan: ShardingPlan,
    cost: StepCost,
    ledgers: tuple[RankLedger, ...],
    shards: list[_PlacedShard],
) -> tuple[RankExplanation, ...]:
    peers = plan.topology.world_size - 1
    counts = [0] * plan.topology.world_size
    ids, outputs = [0.0] * len(counts), [0.0] * len(counts)
    for shard in shards:
        counts[shard.rank] += 1
        ids[shard.rank] += peers * shard.load.send_ids_bytes_per_peer
        outputs[shard.rank] += peers * shard.load.send_output_bytes_per_peer
    return tuple(
        RankExplanation(
            rank=ledger.rank,
            num_shards=counts[ledger.rank],
            memory_bytes=ledger.total_bytes,
            hbm_bytes=ledger.hbm_bytes,
            fwd_compute_ms=cost.fwd_compute_ms[ledger.rank],
            bwd_compute_ms=cost.bwd_compute_ms[ledger.rank],
            ids_bytes=ids[ledger.rank],
            output_bytes=outputs[ledger.rank],
        )
        for ledger in ledgers
    )


def _bottlenecks(
    plan: ShardingPlan, cost: StepCost, shards: list[_PlacedShard]
) -> tuple[Bottleneck, ...]:
    world_size = plan.topology.world_size

    def sums(amounts: list[float]) -> list[float]:
        per_rank = [0.0] * world_size
        for shard, amount in zip(shards, amounts, strict=True):
            per_rank[shard.rank] += amount
        return per_rank

    ids = [s.load.send_ids_bytes_per_peer + s.load.send_output_bytes_per_peer for s in shards]
    # Backward, the gradients of the outputs travel back, and replicas exchange their rows.
    gradients = [
        s.load.send_output_bytes_per_peer + s.load.send_replica_bytes_per_peer for s in shards
    ]
    forward, backward = ([s.alone_ms_P[phase] for s in shards] for phase in (0, 1))
    return (
        _bottleneck("fwd_compute", max(cost.fwd_compute_ms), cost.fwd_compute_ms, shards, forward),
        _bottleneck("fwd_comms", cost.fwd_comms_ms, sums(ids), shards, ids),
        _bottleneck("bwd_comms", cost.bwd_comms_ms, sums(gradients), shards, gradients),
        _bottleneck("bwd_compute", max(cost.bwd_compute_ms), cost.bwd_compute_ms, shards, backward),
    )


def _bottleneck(
    term: str,
    ms: float,
    per_rank: tuple[float, ...] | list[float],
    shards: list[_PlacedShard],
    amounts: list[float],
) -> Bottleneck:
    """The rank with the largest amount, and the tables on it that make most of it."""
    rank = int(np.argmax(per_rank))
    of_table: dict[str, float] = defaultdict(float)
    for shard, amount in zip(shards, amounts, strict=True):
        if shard.rank == rank:
            of_table[shard.table] += amount
    total = sum(of_table.values())
    if ms <= 0 or total <= 0:
        return Bottleneck(term=term, ms=ms, rank=None, excess=0.0, tables=(), tables_share=0.0)
    named: list[str] = []
    share = 0.0
    for name, amount in sorted(of_table.items(), key=lambda item: -item[1])[:_NAMED_TABLES]:
        named.append(name)
        share += amount / total
        if share >= _NAMED_SHARE:
            break
    mean = sum(per_rank) / len(per_rank)
    return Bottleneck(
        term=term,
        ms=ms,
        rank=rank,
        excess=per_rank[rank] / mean - 1 if mean > 0 else 0.0,
        tables=tuple(named),
        tables_share=share,
    )
