"""Measurements of a machine that does not exist: known physics with noise, made in a moment.

A kernel costs a fixed overhead plus, for each shard, time per unit of work; lookups into weights
that outgrow the cache cost up to four times as much, which no linear model of the work can say.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from autoshard.features import SHARD_FEATURES, shard_features
from autoshard.problem import Optimizer, TrainingConfig
from autoshard.shards import ShardSlice
from autoshard.tables import Table
from cost_net.dataset import CollectiveData, KernelData, MeasuredData

#: Per unit of each of `FWD_WORK_FEATURES`, and of the same work in the backward.
FWD_WORK_MS = np.array([5e-6, 8e-7, 3e-5, 4.5e-7, 2e-6, 5e-8])
BWD_WORK_MS = np.array([1e-5, 8e-7, 1e-4, 2e-6, 3e-5, 2e-6])
OVERHEAD_MS = np.array([0.03, 0.06])
SHARES = {"train": (0, 60), "validation": (60, 80), "test": (80, 120)}
FACTS = {
    "num_kernel_rows": 0,
    "num_collective_rows": 0,
    "measured_from": "2026-01-01",
    "measured_to": "2026-01-02",
    "device": "none",
    "cache": "warm",
    "threads": 1,
    "concurrent_workers": 1,
    "num_passes": 1,
    "num_repeated_sets": 0,
    "num_oversubscribed_rows": 0,
    "hardware_fingerprint": "made up",
    "software_fingerprint": "made up",
}


def pool(num: int = 120, seed: int = 0) -> list[Table]:
    """Tables from 100 to 10 million rows."""
    generator = np.random.default_rng(seed)
    return [
        Table(
            name=f"t{index}",
            num_embeddings=int(10 ** generator.uniform(2, 7)),
            embedding_dim=int(generator.choice([8, 16, 32, 64, 128])),
            pooling_factor=float(np.round(10 ** generator.uniform(0, 1.7), 1)),
        )
        for index in range(num)
    ]


def true_ms(features_SF: NDArray[np.float64], set_S: NDArray[np.int64]) -> NDArray[np.float64]:
    """What the machine takes for each set, [N, 2]."""
    log_bytes = features_SF[:, SHARD_FEATURES.index("log_weights_bytes")]
    misses = 1 + 3 / (1 + np.exp(-1.5 * (log_bytes - 16)))  # caches end near e^16 bytes
    work_SK = features_SF[:, : len(FWD_WORK_MS)]
    own = work_SK @ np.stack([FWD_WORK_MS, BWD_WORK_MS], axis=1) * misses[:, None]
    result = np.tile(OVERHEAD_MS, (int(set_S.max()) + 1, 1))
    np.add.at(result, set_S, own)
    return result


def kernels(num_sets: int = 600, *, noise: float = 0.03, seed: int = 0) -> KernelData:
    """Sets of 1 to 12 tables of one split; every tenth set is measured twice."""
    generator = np.random.default_rng(seed)
    tables = pool()
    draws: list[tuple[int, str, list[Table]]] = []
    for index in range(num_sets):
        split = str(generator.choice(list(SHARES), p=[0.6, 0.15, 0.25]))
        low, high = SHARES[split]
        size = int(generator.integers(1, 13))
        chosen = [tables[i] for i in generator.choice(np.arange(low, high), size, replace=False)]
        draws += [(index, split, chosen)] * (2 if index % 10 == 0 else 1)
    described = {
        table.name: shard_features(
            [ShardSlice.whole(table)], TrainingConfig(batch_size=512), world_size=1
        )[0]
        for table in tables
    }
    features = np.array([described[table.name] for _, _, chosen in draws for table in chosen])
    sizes = [len(chosen) for _, _, chosen in draws]
    set_S = np.repeat(np.arange(len(draws)), sizes)
    exact = true_ms(features, set_S)
    return KernelData(
        features_SF=features,
        set_S=set_S,
        time_ms_NP=exact * generator.lognormal(0.0, noise, exact.shape),
        split_N=np.array([split for _, split, _ in draws]),
        index_N=np.array([index for index, _, _ in draws]),
        optimizer=Optimizer.ROWWISE_ADAGRAD,
        tables={
            split: frozenset(table.name for table in tables[low:high])
            for split, (low, high) in SHARES.items()
        },
    )


def collectives(num: int = 120, *, noise: float = 0.03, seed: int = 0) -> CollectiveData:
    """0.05 ms per rank and 1 ms per MB of the busiest rank, at 2, 4 and 8 ranks."""
    generator = np.random.default_rng(seed)
    world_size = generator.choice([2.0, 4.0, 8.0], num)
    busiest = 10 ** generator.uniform(3, 7.2, num)
    other = busiest * generator.uniform(0.3, 1.0, num)
    total = world_size * (busiest + other) / 2
    sent_first = generator.random(num) < 0.5
    traffic = np.stack(
        [
            world_size,
            np.where(sent_first, busiest, other),
            np.where(sent_first, other, busiest),
            total,
        ],
        axis=1,
    )
    time_ms = 0.05 * world_size + busiest / 1e6
    return CollectiveData(
        traffic_MC=traffic,
        time_ms_M=time_ms * generator.lognormal(0.0, noise, num),
        oversubscribed_M=world_size > 2,
        test_M=np.arange(num) % 5 == 0,
    )


def measured(num_sets: int = 600) -> MeasuredData:
    """All of it."""
    return MeasuredData(kernels=kernels(num_sets), collectives=collectives(), facts=FACTS)
