"""Plans are checked exactly: valid ones pass, and one wrong number in them is refused by name."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.distributions import IdDistribution
from autoshard.errors import InfeasibleError, PlanError
from autoshard.objective import CostSource, StepCost
from autoshard.plan import PlanCost, ShardingPlan, TablePlan
from autoshard.problem import Optimizer, TrainingConfig
from autoshard.shards import Shard, ShardingType
from autoshard.tables import DataType, Table
from autoshard.topology import Topology
from autoshard.validate import check_shards, listed, validate_plan

DP, TW = ShardingType.DATA_PARALLEL, ShardingType.TABLE_WISE
RW, TWRW = ShardingType.ROW_WISE, ShardingType.TABLE_ROW_WISE
CW, TWCW = ShardingType.COLUMN_WISE, ShardingType.TABLE_COLUMN_WISE
ROOM = 2**50
MANY_ROWS = 2**62


def table(name: str = "t", rows: int = 100, dim: int = 16, **options: object) -> Table:
    return Table(name=name, num_embeddings=rows, embedding_dim=dim, pooling_factor=2.0, **options)


def plan_of(
    *entries: TablePlan,
    world_size: int = 4,
    local_world_size: int = 0,
    hbm_bytes: int | tuple[int, ...] = ROOM,
    optimizer: Optimizer = Optimizer.SGD,
    batch_size: int = 8,
    **options: object,
) -> ShardingPlan:
    per_rank = (hbm_bytes,) * world_size if isinstance(hbm_bytes, int) else hbm_bytes
    return ShardingPlan(
        topology=Topology(
            world_size=world_size, hbm_bytes=per_rank, local_world_size=local_world_size
        ),
        training=TrainingConfig(batch_size=batch_size, optimizer=optimizer),
        tables=entries,
        **options,
    )


def refusal(entry: TablePlan, **options: object) -> str:
    with pytest.raises(PlanError) as caught:
        validate_plan(plan_of(entry, **options))
    message = str(caught.value)
    assert repr(entry.table.name) in message
    return message


def rows(*cuts: tuple[int, int, int], kind: ShardingType = RW, of: int = 100) -> TablePlan:
    """Row shards as (rank, first row, number of rows)."""
    return TablePlan(table(rows=of), kind, tuple(Shard(r, o, 0, n, 16) for r, o, n in cuts))


def cols(*cuts: tuple[int, int, int], kind: ShardingType = CW) -> TablePlan:
    """Column shards as (rank, first column, number of columns)."""
    return TablePlan(table(), kind, tuple(Shard(r, 0, o, 100, n) for r, o, n in cuts))


@pytest.mark.parametrize(
    "entry",
    [
        TablePlan(table(), TW, (Shard(3, 0, 0, 100, 16),)),
        TablePlan(table(), DP, tuple(Shard(r, 0, 0, 100, 16) for r in (2, 0, 3, 1))),
        rows((0, 0, 100)),
        rows((3, 60, 40), (1, 0, 60)),
        rows((0, 0, 34), (1, 34, 33), (2, 67, 33), (3, 100, 0)),
        rows((0, 0, 0), (1, 0, 100)),
        rows((2, 0, 50), (3, 50, 50), kind=TWRW),
        cols((0, 0, 8), (1, 8, 8)),
        cols((0, 8, 8), (1, 0, 4), (0, 4, 4)),
        cols((2, 0, 3), (3, 3, 13), kind=TWCW),
    ],
)
def test_sound_shards_pass(entry):
    ledgers = validate_plan(plan_of(entry, local_world_size=2))
    assert [ledger.rank for ledger in ledgers] == [0, 1, 2, 3]
    replicas = 4 if entry.sharding_type is DP else 1
    # Rows of 16 columns need no padding, except the column shards of 3 and 13.
    padding = 4 if {shard.num_cols for shard in entry.shards} == {3, 13} else 0
    weights = sum(ledger.lines_bytes["weights"] for ledger in ledgers)
    assert weights == 100 * (16 + padding) * 4 * replicas


@pytest.mark.parametrize(
    ("entry", "words"),
    [
        (TablePlan(table(), TW, ()), "has no shards"),
        (TablePlan(table(), TW, (Shard(4, 0, 0, 100, 16),)), "rank that does not exist"),
        (TablePlan(table(), TW, (Shard(0, 0, 0, 99, 16),)), "must be the whole table"),
        (TablePlan(table(), TW, (Shard(0, 1, 0, 100, 16),)), "rows [1, 101)"),
        (TablePlan(table(), TW, (Shard(0, 0, 4, 100, 16),)), "columns [4, 20)"),
        (TablePlan(table(), TW, (Shard(0, 0, 0, 100, 16),) * 2), "must be one shard"),
        (TablePlan(table(), DP, (Shard(0, 0, 0, 100, 16),)), "none on rank 1, 2, 3"),
        (TablePlan(table(), DP, (Shard(0, 0, 0, 100, 16),) * 4), "two replicas on one rank"),
        (rows((0, 0, 50), (1, 51, 49)), "no shard holds rows [50, 51) × columns [0, 16)"),
        (rows((0, 1, 99)), "no shard holds rows [0, 1)"),
        (rows((0, 0, 99)), "no shard holds rows [99, 100)"),
        (rows((0, 0, 0)), "no shard holds rows [0, 100)"),
        (rows((0, 0, 60), (1, 40, 60)), "two shards hold rows [40, 60) × columns [0, 16)"),
        (rows((0, 0, 100), (1, 10, 20)), "two shards hold rows [10, 30)"),
        (rows((0, 0, 50), (0, 50, 50)), "two shards on one rank"),
        (rows((1, 0, 50), (2, 50, 50), kind=TWRW), "more than one node"),
        (TablePlan(table(), RW, (Shard(0, 0, 0, 100, 8),)), "must have all columns"),
        (cols((0, 0, 8), (1, 9, 7)), "no shard holds rows [0, 100) × columns [8, 9)"),
        (cols((0, 0, 9), (1, 8, 8)), "two shards hold rows [0, 100) × columns [8, 9)"),
        (cols((0, 0, 16), (1, 16, 0)), "has no columns"),
        (cols((1, 0, 8), (2, 8, 8), kind=TWCW), "more than one node"),
        (TablePlan(table(), CW, (Shard(0, 0, 0, 50, 16),)), "must have all rows"),
    ],
)
def test_faults_are_refused_by_name(entry, words):
    assert words in refusal(entry, local_world_size=2)


def test_exact_for_huge_tables():
    half = MANY_ROWS // 2
    topology = Topology.uniform(4, ROOM)
    check_shards(rows((0, 0, half), (1, half, half), of=MANY_ROWS), topology)
    with pytest.raises(PlanError, match=rf"no shard holds rows \[{half}, {half + 1}\)"):
        check_shards(rows((0, 0, half), (1, half + 1, half - 1), of=MANY_ROWS), topology)


@st.composite
def sound_entries(draw) -> TablePlan:
    """A table split at random in a valid way, over 8 ranks in nodes of 4."""
    kind = draw(st.sampled_from(list(ShardingType)))
    num_rows, dim = draw(st.integers(1, 1000)), draw(st.integers(1, 64))
    subject = table("drawn", num_rows, dim)
    ranks = range(4, 8) if kind in (TWRW, TWCW) else range(8)
    if kind is TW:
        return TablePlan(subject, kind, (Shard(draw(st.sampled_from(ranks)), 0, 0, num_rows, dim),))
    if kind is DP:
        order = draw(st.permutations(ranks))
        return TablePlan(subject, kind, tuple(Shard(r, 0, 0, num_rows, dim) for r in order))
    total = num_rows if kind.splits_rows else dim
    most = min(len(ranks), total)
    inner = draw(st.sets(st.integers(1, total - 1), max_size=most - 1)) if total > 1 else set()
    cuts = [0, *sorted(inner), total]
    order = draw(st.permutations(ranks))
    parts = list(zip(order, cuts, cuts[1:], strict=False))
    if kind.splits_rows:
        shards = [Shard(rank, low, 0, high - low, dim) for rank, low, high in parts]
    else:
        shards = [Shard(rank, 0, low, num_rows, high - low) for rank, low, high in parts]
    return TablePlan(subject, kind, tuple(draw(st.permutations(shards))))


TOPOLOGY = Topology.uniform(8, ROOM, local_world_size=4)


@settings(max_examples=150, deadline=None)
@given(sound_entries())
def test_random_tilings_pass(entry):
    check_shards(entry, TOPOLOGY)


@settings(max_examples=400, deadline=None)
@given(sound_entries(), st.data())
def test_one_mutation_is_refused(entry, data):
    shards = list(entry.shards)
    index = data.draw(st.integers(0, len(shards) - 1))
    mutation = data.draw(st.sampled_from(["drop", "duplicate", "rank", "grow", "shift"]))
    if mutation == "drop":
        del shards[index]
    elif mutation == "duplicate":
        shards.append(shards[index])
    elif mutation == "rank":
        shards[index] = replace(shards[index], rank=data.draw(st.sampled_from([-1, 8, 2**40])))
    else:
        fields = {"grow": ["num_rows", "num_cols"], "shift": ["row_offset", "col_offset"]}
        name = data.draw(st.sampled_from(fields[mutation]))
        step = data.draw(st.sampled_from([-1, 1]))
        shards[index] = replace(shards[index], **{name: getattr(shards[index], name) + step})
    with pytest.raises(PlanError):
        check_shards(replace(entry, shards=tuple(shards)), TOPOLOGY)


@settings(max_examples=150, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 12)), min_size=1, max_size=5))
def test_tiling_agrees_with_counting_every_row(parts):
    """Against an independent check: each of 12 rows is counted in the shards."""
    entry = rows(*((rank, low, size) for rank, (low, size) in enumerate(parts)), of=12)
    inside = all(low + size <= 12 for low, size in parts)
    counts = [sum(low <= row < low + size for low, size in parts) for row in range(12)]
    if inside and counts == [1] * 12:
        check_shards(entry, TOPOLOGY)
    else:
        with pytest.raises(PlanError):
            check_shards(entry, TOPOLOGY)


def whole(name: str, rank: int = 0, **options: object) -> TablePlan:
    subject = table(name, **options)
    shard = Shard(rank, 0, 0, subject.num_embeddings, subject.embedding_dim)
    return TablePlan(subject, TW, (shard,))


def test_duplicate_table_names():
    with pytest.raises(PlanError, match="two tables called 'a'"):
        validate_plan(plan_of(whole("a"), whole("b"), whole("a", rank=1)))


def test_cost_of_another_world_size():
    step = StepCost(
        source=CostSource.PREDICTED,
        fwd_compute_ms=(1.0,),
        bwd_compute_ms=(1.0,),
        fwd_comms_ms=0.0,
        bwd_comms_ms=0.0,
    )
    with pytest.raises(PlanError, match=r"got: 1; allowed: 4"):
        validate_plan(plan_of(whole("a"), cost=PlanCost(step=step)))


# One rank, SGD, batch 8, table of 100 × 16 fp32 with 2 ids per bag: weights 6400; inputs
# 16 ids × 8 + 9 offsets × 8 = 200; outputs 8 × 16 × 4 = 512; gradients 512 + 16 × 16 = 768;
# batch in flight 16 × 8 + 8 × 8 = 192; pooled outputs and their gradients 2 × 512 = 1024.
NEEDED_BYTES = 6400 + 200 + 512 + 768 + 192 + 1024


def test_memory_fits_to_the_byte():
    entry = whole("a")
    (ledger,) = validate_plan(plan_of(entry, world_size=1, hbm_bytes=NEEDED_BYTES))
    assert ledger.total_bytes == NEEDED_BYTES
    assert ledger.free_bytes == 0
    with pytest.raises(InfeasibleError) as caught:
        validate_plan(plan_of(entry, world_size=1, hbm_bytes=NEEDED_BYTES - 1))
    message = str(caught.value)
    assert f"({NEEDED_BYTES} bytes)" in message
    assert f"({NEEDED_BYTES - 1} bytes)" in message
    assert "largest on rank 0: a " in message


def test_overfull_ranks_are_named_with_their_largest_tables():
    entries = (whole("small", 1), whole("big", 1, rows=10**6), whole("other", 2, rows=10**6))
    with pytest.raises(InfeasibleError) as caught:
        validate_plan(plan_of(*entries, hbm_bytes=(10**9, 10**6, 10**6, 10**9)))
    message = str(caught.value)
    assert "memory of 2 rank(s)" in message
    assert "rank 1 needs" in message
    assert "rank 2 needs" in message
    assert "rank 0 needs" not in message
    assert "largest on rank 1: big " in message
    assert "plan again (the ranks together have room)" in message


def test_remedies_follow_what_takes_the_memory():
    def remedy(entry: TablePlan, **options: object) -> str:
        with pytest.raises(InfeasibleError) as caught:
            validate_plan(plan_of(entry, hbm_bytes=1000, **options))
        return str(caught.value.remedy)

    assert "smaller batch" in remedy(whole("a", rows=1), batch_size=4096)
    assert "smaller batch" not in remedy(whole("a", rows=10**6))
    assert "less state" in remedy(whole("a", rows=10**6), optimizer=Optimizer.ADAM)
    assert "less state" not in remedy(whole("a", rows=10**6))


def test_plan_for_these_tables_in_any_order():
    a, b = whole("a"), whole("b", rank=1)
    validate_plan(plan_of(a, b), tables=[b.table, a.table])


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"num_embeddings": 101}, "num_embeddings 100 -> 101"),
        ({"embedding_dim": 32}, "embedding_dim 16 -> 32"),
        ({"pooling_factor": 3.0}, "pooling_factor 2.0 -> 3.0"),
        ({"data_type": DataType.FP16}, "data_type fp32 -> fp16"),
        ({"feature_names": ("x", "y")}, "feature_names a -> x|y"),
        ({"weighted": True}, "weighted False -> True"),
    ],
)
def test_stale_plan_says_what_changed(change, words):
    a = whole("a")
    with pytest.raises(PlanError) as caught:
        validate_plan(plan_of(a), tables=[replace(a.table, **change)])
    message = str(caught.value)
    assert "stale" in message
    assert f"a ({words})" in message


def test_stale_plan_names_missing_and_extra_tables():
    with pytest.raises(PlanError) as caught:
        validate_plan(plan_of(whole("a"), whole("gone")), tables=[table("a"), table("new")])
    assert "it lacks new" in str(caught.value)
    assert "it has gone, which" in str(caught.value)


def test_id_distributions_count_unless_a_hand_written_plan_leaves_them_out():
    plain = whole("a")
    skewed = replace(plain.table, ids=IdDistribution(zipf_exponent=1.2))
    validate_plan(plan_of(plain), tables=[skewed])
    made = plan_of(plain, provenance={"sharder": "random"})
    with pytest.raises(PlanError, match="a \\(ids differ\\)"):
        validate_plan(made, tables=[skewed])


def test_long_lists_are_cut():
    assert listed(range(8)) == "0, 1, 2, 3, 4, 5, 6, 7"
    assert listed(range(10)) == "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"
