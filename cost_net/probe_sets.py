"""Shard sets that nobody measured: what a cost model must get right without being told.

`GrownSets` are test sets with one thing more: a table of twice the rows, a further shard. A model
that calls such a set cheaper invites a search to grow it. `odd_sets` are random and absurd ones,
for which a model must answer with a finite number that is not negative.

Shapes: S=shards, F=shard features, M=grown sets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from autoshard.distributions import IdDistribution
from autoshard.features import SHARD_FEATURES, shard_features
from autoshard.problem import Optimizer, TrainingConfig
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import DataType, Table
from cost_net.dataset import KernelData

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
POOLING_GROWTH = 1.5
_REDUCED_BY_ROW = SHARD_FEATURES.index("is_reduced_by_row")


@dataclass(frozen=True, kw_only=True)
class SetOnRank:
    """What one rank holds, and for which training: what a measured row says of its set."""

    slices: tuple[ShardSlice, ...]
    training: TrainingConfig
    world_size: int

    def features(self, slices: Sequence[ShardSlice] | None = None) -> FloatArray:
        """Features of its shards, or of others in their place, float64 [S, F]."""
        return shard_features(
            self.slices if slices is None else slices, self.training, self.world_size
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class GrownSets:
    """M sets, each one that was measured with something added."""

    data: KernelData
    """Without times."""
    base_M: IntArray
    """The measured set that each came from, as a row of the measured data."""
    growth_M: NDArray[np.str_]
    """What was added: one of `GROWTHS`."""
    switched_M: NDArray[np.bool_]
    """Whether some replica that exchanged its rows exchanges its bags now, or the other way round
    (`autoshard.shards.replica_exchange`). It then runs another update, which may truly be the
    cheaper one."""


def unmeasured(features: Sequence[FloatArray], optimizer: Optimizer) -> KernelData:
    """Sets as predictors take them; their times are 1 ms and mean nothing.

    Args:
        features: of each set's shards, [S, F].
        optimizer: of the training.
    """
    return KernelData(
        features_SF=np.concatenate(features),
        set_S=np.repeat(np.arange(len(features)), [len(own) for own in features]),
        time_ms_NP=np.ones((len(features), 2)),
        split_N=np.full(len(features), "none"),
        index_N=np.arange(len(features)),
        optimizer=optimizer,
        tables={},
    )


def more_rows(slice_: ShardSlice) -> ShardSlice:
    """Twice the rows, table and slice alike; the popularity curve is stretched with them."""
    table = slice_.table
    ids = table.ids
    if ids.is_measured:
        ids = replace(ids, bucket_rows=tuple(2 * rows for rows in ids.bucket_rows))
    return replace(
        slice_,
        table=replace(table, num_embeddings=2 * table.num_embeddings, ids=ids),
        row_offset=2 * slice_.row_offset,
        num_rows=2 * slice_.num_rows,
    )


def more_columns(slice_: ShardSlice) -> ShardSlice:
    """Twice the columns, table and slice alike."""
    table = slice_.table
    return replace(
        slice_,
        table=replace(table, embedding_dim=2 * table.embedding_dim),
        col_offset=2 * slice_.col_offset,
        num_cols=2 * slice_.num_cols,
    )


def longer_bags(slice_: ShardSlice) -> ShardSlice:
    """Bags of `POOLING_GROWTH` times the ids."""
    table = slice_.table
    return replace(
        slice_, table=replace(table, pooling_factor=POOLING_GROWTH * table.pooling_factor)
    )


#: Changes of one shard, by what they are called.
SHARD_GROWTHS: Mapping[str, Callable[[ShardSlice], ShardSlice]] = {
    "rows × 2": more_rows,
    "columns × 2": more_columns,
    f"pooling × {POOLING_GROWTH:g}": longer_bags,
}
MORE_SAMPLES, ONE_MORE_SHARD = "batch × 2", "one more shard"
GROWTHS = (*SHARD_GROWTHS, MORE_SAMPLES, ONE_MORE_SHARD)


def grow_sets(
    sets: Mapping[int, SetOnRank], optimizer: Optimizer, num_sets: int, *, seed: int
) -> GrownSets:
    """Grow sets in every way, one shard of each, drawn at random.

    Args:
        sets: by their row of the measured data; a set's further shard is one of another set.
        optimizer: of the training.
        num_sets: how many of the sets to grow at most.
        seed: of the choices.
    """
    generator = np.random.default_rng(seed)
    rows = sorted(sets)
    chosen = sorted(generator.permutation(rows)[:num_sets].tolist())
    features: list[FloatArray] = []
    base, growth, switched = [], [], []
    for row in chosen:
        one = sets[row]
        own_SF = one.features()
        place = int(generator.integers(len(one.slices)))
        for name, grow in SHARD_GROWTHS.items():
            grown_SF = own_SF.copy()
            grown_SF[place] = one.features([grow(one.slices[place])])[0]
            features.append(grown_SF)
            growth.append(name)
        training = replace(one.training, batch_size=2 * one.training.batch_size)
        features.append(replace(one, training=training).features())
        growth.append(MORE_SAMPLES)
        other = sets[int(generator.choice(rows))].slices
        further = other[int(generator.integers(len(other)))]
        features.append(np.vstack([own_SF, one.features([further])]))
        growth.append(ONE_MORE_SHARD)
        base += [row] * len(GROWTHS)
        was_S = own_SF[:, _REDUCED_BY_ROW]
        switched += [
            bool((grown_SF[: len(was_S), _REDUCED_BY_ROW] != was_S).any())
            for grown_SF in features[-len(GROWTHS) :]
        ]
    return GrownSets(
        data=unmeasured(features, optimizer),
        base_M=np.array(base),
        growth_M=np.array(growth),
        switched_M=np.array(switched, dtype=bool),
    )


def odd_sets(optimizer: Optimizer, num_random: int, *, seed: int) -> dict[str, KernelData]:
    """Sets far from anything measured.

    Args:
        optimizer: of the training.
        num_random: random sets; of the absurd ones there are as many as there are.
        seed: of the random ones.

    Returns:
        `random` and `absurd`.
    """
    generator = np.random.default_rng(seed)
    random = [_random_set(generator, optimizer).features() for _ in range(num_random)]
    absurd = list(_absurd_sets(optimizer))
    return {"random": unmeasured(random, optimizer), "absurd": unmeasured(absurd, optimizer)}


def _random_set(generator: np.random.Generator, optimizer: Optimizer) -> SetOnRank:
    """1 to 400 shards of tables between tiny and larger than any machine."""
    num_shards = round(np.exp(generator.uniform(0.0, np.log(400.0))))
    slices = []
    for number in range(num_shards):
        table = Table(
            name=f"t{number}",
            num_embeddings=int(10 ** generator.uniform(0.0, 10.0)),
            embedding_dim=int(generator.integers(1, 1025)),
            pooling_factor=float(10 ** generator.uniform(-2.0, 3.0)),
            data_type=DataType.FP16 if generator.random() < 0.3 else DataType.FP32,
            weighted=bool(generator.random() < 0.3),
            ids=IdDistribution(zipf_exponent=float(generator.uniform(0.0, 2.0))),
        )
        kind = ShardingType.DATA_PARALLEL if generator.random() < 0.3 else ShardingType.TABLE_WISE
        slices.append(ShardSlice.whole(table, kind))
    return SetOnRank(
        slices=tuple(slices),
        training=TrainingConfig(
            batch_size=int(10 ** generator.uniform(0.0, 5.0)), optimizer=optimizer
        ),
        world_size=int(generator.choice([1, 2, 8, 64, 512])),
    )


#: Samples per rank, ranks, and how many equal shards a set holds.
_ABSURD_STEPS = ((1, 1, 1), (2**24, 1024, 1), (64, 2, 1000))


def _absurd_sets(optimizer: Optimizer) -> Iterable[FloatArray]:
    """Features at the ends of every range: one row or 2^40, bags of no ids or of a million."""
    ends = itertools.product((1, 2**40), (1, 2**16), (0.0, 1e-6, 2.0**20), (0.0, 8.0))
    kinds = (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL)
    for num_embeddings, embedding_dim, pooling_factor, exponent in ends:
        table = Table(
            name="t",
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            pooling_factor=pooling_factor,
            ids=IdDistribution(zipf_exponent=exponent),
        )
        for (batch_size, world_size, copies), kind in itertools.product(_ABSURD_STEPS, kinds):
            one = SetOnRank(
                slices=(ShardSlice.whole(table, kind),),
                training=TrainingConfig(batch_size=batch_size, optimizer=optimizer),
                world_size=world_size,
            )
            yield np.repeat(one.features(), copies, axis=0)
