import numpy as np
import pytest
import torch
from torch.nn.functional import embedding_bag

from autoshard.errors import InputError, UnsupportedError
from autoshard.measure.arena import Arena
from autoshard.measure.config import CacheState, KernelConfig, TimingConfig
from autoshard.measure.kernel_set import EPS, LEARNING_RATE, KernelSet
from autoshard.measure.kernels import KernelMeter, _Iteration, measure_kernel
from autoshard.measure.measured_kernels import (
    GRADIENT_BOUND,
    BagReplicaKernel,
    RowReplicaKernel,
    SlicedKernel,
)
from autoshard.problem import Optimizer
from autoshard.runtime.capabilities import Device
from autoshard.shards import ShardingType, ShardSlice, padded_cols
from autoshard.tables import DataType, PoolingType, Table

pytest.importorskip("fbgemm_gpu", reason="kernels need fbgemm-gpu-cpu or fbgemm-gpu")

SAMPLES = 32


def table(name, **changes):
    values = {"num_embeddings": 500, "embedding_dim": 8, "pooling_factor": 3.5, **changes}
    return Table(name=name, **values)


TABLES = (
    table("sum"),
    table("two_features", feature_names=("a", "b")),
    table("padded", embedding_dim=10),
    table("mean", pooling=PoolingType.MEAN),
    table("half", data_type=DataType.FP16),
    table("weighted", weighted=True),
    table("weighted_mean", weighted=True, pooling=PoolingType.MEAN),
    table("empty_bags", pooling_factor=0.0),
)
SLICES = (
    *map(ShardSlice.whole, TABLES),
    ShardSlice(TABLES[0], ShardingType.ROW_WISE, 250, 0, 250, 8),
    ShardSlice(TABLES[0], ShardingType.COLUMN_WISE, 0, 4, 500, 4),
)


def build(slices, optimizer=Optimizer.ROWWISE_ADAGRAD, arena=None, world_size=1):
    return KernelSet(
        slices,
        SAMPLES // world_size,
        world_size=world_size,
        num_batches=2,
        optimizer=optimizer,
        device=Device.CPU,
        arena=arena or Arena(2**20),
        seed=0,
    )


def test_what_is_timed_is_the_pooled_lookup():
    kernels = build(SLICES)
    seen = []
    for kernel, (_, output) in zip(kernels.kernels, kernels.forward(1), strict=True):
        given = kernel.inputs[1]
        bounds = np.concatenate([[0], np.cumsum(given.lengths_FB.sum(dim=1).numpy())])
        feature, col = 0, 0
        for index, slice_ in enumerate(kernel.slices):
            seen.append(slice_)
            weights = kernel.kernel.weights(index).float()
            for _ in slice_.table.feature_names:
                ids = given.values_L[bounds[feature] : bounds[feature + 1]]
                lengths = given.lengths_FB[feature]
                offsets = torch.cumsum(lengths, 0) - lengths
                per_id = None
                if given.weights_L is not None:
                    per_id = given.weights_L[bounds[feature] : bounds[feature + 1]]
                # Means, too, are sums here: the runtime divides them where they arrive.
                expected = embedding_bag(
                    ids, weights, offsets, mode="sum", per_sample_weights=per_id
                )
                width = padded_cols(slice_.num_cols)
                torch.testing.assert_close(output[:, col : col + slice_.num_cols], expected)
                assert ids.numel() == 0 or int(ids.max()) < slice_.num_rows
                feature, col = feature + 1, col + width
        assert col == output.shape[1]
    assert sorted(map(repr, seen)) == sorted(map(repr, SLICES))


def test_kernels_are_shared_as_in_the_runtime():
    groups = [{s.table.name for s in kernel.slices} for kernel in build(SLICES).kernels]
    assert {"sum", "mean", "two_features", "empty_bags"} in groups
    assert {"weighted", "weighted_mean"} in groups
    assert sorted(len(group) for group in groups) == [1, 1, 2, 4]
    # Without row-wise state, padding changes no update and needs no kernel of its own.
    assert len(build(SLICES, Optimizer.SGD).kernels) == 3


