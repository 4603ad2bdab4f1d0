"""What to measure and how: the schema behind `conf/measure.yaml`.

Plain values only (numbers, text, lists), so that the same dataclasses serve Hydra, the
worker processes and the fingerprint that says whether a folder may be continued.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from types import UnionType
from typing import Any, TypeGuard, get_args, get_origin, get_type_hints

from autoshard.checks import check_integers, check_numbers
from autoshard.cost_models.device_specs import find_device_spec
from autoshard.errors import InputError, listed, quoted
from autoshard.files import fingerprint
from autoshard.problem import Optimizer
from autoshard.runtime.capabilities import Device
from autoshard.suggestions import did_you_mean

#: Part of every fingerprint of a run; raised when a row's meaning changes.
MEASURE_VERSION = 2


class SimulatedDevice(Enum):
    """In place of a device that runs kernels: times from a spec, see `simulation`."""

    SIMULATED = "simulated"


#: Where the times of rows come from.
MeasuredDevice = Device | SimulatedDevice


def is_simulated(device: MeasuredDevice) -> TypeGuard[SimulatedDevice]:
    """Whether nothing is timed."""
    return isinstance(device, SimulatedDevice)


def real_device(device: MeasuredDevice) -> Device:
    """A device that runs kernels.

    Raises:
        InputError: the device is simulated.
    """
    if isinstance(device, Device):
        return device
    raise InputError(
        "a simulated device runs nothing",
        got=device.value,
        allowed=", ".join(d.value for d in Device),
    )


class CacheState(Enum):
    """What the CPU's or GPU's caches hold when a timed kernel starts."""

    WARM = "warm"
    """Whatever the iteration before left: hot rows of the last batches, code and buffers."""
    COLD = "cold"
    """Nothing of the tables: a buffer of twice the last-level cache was swept before."""


class Collective(Enum):
    """The collectives that sharding types need; new ones are added at the end."""

    ALL_TO_ALL = "all_to_all"
    """Ids and pooled outputs of whole tables and column slices, gradients; sizes may be uneven."""
    REDUCE_SCATTER = "reduce_scatter"
    """Partial pooled outputs of row slices: added up, and each rank gets its samples' part."""
    ALL_GATHER = "all_gather"
    """Output gradients for row slices: every rank gets those of all samples."""
    ALL_REDUCE = "all_reduce"
    """Gradients of dense replicas: added up, and every rank gets all."""


@dataclass(frozen=True, kw_only=True)
class TimingConfig:
    """How often one thing is repeated until its median is trusted."""

    warmup_iterations: int = 3
    """Iterations before the clock counts, >= 1."""
    min_iterations: int = 9
    """Timed iterations at least, >= 3."""
    max_iterations: int = 40
    """Timed iterations at most."""
    target_relative_error: float = 0.02
    """Stop once the standard error of the median is at most this share of it."""
    time_budget_s: float = 0.3
    """Stop (after `min_iterations`) once the timed iterations took this long."""

    def __post_init__(self) -> None:
        check_integers(self, warmup_iterations=1, min_iterations=3, max_iterations=3)
        check_numbers(self, target_relative_error=0.0, time_budget_s=0.0)
        if self.max_iterations < self.min_iterations:
            raise InputError(
                "max_iterations is below min_iterations",
                got=f"{self.max_iterations} < {self.min_iterations}",
            )


@dataclass(frozen=True, kw_only=True)
class KernelConfig:
    """How kernels are timed."""

    device: MeasuredDevice = Device.CPU
    """Where the kernels run, or `simulated`."""
    optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD
    """Fused into the backward."""
    cache: CacheState = CacheState.WARM
    num_batches: int = 3
    """Batches drawn beforehand and cycled, so that no single one stays in the caches."""
    timing: TimingConfig = field(default_factory=TimingConfig)
    reference_interval_ms: float = 8.0
    """How long a shard set is timed until the reference kernels take their next turn, > 0."""
    arena_bytes: int = 2**30
    """Weights of the largest shard set, per worker. Memory is touched only as used."""

    def __post_init__(self) -> None:
        check_integers(self, num_batches=1, arena_bytes=2**20)
        check_numbers(self, reference_interval_ms=0.0)


