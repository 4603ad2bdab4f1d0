"""What the runtime can execute: the one table that planning, validation and running consult.

A row says that an optimizer runs on a device with a data type and a sharding type, and
which embedding dimensions it takes. Imports neither torch nor FBGEMM, so that a planner
can ask on a machine that has neither.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from autoshard.errors import InputError, UnsupportedError
from autoshard.plan import ShardingPlan
from autoshard.problem import Optimizer, ShardingProblem
from autoshard.shards import ShardingType
from autoshard.tables import DataType


class Device(Enum):
    """Where the kernels run; decides the process-group backend (gloo or NCCL)."""

    CPU = "cpu"
    CUDA = "cuda"


@dataclass(frozen=True, kw_only=True)
class Capability:
    """One combination that runs."""

    device: Device
    optimizer: Optimizer
    data_type: DataType
    sharding_type: ShardingType
    min_embedding_dim: int = 1
    max_embedding_dim: int | None = None
    """None for no limit. Columns are padded to the kernel's alignment."""
    seen_running: bool
    """Whether the tests of this package execute this combination."""


#: FBGEMM 1.8's CPU kernels refuse Adam and bf16 weights; dims above 2,048 run there.
_OPTIMIZERS = {
    Device.CPU: (Optimizer.SGD, Optimizer.ADAGRAD, Optimizer.ROWWISE_ADAGRAD),
    Device.CUDA: (Optimizer.SGD, Optimizer.ADAGRAD, Optimizer.ROWWISE_ADAGRAD, Optimizer.ADAM),
}
_DATA_TYPES = {
    Device.CPU: (DataType.FP32, DataType.FP16),
    Device.CUDA: (DataType.FP32, DataType.FP16, DataType.BF16),
}

CAPABILITIES: tuple[Capability, ...] = tuple(
    Capability(
        device=device,
        optimizer=optimizer,
        data_type=data_type,
        sharding_type=sharding_type,
        max_embedding_dim=None if device is Device.CPU else 2048,
        seen_running=device is Device.CPU,
    )
    for device in Device
    for optimizer in _OPTIMIZERS[device]
    for data_type in _DATA_TYPES[device]
    for sharding_type in ShardingType
)


def parse_device(name: str | Device) -> Device:
    """The device called `name`.

    Raises:
        InputError: there is none of that name.
    """
    try:
        return Device(name)
    except ValueError as error:
        raise InputError(
            "device is not known", got=name, allowed=", ".join(d.value for d in Device)
        ) from error


def supported_optimizers(device: Device) -> tuple[Optimizer, ...]:
    """The fused optimizers that run on `device`, in a fixed order."""
    return tuple(dict.fromkeys(c.optimizer for c in CAPABILITIES if c.device is device))


def supported_data_types(device: Device) -> tuple[DataType, ...]:
    """The weight types that run on `device`, in a fixed order."""
    return tuple(dict.fromkeys(c.data_type for c in CAPABILITIES if c.device is device))


def find_capability(
    *,
    device: Device,
    optimizer: Optimizer,
    data_type: DataType,
    sharding_type: ShardingType,
    embedding_dim: int,
) -> Capability | None:
    """The row that covers a table, or None if it does not run."""
    for row in CAPABILITIES:
        if (row.device, row.optimizer, row.data_type, row.sharding_type) == (
            device,
            optimizer,
            data_type,
            sharding_type,
        ):
            fits = row.max_embedding_dim is None or embedding_dim <= row.max_embedding_dim
            return row if fits and embedding_dim >= row.min_embedding_dim else None
    return None


def check_problem(problem: ShardingProblem, device: Device = Device.CPU) -> None:
    """Refuse optimizers and data types that no sharding type of the runtime executes.

    Raises:
        UnsupportedError: names the tables, what they ask for and what is supported.
    """
    _check_optimizer(problem.training.optimizer, device)
    _check_data_types(((t.name, t.data_type) for t in problem.tables), device)


def check_plan_supported(plan: ShardingPlan, device: Device = Device.CPU) -> None:
    """Refuse a plan that the runtime cannot execute, before anything is allocated.

    Raises:
        UnsupportedError: names the tables, what they ask for and what is supported.
    """
    _check_optimizer(plan.training.optimizer, device)
    _check_data_types(((e.table.name, e.table.data_type) for e in plan.tables), device)
    for entry in plan.tables:
        row = find_capability(
            device=device,
            optimizer=plan.training.optimizer,
            data_type=entry.table.data_type,
            sharding_type=entry.sharding_type,
            embedding_dim=entry.table.embedding_dim,
        )
        if row is None:
            raise UnsupportedError(
                f"table {entry.table.name!r}: no kernel on {device.value} takes its "
                f"combination of optimizer, data type, sharding type and embedding_dim",
                got=f"{plan.training.optimizer.value}, {entry.table.data_type.value}, "
                f"{entry.sharding_type.value}, {entry.table.embedding_dim}",
            )


def _check_optimizer(optimizer: Optimizer, device: Device) -> None:
    optimizers = supported_optimizers(device)
    if optimizer not in optimizers:
        raise UnsupportedError(
            f"the fused optimizer does not run on {device.value}",
            got=optimizer.value,
            allowed=", ".join(o.value for o in optimizers),
        )


def _check_data_types(tables: Iterable[tuple[str, DataType]], device: Device) -> None:
    data_types = supported_data_types(device)
    refused: dict[str, list[str]] = {}
    for name, data_type in tables:
        if data_type not in data_types:
            refused.setdefault(data_type.value, []).append(name)
    if refused:
        raise UnsupportedError(
            f"the kernels do not take these weights on {device.value}",
            got="; ".join(f"{kind}: {_names(names)}" for kind, names in sorted(refused.items())),
            allowed=", ".join(kind.value for kind in data_types),
        )


def _names(names: list[str], limit: int = 8) -> str:
    shown = ", ".join(names[:limit])
    return shown if len(names) <= limit else f"{shown} and {len(names) - limit} more"