@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ADAGRAD, Optimizer.ROWWISE_ADAGRAD])
def test_backward_updates_the_rows_that_were_looked_up(optimizer):
    kernels = build([ShardSlice.whole(TABLES[0])], optimizer)
    (kernel,) = kernels.kernels
    before = kernel.kernel.weights(0).clone()
    kernels.backward(kernels.forward(0))
    change = (kernel.kernel.weights(0) - before).abs()
    touched = torch.unique(kernel.inputs[0].values_L)
    mask = torch.zeros(500, dtype=torch.bool)
    mask[touched] = True
    assert (change[mask].sum(dim=1) > 0).all()
    assert (change[~mask] == 0).all()
    # No update is larger than the learning rate times all gradients of a batch.
    assert change.max() <= LEARNING_RATE * GRADIENT_BOUND * SAMPLES * 5 / (1 + EPS)


def replicas(*tables):
    return [ShardSlice.whole(table, ShardingType.DATA_PARALLEL) for table in tables]


#: Ids and gradients of bags weigh less than rows, and the other way round.
LONG_BAGS = table("long", pooling_factor=8.0, embedding_dim=16)
SHORT_BAGS = (
    table("short", pooling_factor=1.0),
    table("short_weighted", pooling_factor=1.0, weighted=True),
    table("short_twice", pooling_factor=1.0, feature_names=("a", "b")),
    table("short_wide", pooling_factor=1.0, embedding_dim=16),
)


def test_every_way_of_holding_tables_has_its_kernel():
    kernels = build([*SLICES, *replicas(LONG_BAGS, *SHORT_BAGS)], world_size=4).kernels
    found = [(type(kernel), [s.table.name for s in kernel.slices]) for kernel in kernels]
    assert found[-4:] == [
        (BagReplicaKernel, ["long"]),
        (RowReplicaKernel, ["short", "short_twice"]),
        (RowReplicaKernel, ["short_weighted"]),
        (RowReplicaKernel, ["short_wide"]),
    ]
    assert {kind for kind, _ in found[:-4]} == {SlicedKernel}
    # In a world of one there is nothing to exchange, and no reason to sum rows.
    alone = build(replicas(LONG_BAGS, *SHORT_BAGS)).kernels
    assert {type(kernel) for kernel in alone} == {BagReplicaKernel}


