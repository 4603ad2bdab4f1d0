"""A sharding problem: tables, the training they serve, and the ranks that hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from autoshard.checks import check_integers
from autoshard.errors import InputError, quoted
from autoshard.tables import Table, check_tables
from autoshard.topology import Topology

MAX_BATCH_SIZE = 2**31 - 1
#: Kernels take their hyper-parameters as fp32.
MAX_FLOAT32 = 3.4028234e38


class Optimizer(Enum):
    """The optimizer that is fused into the embedding backward (FBGEMM's names)."""

    SGD = "sgd"
    ADAGRAD = "adagrad"
    ROWWISE_ADAGRAD = "rowwise_adagrad"
    ADAM = "adam"


@dataclass(frozen=True, kw_only=True)
class TrainingConfig:
    """What a training step looks like, apart from the tables."""

    batch_size: int
    """Samples per rank and step, >= 1."""
    optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD
    learning_rate: float = 0.01
    eps: float = 1e-8
    """Added to the denominator of the adaptive optimizers."""
    dense_bytes: int = 0
    """Bytes that dense layers, their gradients and states take on every rank."""
    batches_in_flight: int = 1
    """Batches held on a rank at once: 1 in a plain loop, 3 in a pipelined one."""

    def __post_init__(self) -> None:
        check_integers(self, batch_size=1, dense_bytes=0, batches_in_flight=1)
        if self.batch_size > MAX_BATCH_SIZE:
            raise InputError(
                "batch_size is out of range", got=self.batch_size, allowed=f"1..{MAX_BATCH_SIZE}"
            )
        for name in ("learning_rate", "eps"):
            value = getattr(self, name)
            if (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value <= MAX_FLOAT32  # also of integers too large for a float
            ):
                raise InputError(
                    f"{name} is not usable",
                    got=quoted(value),
                    allowed=f"numbers from 0 to {MAX_FLOAT32:g}",
                )
        if not isinstance(self.optimizer, Optimizer):
            raise InputError(
                "optimizer is not known",
                got=quoted(self.optimizer),
                allowed=", ".join(o.value for o in Optimizer),
            )

    def to_json(self) -> dict[str, Any]:
        """The configuration as a plain dictionary."""
        return {
            "batch_size": self.batch_size,
            "optimizer": self.optimizer.value,
            "learning_rate": float(self.learning_rate),
            "eps": float(self.eps),
            "dense_bytes": self.dense_bytes,
            "batches_in_flight": self.batches_in_flight,
        }

    @classmethod
    def from_json(cls, value: Any) -> TrainingConfig:
        """The inverse of `to_json`; only `batch_size` is required.

        Raises:
            InputError: a missing or unknown key, or a value that is not usable.
        """
        if not isinstance(value, Mapping):
            raise InputError("workload must be an object", got=quoted(value))
        known = set(cls.__dataclass_fields__)
        if unknown := sorted(set(value) - known):
            raise InputError("unknown key in workload", got=unknown, allowed=sorted(known))
        if "batch_size" not in value:
            raise InputError("workload lacks batch_size", remedy="give the batch size per rank")
        fields = dict(value)
        if "optimizer" in fields:
            fields["optimizer"] = parse_optimizer(fields["optimizer"])
        return cls(**fields)


def parse_optimizer(name: object) -> Optimizer:
    """The optimizer called `name`.

    Raises:
        InputError: there is none of that name.
    """
    try:
        return Optimizer(name)
    except ValueError as error:
        raise InputError(
            "optimizer is not known", got=name, allowed=", ".join(o.value for o in Optimizer)
        ) from error


@dataclass(frozen=True, kw_only=True)
class ShardingProblem:
    """Which tables to place, for which training, on which ranks."""

    tables: tuple[Table, ...]
    topology: Topology
    training: TrainingConfig

    def __post_init__(self) -> None:
        object.__setattr__(self, "tables", check_tables(self.tables))

    @property
    def global_batch_size(self) -> int:
        """Samples per step over all ranks."""
        return self.training.batch_size * self.topology.world_size
