"""Draws the shard sets and the traffic that are measured, as plans produce them.

Every draw depends on the seed and its index only, so a run that is continued measures
exactly what is missing, and two machines measure the same things.

A set holds tables of one split (training, validation or test), so that errors on the
test split are errors on tables never seen. Most tables appear whole; some as a half or a
quarter of their columns, some as a slice of their rows, cut as `autoshard.splitting`
cuts, and in some sets as replicas. A set's first table is cut into rows until it fits the
budget, as a plan would.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

import numpy as np

from autoshard.errors import InputError
from autoshard.measure.config import SamplingConfig
from autoshard.shards import KERNEL_ALIGNMENT, ShardingType, ShardSlice, padded_cols
from autoshard.tables import DataType, Table, check_tables

#: Upper estimates for one thread, forward and backward together, of FBGEMM 1.8 on a
#: server CPU shared with other work: they bound a measurement's time, nothing else.
NS_PER_LOOKUP = 40.0
NS_PER_LOOKUP_ELEMENT = 1.0
NS_PER_BAG = 15.0
NS_PER_BAG_ELEMENT = 1.0
_COLUMN_PARTS = (2, 4)
_ROW_PARTS = (2, 4, 8)
#: Bags of augmented tables stay within what tables have at all.
_MAX_POOLING_FACTOR = 4096.0
_SPLIT_STREAM, _SET_STREAM = 1, 2


class Split(Enum):
    """What a row may be used for."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@dataclass(frozen=True, kw_only=True)
class ShardSet:
    """One draw: what a rank holds, and for how many samples."""

    index: int
    split: Split
    augmented: bool
    """Whether dims and pooling factors differ from the pool's."""
    num_samples: int
    """Samples of all ranks together."""
    world_size: int
    """Ranks of the plan; divides `num_samples`."""
    slices: tuple[ShardSlice, ...]

    @property
    def batch_size(self) -> int:
        """Samples of one rank."""
        return self.num_samples // self.world_size


def split_tables(
    tables: Sequence[Table], shares: Sequence[float], *, seed: int
) -> dict[Split, tuple[Table, ...]]:
    """Divide the pool. Every split with a share > 0 gets at least one table.

    Raises:
        InputError: fewer tables than splits, or duplicate names.
    """
    ordered = sorted(check_tables(tables), key=lambda table: table.name)
    wanted = [split for split, share in zip(Split, shares, strict=True) if share > 0]
    if len(ordered) < len(wanted):
        raise InputError(
            "the pool has fewer tables than splits",
            got=f"{len(ordered)} table(s)",
            allowed=f"at least {len(wanted)}",
            remedy="give a larger workload, or set split_shares to [1, 0, 0]",
        )
    order = np.random.default_rng([_SPLIT_STREAM, seed]).permutation(len(ordered))
    cuts = np.round(np.cumsum([0.0, *shares]) * len(ordered)).astype(int)
    sizes = dict(zip(Split, np.diff(cuts).tolist(), strict=True))
    for split in wanted:
        if sizes[split] == 0:
            sizes[split] += 1
            sizes[max(sizes, key=lambda s: sizes[s])] -= 1
    pools: dict[Split, tuple[Table, ...]] = {}
    start = 0
    for split in Split:
        chosen = order[start : start + sizes[split]]
        pools[split] = tuple(ordered[index] for index in sorted(chosen))
        start += sizes[split]
    return pools


def estimate_iteration_ms(slices: Sequence[ShardSlice], num_samples: int) -> float:
    """A generous estimate of one forward and backward, to keep measurements short."""
    total_ns = 0.0
    for slice_ in slices:
        cols = padded_cols(slice_.num_cols)
        lookups = num_samples * slice_.table.lookups_per_sample * slice_.row_share
        bags = num_samples * slice_.table.num_features
        total_ns += lookups * (NS_PER_LOOKUP + NS_PER_LOOKUP_ELEMENT * cols)
        total_ns += bags * (NS_PER_BAG + NS_PER_BAG_ELEMENT * cols)
    return total_ns / 1e6


def weight_bytes(slices: Sequence[ShardSlice]) -> int:
    """Bytes of the weights, padding included."""
    return sum(s.num_rows * padded_cols(s.num_cols) * s.table.data_type.num_bytes for s in slices)