def test_a_replica_by_bag_looks_up_the_first_samples_and_updates_all():
    (kernel,) = build(replicas(LONG_BAGS), world_size=4).kernels
    before = kernel.kernel.weights(0).clone()
    every, output = kernel.forward(1)
    assert output.shape == (SAMPLES // 4, 16)
    assert every.lengths_FB.shape == (1, SAMPLES)
    lengths = every.lengths_FB[0, : SAMPLES // 4]
    ids = every.values_L[: int(lengths.sum())]
    expected = embedding_bag(ids, before, torch.cumsum(lengths, 0) - lengths, mode="sum")
    torch.testing.assert_close(output, expected)
    kernel.backward(every)
    changed = (kernel.kernel.weights(0) != before).any(dim=1)
    assert torch.equal(changed.nonzero()[:, 0], torch.unique(every.values_L))


def test_a_replica_by_row_sums_its_own_and_updates_what_all_ranks_touched():
    (kernel,) = build(replicas(SHORT_BAGS[1]), world_size=4).kernels
    before = kernel.kernel.weights(0).clone()
    drawn, output = kernel.forward(0)
    bags = drawn.lookup.bags
    lengths = bags.lengths_FB[0]
    assert lengths.shape == (SAMPLES // 4,)
    expected = embedding_bag(
        bags.values_L, before, torch.cumsum(lengths, 0) - lengths, mode="sum",
        per_sample_weights=bags.weights_L,
    )  # fmt: skip
    torch.testing.assert_close(output, expected)
    kernel.backward(drawn)
    # What this rank would send: its rows, each with the weighted sum of its bags' gradients.
    sums = torch.zeros(500, 8)
    bag_L = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
    sums.index_add_(0, bags.values_L, drawn.gradient_FBD[0, bag_L] * bags.weights_L[:, None])
    rows = torch.unique(bags.values_L)
    assert torch.equal(drawn.lookup.rows_U, rows)
    torch.testing.assert_close(drawn.lookup.row_gradients(drawn.gradient_FBD), sums[rows])
    changed = (kernel.kernel.weights(0) != before).any(dim=1).nonzero()[:, 0]
    assert torch.equal(changed, torch.unique(drawn.update.values_L))
    assert set(rows.tolist()) < set(changed.tolist())


def test_arena_lends_sane_memory_again_and_again():
    arena = Arena(2**20)
    first = arena.weights(1000, torch.float32)
    other = arena.weights(1000, torch.float32)
    half = arena.weights(1000, torch.float16)
    state = arena.state(1000)
    assert first.data_ptr() % 64 == other.data_ptr() % 64
    for tensor in (first, other, half, state):
        assert torch.isfinite(tensor).all()
        assert tensor.abs().max() <= 1.0
    assert 0 < first.std() < 0.05
    first.fill_(7.0)
    assert (other != 7.0).all()
    arena.reset()
    assert arena.weights(1000, torch.float32).data_ptr() == first.data_ptr()
    with pytest.raises(InputError, match="arena"):
        arena.weights(2**19, torch.float32)


def test_kernels_use_the_arena():
    arena = Arena(2**20)
    (kernel,) = build([ShardSlice.whole(TABLES[0])], arena=arena).kernels
    arena.reset()
    assert arena.weights(4, torch.float32).data_ptr() == kernel.kernel.weights(0).data_ptr()


@pytest.mark.parametrize("cache", list(CacheState))
def test_timing_says_how_it_was_taken(cache):
    timing = TimingConfig(warmup_iterations=2, min_iterations=4, max_iterations=6)
    config = KernelConfig(cache=cache, timing=timing, arena_bytes=2**20)
    result = measure_kernel(SLICES, SAMPLES, config, seed=1)
    assert result.warmup_iterations == 2
    assert 4 <= result.iterations <= 6
    assert result.num_kernels == 4
    for phase in (result.fwd, result.bwd):
        assert 0 < phase.min_ms <= phase.p20_ms <= phase.median_ms <= phase.p80_ms
        assert phase.relative_error >= 0
    assert result.fwd_wall_ms == result.fwd.median_ms


def test_turns_between_references_end_at_the_most_iterations(monkeypatch):
    """2 ms an iteration and references every 8 ms: turns of 4, and then of 2."""
    monkeypatch.setattr(KernelMeter, "_run", lambda *_: _Iteration(1.0, 1.0, 1.0, 1.0))
    timing = TimingConfig(warmup_iterations=1, min_iterations=6, max_iterations=6)
    config = KernelConfig(timing=timing, arena_bytes=2**20, reference_interval_ms=8.0)
    assert measure_kernel(SLICES, SAMPLES, config).iterations == 6


def test_unusable_requests_are_refused():
    with pytest.raises(InputError, match="empty"):
        build([])
    with pytest.raises(UnsupportedError, match="adam"):
        build([ShardSlice.whole(TABLES[0])], Optimizer.ADAM)
    with pytest.raises(UnsupportedError, match="bf16"):
        build([ShardSlice.whole(table("bf16", data_type=DataType.BF16))])
    with pytest.raises(InputError, match="batch_size"):
        measure_kernel([ShardSlice.whole(TABLES[0])], 0)
    with pytest.raises(InputError, match="world_size"):
        measure_kernel([ShardSlice.whole(TABLES[0])], 8, world_size=0)
