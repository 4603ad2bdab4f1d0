"""The protocols that connect the parts. Imports only data types, so no import goes in circles.

Shapes: S=shards, D=encoding width, N=shard sets (one rank of one plan each),
R=ranks, F=shard features, C=traffic features.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from autoshard.objective import CostSource
from autoshard.plan import ShardingPlan
from autoshard.problem import ShardingProblem
from autoshard.shards import ShardSlice

FloatArray = NDArray[np.float64]


@runtime_checkable
class CostModel(Protocol):
    """Predicts what a set of shards costs on one rank, and what a collective costs.

    The compute cost of a set must be a function of the *sum* of its shards' encodings.
    Any permutation-invariant (DeepSets) model has this form, and it is what lets a
    search re-cost a move in constant time.
    """

    @property
    def name(self) -> str:
        """A short name for tables and provenance."""

    @property
    def source(self) -> CostSource:
        """`PREDICTED` or `SIMULATED`."""

    @property
    def fingerprint(self) -> str:
        """Identifies the weights."""

    def encode(self, features_SF: FloatArray) -> FloatArray:
        """Encode shards, as described by `autoshard.features.shard_features`.

        Returns:
            float64 [S, D], the vectors that add up over the shards of a rank.
        """

    def compute_ms(
        self, encoding_sum_ND: FloatArray, num_shards_N: NDArray[np.int64]
    ) -> FloatArray:
        """Cost of N shard sets, each given as the sum of its shards' encodings.

        Returns:
            float64 [N, 2], forward and backward, >= 0; 0 for an empty set.
        """

    def collective_ms(self, traffic_NC: FloatArray) -> FloatArray:
        """Transfer time of N all-to-alls, each described by `autoshard.features.TRAFFIC_FEATURES`.

        Returns:
            float64 [N], >= 0; 0 where nothing is sent or one rank is alone.
        """

    def compute_lower_bound_ms(
        self, encoding_SD: FloatArray, world_size: int, base_D: FloatArray | None = None
    ) -> FloatArray | None:
        """What max_r of each phase is at least, over all placements of these shards.

        Args:
            encoding_SD: the shards.
            world_size: R >= 1.
            base_D: sum of the encodings of what every rank holds besides, such as replicas;
                None if there is nothing.

        Returns:
            float64 [2], forward and backward, or None if the model has no such bound.
        """

    def collective_lower_bound_ms(self, total_bytes: float, world_size: int) -> float | None:
        """What an all-to-all of `total_bytes` is at least, however spread over ranks, or None."""

    def is_extrapolated(self, features_SF: FloatArray, problem: ShardingProblem) -> bool:
        """Whether shards, world size or optimizer lie outside what was measured."""


@dataclass(frozen=True, kw_only=True)
class SearchBudget:
    """What a sharder may spend. Evaluations make a run repeatable; time only cuts it short."""

    num_evaluations: int = 100_000
    """Costings of one changed placement, at most."""
    time_limit_s: float | None = None
    """Wall-clock limit; None for none. A plan that it cut short says so."""


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a sharder decided: a rank for each slice."""

    slices: tuple[ShardSlice, ...]
    ranks: tuple[int, ...]
    num_evaluations: int = 0
    cut_short: bool = False
    """Whether the time limit ended the search before its budget was used."""


class Sharder(Protocol):
    """Assigns slices to ranks. Implementations register themselves in `autoshard.sharders`."""

    name: str

    def assign(
        self,
        problem: ShardingProblem,
        cost_model: CostModel,
        *,
        seed: int,
        budget: SearchBudget,
    ) -> Assignment:
        """Choose a rank for every slice.

        Raises:
            InfeasibleError: no placement within memory was found.
        """


class Exporter(Protocol):
    """Writes a plan in somebody else's format."""

    name: str

    def export(self, plan: ShardingPlan) -> str:
        """The plan as text.

        Raises:
            UnsupportedError: the plan uses what the format cannot say.
        """
