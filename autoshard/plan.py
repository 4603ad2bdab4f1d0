"""The sharding plan: which rank holds which part of which table.

`plan.json` is the hand-over to whoever runs it: it carries the topology, the
workload, the tables with their shards, the cost with its source, where it
comes from, and a checksum over everything but the provenance. A plan written
by hand may leave out cost, provenance and checksum.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from autoshard.distributions import IdDistribution
from autoshard.errors import InputError, PlanError, quoted, readable
from autoshard.files import canonical_json, fingerprint, read_json, write_text
from autoshard.objective import StepCost
from autoshard.problem import ShardingProblem, TrainingConfig
from autoshard.shards import Shard, ShardingType, ShardSlice
from autoshard.tables import BagLengths, DataType, PoolingType, Table
from autoshard.topology import Topology

PLAN_VERSION = 1
COMPUTE_KERNELS = ("fused",)
#: Costs that differ by less than this share differ by rounding only.
_SAME_COST = 1e-9


@dataclass(frozen=True)
class TablePlan:
    """One table's part of a plan."""

    table: Table
    sharding_type: ShardingType
    shards: tuple[Shard, ...]
    compute_kernel: str = "fused"

    def slices(self) -> tuple[tuple[int, ShardSlice], ...]:
        """(rank, slice) of each shard."""
        return tuple(
            (
                shard.rank,
                ShardSlice(
                    self.table,
                    self.sharding_type,
                    shard.row_offset,
                    shard.col_offset,
                    shard.num_rows,
                    shard.num_cols,
                ),
            )
            for shard in self.shards
        )


@dataclass(frozen=True, kw_only=True)
class PlanCost:
    """What a plan costs, and how good that is."""

    step: StepCost
    lower_bound_ms: float | None = None
    """No plan of these shards costs less under the same cost model; None if not known."""
    best_known_ms: float | None = None
    """The best plan found by any search for the same problem; None if none was run.

    The search may be the one that made this very plan: see `is_best_known`.
    """

    @property
    def is_best_known(self) -> bool:
        """Whether the best plan known is this one, so that comparing with it says nothing."""
        best = self.best_known_ms
        return best is not None and self.step.step_ms <= best * (1 + _SAME_COST)

    def to_json(self) -> dict[str, Any]:
        """The cost as a plain dictionary."""
        return {
            **self.step.to_json(),
            "lower_bound_ms": self.lower_bound_ms,
            "best_known_ms": self.best_known_ms,
        }


@dataclass(frozen=True, kw_only=True)
class ShardingPlan:
    """A plan for one problem. Construct it with `autoshard.plan.plan_from_slices` or read it."""

    topology: Topology
    training: TrainingConfig
    tables: tuple[TablePlan, ...]
    cost: PlanCost | None = None
    provenance: Mapping[str, Any] = field(default_factory=dict)

    @property
    def problem(self) -> ShardingProblem:
        """The problem that this plan answers."""
        return ShardingProblem(
            tables=tuple(entry.table for entry in self.tables),
            topology=self.topology,
            training=self.training,
        )

    def slices_by_rank(self) -> list[list[ShardSlice]]:
        """The slices that each rank holds, [world_size]."""
        held: list[list[ShardSlice]] = [[] for _ in range(self.topology.world_size)]
        for entry in self.tables:
            for rank, slice_ in entry.slices():
                held[rank].append(slice_)
        return held

    def with_cost(self, cost: PlanCost | None) -> ShardingPlan:
        """The same plan with another cost."""
        return replace(self, cost=cost)

    def to_json(self) -> dict[str, Any]:
        """The plan as the versioned dictionary of `plan.json`, checksum included."""
        body: dict[str, Any] = {
            "version": PLAN_VERSION,
            "topology": self.topology.to_json(),
            "workload": {
                **self.training.to_json(),
                "ids": {
                    entry.table.name: {
                        **entry.table.ids.to_json(),
                        "bag_lengths": entry.table.bag_lengths.value,
                    }
                    for entry in self.tables
                },
            },
            "tables": [
                {
                    "name": entry.table.name,
                    "feature_names": list(entry.table.feature_names),
                    "num_embeddings": entry.table.num_embeddings,
                    "embedding_dim": entry.table.embedding_dim,
                    "pooling_factor": float(entry.table.pooling_factor),
                    "pooling": entry.table.pooling.value,
                    "data_type": entry.table.data_type.value,
                    "weighted": entry.table.weighted,
                    "sharding_type": entry.sharding_type.value,
                    "compute_kernel": entry.compute_kernel,
                    "shards": [shard.to_json() for shard in entry.shards],
                }
                for entry in self.tables
            ],
            "cost": None if self.cost is None else self.cost.to_json(),
        }
        return {**body, "provenance": dict(self.provenance), "checksum": fingerprint(body)}

    def save(self, path: str | Path) -> None:
        """Write `plan.json`, atomically."""
        import json

        write_text(path, json.dumps(self.to_json(), indent=1, allow_nan=False) + "\n")