@dataclass(frozen=True, kw_only=True)
class SamplingConfig:
    """Which shard sets are drawn."""

    max_shards: int = 200
    """Most shards in a set; the number is drawn log-uniformly from 1 on."""
    num_samples: tuple[int, ...] = (256, 512, 1024, 2048, 4096)
    """Samples of one step, all ranks together. Drawn from those at which the set fits."""
    world_sizes: tuple[int, ...] = (1, 2, 4, 8)
    """Ranks of the plan that a set is a part of: a replica looks up one rank's samples."""
    replica_sets_share: float = 0.4
    """Probability that a set holds replicas; then each table is one with a probability
    drawn uniformly for the set."""
    variant_sets_share: float = 0.25
    """Probability that a set holds variants: then each table has weighted bags, fp16 weights
    and a second feature with probability `variant_share` each."""
    variant_share: float = 0.3
    column_share: float = 0.15
    """Probability that a table appears as a half or a quarter of its columns."""
    row_share: float = 0.10
    """Probability that a table appears as one of 2, 4 or 8 row slices."""
    augmented_share: float = 0.5
    """Share of the training sets whose dims and pooling factors are replaced."""
    pooling_jitter: float = 0.5
    """Standard deviation of the logarithm of an augmented pooling factor's multiplier."""
    split_shares: tuple[float, float, float] = (0.8, 0.1, 0.1)
    """Share of tables, and of sets, in training, validation and test; each set holds
    tables of one split only."""
    max_iteration_ms: float = 60.0
    """Estimated time of one forward and backward; what would exceed it is left out."""
    max_weight_bytes: int = 2**30
    """Weights of one set, padding included; at most the arena."""

    def __post_init__(self) -> None:
        for name in ("num_samples", "world_sizes", "split_shares"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        check_integers(self, max_shards=1, max_weight_bytes=2**10)
        check_numbers(
            self,
            replica_sets_share=0.0,
            variant_sets_share=0.0,
            variant_share=0.0,
            column_share=0.0,
            row_share=0.0,
            augmented_share=0.0,
            pooling_jitter=0.0,
            max_iteration_ms=0.0,
        )
        for name in ("num_samples", "world_sizes"):
            values = getattr(self, name)
            if not values or any(
                isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in values
            ):
                raise InputError(f"{name} is not usable", got=values, allowed="integers >= 1")
        shares_of_one = {
            "column_share + row_share": self.column_share + self.row_share,
            "augmented_share": self.augmented_share,
            "replica_sets_share": self.replica_sets_share,
            "variant_sets_share": self.variant_sets_share,
            "variant_share": self.variant_share,
        }
        for name, value in shares_of_one.items():
            if value > 1.0:
                raise InputError(f"{name} is not usable", got=value, allowed="at most 1")
        shares = self.split_shares
        if len(shares) != 3 or min(shares) < 0 or abs(sum(shares) - 1.0) > 1e-9 or shares[0] == 0:
            raise InputError(
                "split_shares is not usable",
                got=shares,
                allowed="three shares >= 0 that sum to 1, the first > 0",
            )


@dataclass(frozen=True, kw_only=True)
class CollectiveConfig:
    """Which collectives are timed, and how."""

    device: MeasuredDevice = Device.CPU
    """CPU uses gloo, CUDA uses NCCL with one GPU per rank; or `simulated`."""
    world_sizes: tuple[int, ...] = (2, 4, 8)
    """Process groups to measure; more ranks than cores are marked `oversubscribed`."""
    kinds: tuple[Collective, ...] = (Collective.ALL_TO_ALL,)
    """Which collectives. The cost model learns from all-to-alls, which are all that autoshard's
    runtime puts into a step; the others take as long again, each."""
    num_collectives: int = 200
    """Collectives of each kind per world size."""
    max_rank_bytes: int = 16 * 2**20
    """Most bytes that one rank sends (or receives) to the others together."""
    timing: TimingConfig = field(
        default_factory=lambda: TimingConfig(
            min_iterations=15,
            max_iterations=300,
            target_relative_error=0.03,
            time_budget_s=0.25,
        )
    )
    """More repetitions than for kernels: what the system's scheduler does dominates them."""
    item_time_limit_s: float = 60.0
    """A collective that takes longer, start of the group included, is a failure."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "world_sizes", tuple(self.world_sizes))
        object.__setattr__(self, "kinds", tuple(map(_collective, self.kinds)))
        check_integers(self, num_collectives=0, max_rank_bytes=64)
        check_numbers(self, item_time_limit_s=0.0)
        if any(
            isinstance(size, bool) or not isinstance(size, int) or size < 2
            for size in self.world_sizes
        ) or len(set(self.world_sizes)) != len(self.world_sizes):
            raise InputError(
                "world_sizes is not usable",
                got=self.world_sizes,
                allowed="different integers >= 2",
            )
        if not self.kinds or len(set(self.kinds)) != len(self.kinds):
            raise InputError(
                "kinds is not usable",
                got=listed(kind.value for kind in self.kinds) or "none",
                allowed=f"at least one, each once, of {listed(kind.value for kind in Collective)}",
                remedy="set collectives.num_collectives=0 to measure no collectives",
            )
        if is_simulated(self.device) and self.kinds != (Collective.ALL_TO_ALL,):
            raise InputError(
                "the simulated device knows no collectives of this kind",
                got=listed(kind.value for kind in self.kinds),
                allowed=Collective.ALL_TO_ALL.value,
            )


def _collective(value: Any) -> Collective:
    """The collective of that name; YAML gives text."""
    if isinstance(value, Collective):
        return value
    names = [kind.value for kind in Collective]
    if value not in names:
        raise InputError(
            "kinds names a collective that is not known",
            got=quoted(value),
            allowed=listed(names),
            remedy=did_you_mean(value, names),
        )
    return Collective(value)


@dataclass(frozen=True, kw_only=True)
class MeasureConfig:
    """One run of measurements."""

    seed: int = 0
    """Decides tables' splits, shard sets, traffic and order."""
    workload: dict[str, Any] = field(
        default_factory=lambda: {"name": "production", "num_tables": 400}
    )
    """The pool of tables: `name` of a registered workload, and its options."""
    num_sets: int = 3000
    """Shard sets to measure; a folder can be continued with more."""
    part: int = 0
    """Which part of the run to measure, in [0, num_parts): the shard sets and collectives whose
    number leaves this remainder. No part of what a row means, so that parts merge."""
    num_parts: int = 1
    """Into how many parts the run is divided, each for a machine of its own, >= 1."""
    num_passes: int = 2
    """How often every set is measured, >= 1: all sets once, in a new random order and in fresh
    processes, before any is measured again. A measurement is the mean of its passes."""
    num_repeated_sets: int = 150
    """So many sets, of the test split if there is one, are measured once more, with as many
    passes, after all else: what the two measurements differ by is the error that no cost model
    can get below."""
    workers: int = 0
    """Processes, each on a core of its own and all busy at once as in training; 0 takes
    every core."""
    kernels: KernelConfig = field(default_factory=KernelConfig)
    sampling: SamplingConfig = field(default_factory=SamplingConfig)
    collectives: CollectiveConfig = field(default_factory=CollectiveConfig)
    simulated_device: str = "a100-80gb"
    """Whose spec answers where a device is `simulated`; see `cost_models.device_specs`."""
    item_time_limit_s: float = 60.0
    """A shard set that takes longer is a failure."""
    machine_wait_limit_s: float = 21600.0
    """How long to wait for another process that measures on this machine; see `machine_lock`."""
    flush_rows: int = 100
    """Finished rows are written at the latest when there are so many …"""
    flush_s: float = 5.0
    """… or when the oldest is this old."""

    def __post_init__(self) -> None:
        check_integers(self, seed=0, num_sets=0, num_passes=1, num_repeated_sets=0)
        check_integers(self, workers=0, flush_rows=1, part=0, num_parts=1)
        check_numbers(self, item_time_limit_s=0.0, flush_s=0.0, machine_wait_limit_s=0.0)
        if self.part >= self.num_parts:
            raise InputError(
                "part is not below num_parts",
                got=f"part {self.part} of {self.num_parts}",
                allowed=f"0..{self.num_parts - 1}",
                remedy="parts are counted from 0: part=range(0,4) num_parts=4",
            )
        if self.num_repeated_sets > self.num_sets:
            raise InputError(
                "num_repeated_sets is above num_sets",
                got=f"{self.num_repeated_sets} > {self.num_sets}",
            )
        simulated = [is_simulated(part.device) for part in (self.kernels, self.collectives)]
        if any(simulated):
            find_device_spec(self.simulated_device)
        exchanges = bool(self.collectives.num_collectives and self.collectives.world_sizes)
        if self.num_sets and exchanges and len(set(simulated)) > 1:
            raise InputError(
                "simulated and real rows do not go together",
                got=f"kernels.device={self.kernels.device.value}, "
                f"collectives.device={self.collectives.device.value}",
                remedy="simulate both or neither, or measure only one of them "
                "(num_sets=0, or collectives.num_collectives=0)",
            )
        if self.sampling.max_weight_bytes > self.kernels.arena_bytes:
            raise InputError(
                "sampling.max_weight_bytes is above kernels.arena_bytes",
                got=f"{self.sampling.max_weight_bytes} > {self.kernels.arena_bytes}",
                remedy="raise kernels.arena_bytes, or lower the other",
            )

    def takes(self, index: int) -> bool:
        """Whether this part measures the shard set or collective of that number."""
        return index % self.num_parts == self.part


def to_plain(value: Any) -> Any:
    """A configuration as dictionaries, lists, numbers and text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def measure_config(value: Mapping[str, Any]) -> MeasureConfig:
    """The inverse of `to_plain`, for what a YAML file says; absent keys keep their defaults.

    Raises:
        InputError: an unknown key, or a value that is not usable; the key is named in full.
    """
    config: MeasureConfig = _from_plain(MeasureConfig, value, "")
    return config


def _from_plain(kind: Any, value: Any, where: str) -> Any:
    if not isinstance(value, Mapping):
        raise InputError(f"{where or 'the configuration'} is not a mapping", got=quoted(value))
    hints = get_type_hints(kind)
    fields: dict[str, Any] = {}
    for key, item in value.items():
        name = f"{where}.{key}" if where else str(key)
        if key not in hints:
            raise InputError(
                f"unknown key {name!r}",
                allowed=", ".join(hints),
                remedy=did_you_mean(key, hints),
            )
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            item = _from_plain(hint, item, name)
        elif kinds := _enums(hint):
            options = [member.value for kind_ in kinds for member in kind_]
            if item not in options:
                raise InputError(
                    f"{name} is not known",
                    got=item,
                    allowed=", ".join(options),
                    remedy=did_you_mean(item, options),
                )
            item = next(member for kind_ in kinds for member in kind_ if member.value == item)
        elif get_origin(hint) is tuple and not isinstance(item, list | tuple):
            raise InputError(f"{name} is not a list", got=quoted(item))
        elif get_origin(hint) is dict and not isinstance(item, Mapping):
            raise InputError(f"{name} is not a mapping", got=quoted(item))
        fields[key] = item
    try:
        return kind(**fields)
    except InputError as error:
        prefix = f"{where}: " if where else ""
        raise InputError(
            f"{prefix}{error.what}", got=error.got, allowed=error.allowed, remedy=error.remedy
        ) from error


def _enums(hint: Any) -> list[type[Enum]]:
    """The enums that a field takes members of; none for other fields."""
    parts = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    return [part for part in parts if isinstance(part, type) and issubclass(part, Enum)]


def protocol_fingerprint(*parts: Any) -> str:
    """Identifies what decides a row's meaning; equal for a run and its continuation."""
    return fingerprint([MEASURE_VERSION, *map(to_plain, parts)])
