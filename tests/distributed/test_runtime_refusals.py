"""What the runtime does not execute is refused by name, before processes and tables exist."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from autoshard.errors import InfeasibleError, PlanError, UnsupportedError
from autoshard.plan import ShardingPlan, TablePlan
from autoshard.problem import Optimizer
from autoshard.runtime.capabilities import Device, check_plan_supported
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.group import WorkerGroup
from autoshard.runtime.launch import check_plan_here, run_plan, run_plans
from autoshard.runtime.results import RunOptions
from autoshard.shards import Shard, ShardingType
from autoshard.tables import DataType, Table
from autoshard.topology import Topology
from tests.distributed import refusal_cases
from tests.distributed.model_cases import SHARDING_TYPES, make_plan
from tests.distributed.runtime_cases import alone

Groups = dict[int, WorkerGroup]

FINE = Table(name="fine", num_embeddings=6, embedding_dim=4, pooling_factor=1)


@pytest.fixture
def nothing_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes and kernels are not to be had."""

    def made(*_: object, **__: object) -> None:
        raise AssertionError("something was allocated")

    monkeypatch.setattr("autoshard.runtime.launch.WorkerGroup", made)
    for module in ("kernel_groups", "row_space"):
        monkeypatch.setattr(f"autoshard.runtime.{module}.EmbeddingKernel", made)


def refuse(plan: ShardingPlan, error: type[Exception], match: str) -> None:
    """By a run, by several runs, and where a user builds the tables."""
    with pytest.raises(error, match=match):
        run_plan(plan)
    with pytest.raises(error, match=match):
        run_plans([make_plan([FINE], ["0"], plan.topology.world_size), plan])
    if plan.topology.world_size == 1:
        with pytest.raises(error, match=match):
            ShardedEmbeddings(plan, alone().collectives)


@pytest.mark.parametrize("kind", SHARDING_TYPES)
@pytest.mark.usefixtures("nothing_allocated")
def test_what_cpu_kernels_do_not_take(kind: ShardingType) -> None:
    adam = make_plan([FINE], [kind], 1, Optimizer.ADAM)
    refuse(adam, UnsupportedError, "optimizer does not run on cpu; got: adam; allowed: sgd")
    brain = replace(FINE, name="brain", data_type=DataType.BF16)
    bf16 = make_plan([FINE, brain], ["0", kind], 1)
    refuse(bf16, UnsupportedError, "these weights on cpu; got: bf16: brain; allowed: fp32, fp16")


@pytest.mark.parametrize("kind", SHARDING_TYPES)
def test_what_cuda_kernels_take(kind: ShardingType) -> None:
    """Adam and bf16 run there, rows of more than 2,048 columns do not."""
    wide = replace(FINE, name="wide", embedding_dim=2048, data_type=DataType.BF16)
    check_plan_supported(make_plan([wide], [kind], 1, Optimizer.ADAM), Device.CUDA)
    too_wide = replace(wide, embedding_dim=2049)
    with pytest.raises(UnsupportedError, match="'wide': no kernel on cuda"):
        check_plan_supported(make_plan([too_wide], [kind], 1, Optimizer.ADAM), Device.CUDA)


def plan_of(kind: ShardingType, shards: Sequence[Shard], world_size: int = 1) -> ShardingPlan:
    """A plan that nobody has checked."""
    checked = make_plan([FINE], ["0"], world_size)
    return replace(checked, tables=(TablePlan(FINE, kind, tuple(shards)),))


BROKEN = {
    "a gap": (ShardingType.ROW_WISE, [Shard(0, 0, 0, 3, 4)], r"no shard holds rows \[3, 6\)"),
    "two shards of the same columns": (
        ShardingType.COLUMN_WISE,
        [Shard(0, 0, 0, 6, 3), Shard(0, 0, 2, 6, 2)],
        r"two shards hold .* columns \[2, 3\)",
    ),
    "two blocks of rows on one rank": (
        ShardingType.ROW_WISE,
        [Shard(0, 0, 0, 3, 4), Shard(0, 3, 0, 3, 4)],
        "two shards on one rank",
    ),
    "a rank that does not exist": (
        ShardingType.TABLE_WISE,
        [Shard(1, 0, 0, 6, 4)],
        "on a rank that does not exist",
    ),
    "rows outside the table": (
        ShardingType.ROW_WISE,
        [Shard(0, 0, 0, 7, 4)],
        "lies outside its table",
    ),
    "half a replica": (
        ShardingType.DATA_PARALLEL,
        [Shard(0, 0, 0, 3, 4)],
        "must be the whole table",
    ),
    "no shards": (ShardingType.COLUMN_WISE, [], "has no shards"),
}


@pytest.mark.parametrize("fault", BROKEN)
@pytest.mark.usefixtures("nothing_allocated")
def test_plans_whose_shards_do_not_tile(fault: str) -> None:
    """Unchecked, ids would reach memory outside the shards: kernels do not check bounds."""
    kind, shards, match = BROKEN[fault]
    refuse(plan_of(kind, shards), PlanError, match)


@pytest.mark.usefixtures("nothing_allocated")
def test_plans_that_do_not_fit() -> None:
    plan = replace(make_plan([FINE], ["0"], 1), topology=Topology.uniform(1, 100))
    with pytest.raises(InfeasibleError, match="does not fit the memory"):
        run_plan(plan)


@pytest.mark.usefixtures("nothing_allocated")
def test_plans_for_more_ranks_than_there_are() -> None:
    with pytest.raises(PlanError, match="got: 1 processes; allowed: 2"):
        ShardedEmbeddings(make_plan([FINE], ["0"], 2), alone().collectives)


@pytest.mark.skipif(refusal_cases.has_cuda(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there_is_named() -> None:
    with pytest.raises(UnsupportedError, match="no CUDA device"):
        check_plan_here(make_plan([FINE], ["0"], 1), RunOptions(device=Device.CUDA))


def test_ranks_that_would_start_with_different_weights(groups: Groups) -> None:
    """Replicas of other seeds would differ for good, without anybody noticing."""
    plan = make_plan([FINE], ["dp"], 2)
    for what in ("seed", "ids_mode"):
        for message in groups[2].run(refusal_cases.differing, plan, what):
            assert message.startswith("CollectiveError"), what
            assert "was given another" in message


def test_a_replica_missing_on_one_rank(groups: Groups) -> None:
    plan = plan_of(ShardingType.DATA_PARALLEL, [Shard(0, 0, 0, 6, 4)], world_size=2)
    for message in groups[2].run(refusal_cases.built, plan):
        assert message.startswith("PlanError")
        assert "lacks a replica; got: none on rank 1" in message
