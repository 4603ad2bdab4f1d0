"""The memory ledger: what a plan needs on each rank, line by line, in bytes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autoshard.problem import ShardingProblem
from autoshard.shards import ShardSlice, fixed_rank_bytes, shard_load

#: Ledger lines in the order in which they are printed.
LEDGER_LINES = (
    "weights",
    "optimizer_state",
    "inputs",
    "outputs",
    "gradients",
    "replicas",
    "batches_in_flight",
    "pooled_outputs",
    "dense",
    "reserved",
)


@dataclass(frozen=True)
class RankLedger:
    """One rank's memory: every line, their sum, and what the rank has."""

    rank: int
    lines_bytes: dict[str, int]
    """Bytes by name, one for each of `LEDGER_LINES`."""
    hbm_bytes: int

    @property
    def total_bytes(self) -> int:
        """The sum of all lines."""
        return sum(self.lines_bytes.values())

    @property
    def free_bytes(self) -> int:
        """What is left; negative when the rank is overfull."""
        return self.hbm_bytes - self.total_bytes


def memory_ledger(
    problem: ShardingProblem, slices_by_rank: Sequence[Iterable[ShardSlice]]
) -> tuple[RankLedger, ...]:
    """The ledger of every rank.

    Args:
        problem: tables, training and topology.
        slices_by_rank: what each rank holds, [world_size].

    Returns:
        One `RankLedger` per rank, in rank order.
    """
    topology = problem.topology
    fixed = fixed_rank_bytes(problem)
    ledgers = []
    for rank, slices in enumerate(slices_by_rank):
        lines = dict.fromkeys(LEDGER_LINES, 0)
        lines.update(fixed)
        lines["reserved"] = topology.reserved_bytes
        for slice_ in slices:
            load = shard_load(slice_, problem.training, topology.world_size)
            lines["weights"] += load.weights_bytes
            lines["optimizer_state"] += load.optimizer_state_bytes
            lines["inputs"] += load.input_bytes
            lines["outputs"] += load.output_bytes
            lines["gradients"] += load.gradient_bytes
            lines["replicas"] += load.replica_bytes
        ledgers.append(RankLedger(rank, lines, topology.hbm_bytes[rank]))
    return tuple(ledgers)