class ShardSetSampler:
    """Draws shard sets from a pool of tables."""

    def __init__(self, tables: Sequence[Table], config: SamplingConfig, *, seed: int) -> None:
        """Divide the pool into splits.

        Raises:
            InputError: the pool is too small, or has duplicate names.
        """
        self.config = config
        self.seed = seed
        self.pools = split_tables(tables, config.split_shares, seed=seed)
        self._dims = sorted({table.embedding_dim for table in self.pools[Split.TRAIN]})

    def split_of(self, index: int) -> Split:
        """The split of shard set number `index`."""
        return self._start(index)[0]

    def _start(self, index: int) -> tuple[Split, np.random.Generator]:
        rng = np.random.default_rng([_SET_STREAM, self.seed, index])
        return list(Split)[int(rng.choice(3, p=self.config.split_shares))], rng

    def draw(self, index: int) -> ShardSet:
        """Shard set number `index`: the same for equal pool, configuration and seed.

        Raises:
            InputError: no table of the split fits the budget, in any way tried.
        """
        config = self.config
        split, rng = self._start(index)
        augmented = split is Split.TRAIN and rng.random() < config.augmented_share
        replica_share = rng.random() if rng.random() < config.replica_sets_share else 0.0
        variant_share = config.variant_share if rng.random() < config.variant_sets_share else 0.0
        world_size = int(rng.choice(config.world_sizes))
        pool = self.pools[split]
        count = round(math.exp(rng.uniform(0.0, math.log(config.max_shards + 0.5))))
        candidates = []
        for position in rng.permutation(len(pool))[:count]:
            table = self._augment(pool[position], rng) if augmented else pool[position]
            table = _vary(table, variant_share, rng)
            if rng.random() < replica_share:
                candidates.append(ShardSlice.whole(table, ShardingType.DATA_PARALLEL))
            else:
                candidates.append(self._cut(table, rng))
        # A set keeps its tables where it can, and gets the batch that goes with them.
        fitting = [n for n in config.num_samples if self._fits(candidates, n)]
        num_samples = int(rng.choice(fitting or [min(config.num_samples)]))
        num_samples = max(num_samples // world_size, 1) * world_size
        slices: list[ShardSlice] = []
        for candidate in candidates:
            # Only a set's first shard is cut to fit: the rest may do without a table.
            while not self._fits([*slices, candidate], num_samples) and not slices:
                smaller = _halve(candidate, rng)
                if smaller is None:
                    break
                candidate = smaller
            if self._fits([*slices, candidate], num_samples):
                slices.append(candidate)
        if not slices:
            raise InputError(
                f"no table of the {split.value} split fits the measuring budget "
                f"at {num_samples} samples",
                allowed=f"{config.max_iteration_ms} ms per iteration (estimated) and "
                f"{config.max_weight_bytes} bytes of weights",
                remedy="raise max_iteration_ms or max_weight_bytes, lower num_samples, "
                "or give a pool with smaller tables",
            )
        return ShardSet(
            index=index,
            split=split,
            augmented=augmented,
            num_samples=num_samples,
            world_size=world_size,
            slices=tuple(slices),
        )

    def _fits(self, slices: Sequence[ShardSlice], num_samples: int) -> bool:
        return (
            estimate_iteration_ms(slices, num_samples) <= self.config.max_iteration_ms
            and weight_bytes(slices) <= self.config.max_weight_bytes
        )

    def _augment(self, table: Table, rng: np.random.Generator) -> Table:
        """Another table with the same rows and ids: new columns, new pooling factor."""
        factor = math.exp(rng.normal(0.0, self.config.pooling_jitter))
        return replace(
            table,
            embedding_dim=int(rng.choice(self._dims)),
            pooling_factor=min(table.pooling_factor * factor, _MAX_POOLING_FACTOR),
        )

    def _cut(self, table: Table, rng: np.random.Generator) -> ShardSlice:
        config = self.config
        chance = rng.random()
        if chance < config.column_share:
            parts = int(rng.choice(_COLUMN_PARTS))
            vectors = table.embedding_dim // KERNEL_ALIGNMENT
            if vectors >= parts:
                return _column_slice(table, parts, int(rng.integers(parts)))
        elif chance < config.column_share + config.row_share:
            parts = int(rng.choice(_ROW_PARTS))
            if table.num_embeddings >= parts:
                return _row_slice(table, parts, int(rng.integers(parts)))
        return ShardSlice.whole(table)


def _vary(table: Table, share: float, rng: np.random.Generator) -> Table:
    """The table with other weights, bags or features, each with probability `share`."""
    weighted, half, twice = rng.random(3) < share
    names = table.feature_names
    if twice:
        names = (*names, f"{names[0]}_again")
    return replace(
        table,
        weighted=table.weighted or bool(weighted),
        data_type=DataType.FP16 if half else table.data_type,
        feature_names=names,
    )


def _column_slice(table: Table, parts: int, part: int) -> ShardSlice:
    """Part number `part` of whole kernel vectors; the last one takes the remainder."""
    vectors = table.embedding_dim // KERNEL_ALIGNMENT
    low, high = (KERNEL_ALIGNMENT * (vectors * p // parts) for p in (part, part + 1))
    if part == parts - 1:
        high = table.embedding_dim
    return ShardSlice(table, ShardingType.COLUMN_WISE, 0, low, table.num_embeddings, high - low)


def _row_slice(table: Table, parts: int, part: int) -> ShardSlice:
    low, high = (table.num_embeddings * p // parts for p in (part, part + 1))
    return ShardSlice(table, ShardingType.ROW_WISE, low, 0, high - low, table.embedding_dim)


def _halve(slice_: ShardSlice, rng: np.random.Generator) -> ShardSlice | None:
    """A row slice of the whole table with half the rows of `slice_`; None below one row."""
    table = slice_.table
    parts = 2 * -(-table.num_embeddings // slice_.num_rows)
    if parts > table.num_embeddings:
        return None
    return _row_slice(table, parts, int(rng.integers(parts)))