def plan_from_slices(
    problem: ShardingProblem,
    placed: Sequence[tuple[ShardSlice, int]],
    *,
    cost: PlanCost | None = None,
    provenance: Mapping[str, Any] | None = None,
) -> ShardingPlan:
    """Build a plan from slices and the rank of each.

    A `data_parallel` slice is given once for every rank. Tables keep the problem's
    order and each table's shards are sorted by offset, so equal placements give equal plans.
    """
    shards: dict[str, list[Shard]] = {table.name: [] for table in problem.tables}
    types: dict[str, ShardingType] = {}
    for slice_, rank in placed:
        shards[slice_.table.name].append(slice_.on(rank))
        types[slice_.table.name] = slice_.sharding_type
    entries = tuple(
        TablePlan(
            table,
            types[table.name],
            tuple(sorted(shards[table.name], key=lambda s: (s.row_offset, s.col_offset, s.rank))),
        )
        for table in problem.tables
    )
    return ShardingPlan(
        topology=problem.topology,
        training=problem.training,
        tables=entries,
        cost=cost,
        provenance=dict(provenance or {}),
    )


_TABLE_KEYS = {
    "name",
    "feature_names",
    "num_embeddings",
    "embedding_dim",
    "pooling_factor",
    "pooling",
    "data_type",
    "weighted",
    "sharding_type",
    "compute_kernel",
    "shards",
}
_OPTIONAL_TABLE_KEYS = {"feature_names", "pooling", "data_type", "weighted", "compute_kernel"}
_PLAN_KEYS = {"version", "topology", "workload", "tables", "cost", "provenance", "checksum"}
_SHARD_KEYS = ("rank", "row_offset", "col_offset", "num_rows", "num_cols")


def load_plan(path: str | Path) -> ShardingPlan:
    """Read `plan.json`.

    Raises:
        InputError: the file cannot be read.
        PlanError: it is malformed, of another version, or altered since it was written.
    """
    return plan_from_json(read_json(path, "plan"), where=str(path))


def plan_from_json(value: Any, where: str = "plan") -> ShardingPlan:
    """The inverse of `ShardingPlan.to_json`; `where` names the plan in errors."""
    try:
        return _parse_plan(value)
    except PlanError as error:
        raise PlanError(f"{where}: {error}") from error
    except InputError as error:
        raise PlanError(f"{where}: {error}") from error
    except (TypeError, ValueError, OverflowError) as error:  # text or 10^400 for a number
        raise PlanError(f"{where}: a value is not usable", got=error) from error


def _object(value: Any, what: str, keys: set[str], optional: set[str]) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise PlanError(f"{what} must be an object", got=quoted(value))
    if unknown := sorted(set(value) - keys):
        raise PlanError(f"{what} has an unknown key", got=unknown, allowed=sorted(keys))
    if missing := sorted(keys - optional - set(value)):
        raise PlanError(f"{what} lacks a key", got=missing)
    return value


def _parse_plan(value: Any) -> ShardingPlan:
    if isinstance(value, Mapping) and (
        isinstance(value.get("version"), bool) or value.get("version", PLAN_VERSION) != PLAN_VERSION
    ):
        raise PlanError(
            "the plan's version is not known",
            got=value["version"],
            allowed=PLAN_VERSION,
            remedy="write the plan again with this autoshard",
        )
    value = _object(value, "the plan", _PLAN_KEYS, {"cost", "provenance", "checksum"})
    if value.get("checksum") is not None:
        body = {key: value.get(key) for key in sorted(_PLAN_KEYS - {"provenance", "checksum"})}
        try:
            actual = fingerprint(body)
        except ValueError as error:
            raise PlanError("the plan holds a number that is not finite") from error
        if actual != value["checksum"]:
            raise PlanError(
                "the plan was altered after it was written (checksum differs)",
                got=f"{readable(value['checksum'])} in the file",
                allowed=f"{actual}, which is what its content gives",
                remedy="plan again, or remove the checksum to accept the change",
            )
    workload = value["workload"]
    if not isinstance(workload, Mapping):
        raise PlanError("workload must be an object", got=quoted(workload))
    workload = dict(workload)
    ids = workload.pop("ids", {})
    if not isinstance(ids, Mapping):
        raise PlanError("workload.ids must be an object", got=quoted(ids))
    entries = value["tables"]
    if not isinstance(entries, Sequence) or isinstance(entries, str) or not entries:
        raise PlanError("tables must be a list with at least one table", got=quoted(entries))
    tables = tuple(_parse_table(entry, index, ids) for index, entry in enumerate(entries))
    if unknown := sorted(set(ids) - {entry.table.name for entry in tables}):
        raise PlanError("workload.ids names a table that the plan does not have", got=unknown)
    return ShardingPlan(
        topology=Topology.from_json(value["topology"]),
        training=TrainingConfig.from_json(workload),
        tables=tables,
        cost=_parse_cost(value.get("cost")),
        provenance=_object_or_empty(value.get("provenance")),
    )


