"""A cost model that is a weighted sum: the simplest one, and a pattern for one's own.

A shard's kernel cost is Σ_k coefficient_k · work_k over `WORK_FEATURES`; a set's is the
sum of its shards' plus a fixed overhead. The default coefficients are a stand-in of the
right order of magnitude for one CPU thread, not a measurement: see `DEFAULT_COEFFICIENTS_MS_KP`.

Shapes: S=shards, N=shard sets, D=encoding width (here the phases), K=work features,
P=phases (forward, backward), F=shard features, C=traffic features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.cost_models.bounds import makespan_lower_bound
from autoshard.cost_models.ranges import MeasuredRange
from autoshard.errors import ArtifactError, InputError, quoted
from autoshard.features import NUM_TRAFFIC_FEATURES, NUM_WORK_FEATURES, WORK_FEATURES
from autoshard.files import fingerprint
from autoshard.objective import CostSource
from autoshard.problem import ShardingProblem

FloatArray = NDArray[np.float64]

#: Milliseconds per unit of each work feature, forward and backward. Chosen by hand so that
#: 8 tables × 2,048 bags × 20 ids × dim 64 with few repeated ids come to about 13 ms forward
#: and 130 ms backward, as seen once for row-wise Adagrad on one thread of a 2-core machine.
DEFAULT_COEFFICIENTS_MS_KP: tuple[tuple[float, float], ...] = (
    (5.0e-6, 0.0),  # fwd_bags
    (8.0e-7, 0.0),  # fwd_bag_elements
    (3.0e-6, 0.0),  # fwd_lookups
    (4.5e-7, 0.0),  # fwd_lookup_elements
    (2.0e-6, 0.0),  # fwd_unique_rows
    (5.0e-8, 0.0),  # fwd_unique_elements
    (0.0, 1.0e-5),  # bwd_bags
    (0.0, 8.0e-7),  # bwd_bag_elements
    (0.0, 1.0e-4),  # bwd_lookups: they are sorted
    (0.0, 2.0e-6),  # bwd_lookup_elements
    (0.0, 3.0e-5),  # bwd_unique_rows
    (0.0, 2.1e-6),  # bwd_unique_elements: the fused update reads and writes them
    (0.0, 1.0e-4),  # reduced_lookups: they are sorted as well
    (0.0, 4.5e-7),  # reduced_lookup_elements: a lookup turned round
)


@dataclass(frozen=True, kw_only=True)
class AnalyticCostModel:
    """Additive kernel costs, and all-to-alls of fixed latency and bandwidth."""

    coefficients_ms_KP: tuple[tuple[float, float], ...] = DEFAULT_COEFFICIENTS_MS_KP
    """Milliseconds per unit of each of `WORK_FEATURES`, forward and backward, >= 0."""
    shard_ms_P: tuple[float, float] = (0.002, 0.005)
    """What every shard costs besides its work, >= 0."""
    overhead_ms_P: tuple[float, float] = (0.02, 0.05)
    """What a rank with at least one shard costs besides, >= 0."""
    latency_ms: float = 0.1
    """What an all-to-all costs besides its bytes, >= 0."""
    bytes_per_ms: float = 1e6
    """Bandwidth of the busiest rank in its busier direction, > 0."""
    name: str = "analytic"
    measured_range: MeasuredRange | None = None
    """What fitted coefficients were fitted to; None for coefficients without measurements."""
    simulated: bool = False
    """Whether they were fitted to rows of a simulated device."""

    def __post_init__(self) -> None:
        coefficients_KP = _numbers(
            self,
            "coefficients_ms_KP",
            (NUM_WORK_FEATURES, 2),
            f"one row (forward, backward) of finite numbers >= 0 for each of "
            f"{', '.join(WORK_FEATURES)}",
        )
        rows = tuple((float(forward), float(backward)) for forward, backward in coefficients_KP)
        object.__setattr__(self, "coefficients_ms_KP", rows)
        if not isinstance(self.simulated, bool):
            raise InputError(
                "simulated is not usable", got=quoted(self.simulated), allowed="true or false"
            )
        for name in ("shard_ms_P", "overhead_ms_P"):
            pair = _numbers(self, name, (2,), "two finite numbers >= 0 (forward, backward)")
            object.__setattr__(self, name, (float(pair[0]), float(pair[1])))
        for name in ("latency_ms", "bytes_per_ms"):
            number = float(_numbers(self, name, (), "a finite number >= 0"))
            object.__setattr__(self, name, number)
        if self.bytes_per_ms == 0:
            raise InputError("bytes_per_ms is not usable", got=0, allowed="a finite number > 0")

    @property
    def source(self) -> CostSource:
        """`PREDICTED`, as nothing is timed, or `SIMULATED`, as what it was fitted to."""
        return CostSource.SIMULATED if self.simulated else CostSource.PREDICTED

    @cached_property
    def fingerprint(self) -> str:
        """Identifies the coefficients."""
        return fingerprint(self.to_json())

    @cached_property
    def _coefficients(self) -> FloatArray:
        return np.array(self.coefficients_ms_KP)

    @cached_property
    def _shard(self) -> FloatArray:
        return np.array(self.shard_ms_P)

    @cached_property
    def _overhead(self) -> FloatArray:
        return np.array(self.overhead_ms_P)

    def encode(self, features_SF: FloatArray) -> FloatArray:
        """Each shard's forward and backward milliseconds, float64 [S, 2]."""
        return features_SF[:, :NUM_WORK_FEATURES] @ self._coefficients + self._shard

    def compute_ms(
        self, encoding_sum_ND: FloatArray, num_shards_N: NDArray[np.int64]
    ) -> FloatArray:
        """The sum plus the overhead, float64 [N, 2]; 0 for an empty set."""
        # A search subtracts what it added: a sum may come out a few ulp below 0.
        cost_NP = np.maximum(encoding_sum_ND, 0.0) + self._overhead
        return np.where(np.asarray(num_shards_N)[:, None] > 0, cost_NP, 0.0)

    def collective_ms(self, traffic_NC: FloatArray) -> FloatArray:
        """Latency plus the busiest rank's bytes over the bandwidth, float64 [N]."""
        traffic_NC = np.asarray(traffic_NC, dtype=np.float64).reshape(-1, NUM_TRAFFIC_FEATURES)
        world_size_N, sent_N, received_N, total_N = traffic_NC.T
        cost_N = self.latency_ms + np.maximum(sent_N, received_N) / self.bytes_per_ms
        return np.where((total_N > 0) & (world_size_N > 1), cost_N, 0.0)

    def compute_lower_bound_ms(
        self, encoding_SD: FloatArray, world_size: int, base_D: FloatArray | None = None
    ) -> FloatArray:
        """The overhead of a rank in use, plus the base, plus `makespan_lower_bound`, float64 [2].

        With at least one shard, the rank that attains the makespan bound holds one, so its
        cost is the overhead plus its sum; what every rank holds adds to that sum.
        """
        if len(encoding_SD) == 0 and base_D is None:
            return np.zeros(2)
        makespan_P = [makespan_lower_bound(encoding_S, world_size) for encoding_S in encoding_SD.T]
        return self._overhead + (0.0 if base_D is None else base_D) + makespan_P

    def collective_lower_bound_ms(self, total_bytes: float, world_size: int) -> float:
        """The busiest rank sends at least total_bytes / world_size."""
        if total_bytes <= 0 or world_size <= 1:
            return 0.0
        return self.latency_ms + total_bytes / world_size / self.bytes_per_ms

    def is_extrapolated(self, features_SF: FloatArray, problem: ShardingProblem) -> bool:
        """True without a `measured_range`: no measurement stands behind the coefficients."""
        return self.measured_range is None or bool(
            self.measured_range.outside(features_SF, problem)
        )

    def to_json(self) -> dict[str, Any]:
        """The model as a plain dictionary."""
        return {
            "name": self.name,
            "coefficients_ms_KP": [list(row) for row in self.coefficients_ms_KP],
            "shard_ms_P": list(self.shard_ms_P),
            "overhead_ms_P": list(self.overhead_ms_P),
            "latency_ms": self.latency_ms,
            "bytes_per_ms": self.bytes_per_ms,
            "measured_range": self.measured_range.to_json() if self.measured_range else None,
            **({"simulated": True} if self.simulated else {}),
        }

    @classmethod
    def from_json(cls, value: Any) -> AnalyticCostModel:
        """The inverse of `to_json`; absent keys keep their defaults.

        Raises:
            ArtifactError: a key is unknown or a value is not usable.
        """
        known = {field.name for field in fields(cls)}
        if not isinstance(value, Mapping):
            raise ArtifactError("an analytic cost model must be an object", got=quoted(value))
        if unknown := sorted(set(value) - known):
            raise ArtifactError(
                "unknown key in an analytic cost model", got=unknown, allowed=sorted(known)
            )
        arguments = dict(value)
        if arguments.get("measured_range") is not None:
            arguments["measured_range"] = MeasuredRange.from_json(arguments["measured_range"])
        try:
            return cls(**arguments)
        except (TypeError, ValueError) as error:
            raise ArtifactError("an analytic cost model is malformed", got=str(error)) from error


def _numbers(
    model: AnalyticCostModel, name: str, shape: tuple[int, ...], allowed: str
) -> FloatArray:
    """A field as finite numbers >= 0 of that shape, or an `InputError`."""
    given = getattr(model, name)
    try:
        value = np.asarray(given, dtype=np.float64)
    except (TypeError, ValueError):
        value = np.array(np.nan)
    if value.shape != shape or not np.all(np.isfinite(value)) or np.any(value < 0):
        raise InputError(f"{name} is not usable", got=quoted(given), allowed=allowed)
    return value
