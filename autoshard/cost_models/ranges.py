"""The range of the measurements behind a cost model, and whether a problem lies outside it.

Shapes: S=shards, F=shard features.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import ArtifactError
from autoshard.features import SHARD_FEATURES
from autoshard.problem import Optimizer, ShardingProblem, parse_optimizer

FloatArray = NDArray[np.float64]

#: A feature may leave its measured range by this share of the range's width (of its
#: natural scale: counts are compared as logarithms) before it counts as extrapolated.
TOLERANCE = 0.02


@dataclass(frozen=True, kw_only=True)
class MeasuredRange:
    """Smallest and largest value of everything that the measurements varied."""

    features: Mapping[str, tuple[float, float]]
    """Range of each shard feature; a feature that is absent was not looked at."""
    world_sizes: tuple[int, ...] = ()
    """World sizes of the measured collectives, ascending; () where none was measured."""
    optimizers: tuple[Optimizer, ...] = ()

    @classmethod
    def of(
        cls,
        features_SF: FloatArray,
        *,
        world_sizes: tuple[int, ...] = (),
        optimizers: tuple[Optimizer, ...] = (),
    ) -> MeasuredRange:
        """The range of measured shards, float64 [S, F], S >= 1."""
        low_F, high_F = features_SF.min(axis=0), features_SF.max(axis=0)
        return cls(
            features={
                name: (float(low), float(high))
                for name, low, high in zip(SHARD_FEATURES, low_F, high_F, strict=True)
            },
            world_sizes=tuple(sorted(set(world_sizes))),
            optimizers=tuple(sorted(set(optimizers), key=lambda o: o.value)),
        )

    def outside(self, features_SF: FloatArray, problem: ShardingProblem) -> tuple[str, ...]:
        """What of a problem was never measured, by name; empty if everything was.

        Counts and logarithms may go `TOLERANCE` beyond their range. Reuse shares are not
        compared bin by bin: 17 shares leave their boxes in harmless ways, and what they
        say about work is in `log_lookups_per_unique_row`.
        """
        found = []
        for index, name in enumerate(SHARD_FEATURES):
            if name not in self.features or name.startswith("lookup_share_reuse"):
                continue
            low, high = self.features[name]
            values = features_SF[:, index]
            if not name.startswith(("log_", "is_")):
                low, high, values = np.log1p(low), np.log1p(high), np.log1p(values)
            margin = 0.0 if name.startswith("is_") else TOLERANCE * (high - low) + 1e-9
            if values.size and (values.min() < low - margin or values.max() > high + margin):
                found.append(name)
        world_size = problem.topology.world_size
        # One rank has no collectives. Between measured world sizes the model interpolates.
        if world_size > 1 and not (
            self.world_sizes and min(self.world_sizes) <= world_size <= max(self.world_sizes)
        ):
            found.append("world_size")
        if problem.training.optimizer not in self.optimizers:
            found.append("optimizer")
        return tuple(found)

    def to_json(self) -> dict[str, Any]:
        """The range as a plain dictionary."""
        return {
            "features": {name: list(pair) for name, pair in self.features.items()},
            "world_sizes": list(self.world_sizes),
            "optimizers": [optimizer.value for optimizer in self.optimizers],
        }

    @classmethod
    def from_json(cls, value: Any) -> MeasuredRange:
        """The inverse of `to_json`.

        Raises:
            ArtifactError: a key is missing or a value is not usable.
        """
        try:
            return cls(
                features={
                    str(name): (float(low), float(high))
                    for name, (low, high) in value["features"].items()
                },
                world_sizes=tuple(int(size) for size in value["world_sizes"]),
                optimizers=tuple(parse_optimizer(name) for name in value["optimizers"]),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ArtifactError("a measured range is malformed", got=str(error)) from error