def _object_or_empty(value: Any) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise PlanError("provenance must be an object", got=quoted(value))
    try:
        canonical_json(value)
    except ValueError as error:
        raise PlanError("provenance holds a number that is not finite") from error
    return value


def _parse_cost(value: Any) -> PlanCost | None:
    if value is None:
        return None
    step = StepCost.from_json(value)
    optional = {}
    for name in ("lower_bound_ms", "best_known_ms"):
        number = value.get(name)
        if number is not None and (
            isinstance(number, bool)
            or not isinstance(number, int | float)
            or not 0 <= number < float("inf")
        ):
            raise PlanError(
                f"cost.{name} is not usable", got=quoted(number), allowed="a finite number >= 0"
            )
        optional[name] = None if number is None else float(number)
    return PlanCost(step=step, **optional)


def _parse_enum(kind: Any, value: object, what: str) -> Any:
    try:
        return kind(value)
    except ValueError as error:
        allowed = ", ".join(member.value for member in kind)
        raise PlanError(f"{what} is not known", got=quoted(value), allowed=allowed) from error


def _parse_table(value: Any, index: int, ids: Mapping[str, Any]) -> TablePlan:
    name = value.get("name", index) if isinstance(value, Mapping) else index
    what = f"table {name!r}"
    value = _object(value, what, _TABLE_KEYS, _OPTIONAL_TABLE_KEYS)
    features = value.get("feature_names", ())
    if not isinstance(features, Sequence) or isinstance(features, str):
        raise PlanError(f"{what}: feature_names must be a list", got=quoted(features))
    table_ids = ids.get(str(name), {})
    if not isinstance(table_ids, Mapping):
        raise PlanError(f"workload.ids of {what} must be an object", got=quoted(table_ids))
    table_ids = dict(table_ids)
    bag_lengths = table_ids.pop("bag_lengths", BagLengths.CONSTANT.value)
    weighted = value.get("weighted", False)
    if not isinstance(weighted, bool):
        raise PlanError(f"{what}: weighted must be true or false", got=quoted(weighted))
    kernel = value.get("compute_kernel", "fused")
    if kernel not in COMPUTE_KERNELS:
        raise PlanError(
            f"{what}: compute_kernel is not supported", got=quoted(kernel), allowed=COMPUTE_KERNELS
        )
    table = Table(
        name=value["name"],
        feature_names=tuple(features),
        num_embeddings=value["num_embeddings"],
        embedding_dim=value["embedding_dim"],
        pooling_factor=value["pooling_factor"],
        pooling=_parse_enum(PoolingType, value.get("pooling", "sum"), f"{what}: pooling"),
        data_type=_parse_enum(DataType, value.get("data_type", "fp32"), f"{what}: data_type"),
        weighted=weighted,
        ids=IdDistribution.from_json(table_ids),
        bag_lengths=_parse_enum(BagLengths, bag_lengths, f"{what}: bag_lengths"),
    )
    sharding_type = _parse_enum(ShardingType, value["sharding_type"], f"{what}: sharding_type")
    shards = value["shards"]
    if not isinstance(shards, Sequence) or isinstance(shards, str):
        raise PlanError(f"{what}: shards must be a list", got=quoted(shards))
    parsed = []
    for position, shard in enumerate(shards):
        shard_name = f"{what}, shard {position}"
        shard = _object(shard, shard_name, set(_SHARD_KEYS), set())
        for key in _SHARD_KEYS:
            number = shard[key]
            if isinstance(number, bool) or not isinstance(number, int) or number < 0:
                raise PlanError(
                    f"{shard_name}: {key} is not usable",
                    got=quoted(number),
                    allowed="integers >= 0",
                )
        parsed.append(Shard(*(shard[key] for key in _SHARD_KEYS)))
    return TablePlan(table, sharding_type, tuple(parsed), kernel)
