"""Plans on disk: exact round trips, alterations noticed, and one clear error for every fault."""

from __future__ import annotations

import contextlib
import copy
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autoshard.distributions import IdDistribution
from autoshard.errors import InputError, PlanError
from autoshard.memory import memory_ledger
from autoshard.objective import CostSource, StepCost
from autoshard.plan import PlanCost, ShardingPlan, load_plan, plan_from_json, plan_from_slices
from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import BagLengths, DataType, PoolingType, Table
from autoshard.topology import Topology

Json = dict[str, Any]


def make_plan() -> ShardingPlan:
    """Three tables, split by columns, by rows and not at all, every field off its default."""
    wide = Table(
        name="wide",
        num_embeddings=100,
        embedding_dim=12,
        pooling_factor=2.5,
        feature_names=("a", "b"),
        data_type=DataType.FP16,
        pooling=PoolingType.MEAN,
        weighted=True,
        ids=IdDistribution(zipf_exponent=1.1, zipf_shift=3.0),
        bag_lengths=BagLengths.POISSON,
    )
    measured = IdDistribution(bucket_rows=(1, 9), bucket_shares=(0.75, 0.25))
    deep = Table(name="größe", num_embeddings=7, embedding_dim=4, pooling_factor=0.0, ids=measured)
    copied = Table(name="copied", num_embeddings=3, embedding_dim=4, pooling_factor=1)
    problem = ShardingProblem(
        tables=(wide, deep, copied),
        topology=Topology(
            world_size=4, hbm_bytes=(10**9, 10**8, 10**9, 10**9), local_world_size=2,
            reserved_bytes=17,
        ),
        training=TrainingConfig(
            batch_size=8,
            optimizer=Optimizer.ADAM,
            learning_rate=0.5,
            eps=1e-7,
            dense_bytes=1000,
            batches_in_flight=3,
        ),
    )  # fmt: skip
    placed = [
        (ShardSlice(wide, ShardingType.COLUMN_WISE, 0, 8, 100, 4), 3),
        (ShardSlice(wide, ShardingType.COLUMN_WISE, 0, 0, 100, 8), 1),
        (ShardSlice(deep, ShardingType.ROW_WISE, 0, 0, 3, 4), 2),
        (ShardSlice(deep, ShardingType.ROW_WISE, 3, 0, 4, 4), 0),
        *((ShardSlice.whole(copied, ShardingType.DATA_PARALLEL), rank) for rank in range(4)),
    ]
    step = StepCost(
        source=CostSource.PREDICTED,
        fwd_compute_ms=(0.1, 0.2, 0.3, 0.4),
        bwd_compute_ms=(1.0, 2.0, 3.0, 1 / 3),
        fwd_comms_ms=0.5,
        bwd_comms_ms=0.25,
        extrapolated=True,
    )
    return plan_from_slices(
        problem,
        placed,
        cost=PlanCost(step=step, lower_bound_ms=1.5),
        provenance={"sharder": "by hand", "seed": 0, "nested": {"list": [1, None, "x"]}},
    )


def written() -> Json:
    """What `plan.json` says."""
    return json.loads(json.dumps(make_plan().to_json()))


def by_hand() -> Json:
    """The same plan without cost, provenance and checksum."""
    value = written()
    for key in ("cost", "provenance", "checksum"):
        del value[key]
    return value


def test_a_plan_survives_writing_and_reading(tmp_path: Path) -> None:
    plan = make_plan()
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.problem == plan.problem
    loaded.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").read_bytes() == (tmp_path / "plan.json").read_bytes()


def test_shards_are_sorted_by_offset_whatever_the_order_of_placing() -> None:
    wide, deep, copied = make_plan().tables
    assert [(s.rank, s.col_offset, s.num_cols) for s in wide.shards] == [(1, 0, 8), (3, 8, 4)]
    assert [(s.rank, s.row_offset, s.num_rows) for s in deep.shards] == [(2, 0, 3), (0, 3, 4)]
    assert [s.rank for s in copied.shards] == [0, 1, 2, 3]


def test_the_ranks_hold_what_the_plan_says() -> None:
    held = make_plan().slices_by_rank()
    assert [[slice_.table.name for slice_ in slices] for slices in held] == [
        ["größe", "copied"],
        ["wide", "copied"],
        ["größe", "copied"],
        ["wide", "copied"],
    ]
    ledgers = memory_ledger(make_plan().problem, held)
    assert ledgers[1].lines_bytes["weights"] == 100 * 8 * 2 + 3 * 4 * 4


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every scalar."""
    items = (
        value.items() if isinstance(value, dict)
        else enumerate(value) if isinstance(value, list)
        else None
    )  # fmt: skip
    if items is None:
        yield path
    else:
        for key, child in items:
            yield from leaves(child, (*path, key))


def put(value: Any, path: tuple[Any, ...], new: Any) -> None:
    for key in path[:-1]:
        value = value[key]
    value[path[-1]] = new


def get(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


LEAVES = list(leaves(written()))
CHECKED = [path for path in LEAVES if path[0] not in ("provenance", "checksum")]


@pytest.mark.parametrize("path", CHECKED, ids=lambda path: ".".join(map(str, path)))
def test_every_altered_value_is_noticed(path: tuple[Any, ...]) -> None:
    value = written()
    old = get(value, path)
    new = old + 1 if isinstance(old, int | float) and not isinstance(old, bool) else "other"
    put(value, path, new)
    with pytest.raises(PlanError, match=r"checksum|version"):
        plan_from_json(value)


def test_the_checksum_does_not_cover_where_a_plan_comes_from() -> None:
    value = written() | {"provenance": {"sharder": "somebody else"}}
    assert plan_from_json(value).tables == make_plan().tables


def test_a_wrong_or_shuffled_checksum_is_refused() -> None:
    for checksum in ("0" * 16, "", 0, [], written()["checksum"].upper() + " "):
        with pytest.raises(PlanError, match="checksum"):
            plan_from_json(written() | {"checksum": checksum})


def test_a_wrong_checksum_says_which_is_which() -> None:
    value = written()
    stated, actual = "0" * 16, value["checksum"]
    with pytest.raises(
        PlanError,
        match=f"got: {stated} in the file; allowed: {actual}, which is what its content gives",
    ):
        plan_from_json(value | {"checksum": stated})


def test_the_order_of_keys_does_not_matter() -> None:
    backwards = dict(reversed(list(written().items())))
    assert plan_from_json(backwards) == make_plan()


def test_a_plan_by_hand_needs_no_cost_no_checksum_and_no_defaults() -> None:
    plan = plan_from_json(
        {
            "version": 1,
            "topology": {"world_size": 1, "hbm_bytes": [10**6]},
            "workload": {"batch_size": 4},
            "tables": [
                {
                    "name": "t",
                    "num_embeddings": 10,
                    "embedding_dim": 4,
                    "pooling_factor": 2,
                    "sharding_type": "table_wise",
                    "shards": [
                        {
                            "rank": 0, "row_offset": 0, "col_offset": 0,
                            "num_rows": 10, "num_cols": 4,
                        }
                    ],
                }
            ],
        }
    )  # fmt: skip
    table = Table(name="t", num_embeddings=10, embedding_dim=4, pooling_factor=2)
    assert plan.problem == ShardingProblem(
        tables=(table,),
        topology=Topology.uniform(1, 10**6),
        training=TrainingConfig(batch_size=4),
    )
    assert plan.slices_by_rank() == [[ShardSlice.whole(table)]]
    assert plan.cost is None
    assert plan_from_json(plan.to_json()) == plan


def changed(path: tuple[Any, ...], new: Any) -> Callable[[], Json]:
    def make() -> Json:
        value = by_hand()
        put(value, path, new)
        return value

    return make


def without(*path: Any) -> Callable[[], Json]:
    def make() -> Json:
        value = by_hand()
        del get(value, path[:-1])[path[-1]]
        return value

    return make


NAN, INF = float("nan"), float("inf")
SHARD_1 = ("tables", 0, "shards", 1)
MALFORMED: list[tuple[Callable[[], Any], str]] = [
    (lambda: None, "must be an object"),
    (lambda: [], "must be an object"),
    (lambda: "plan", "must be an object"),
    (without("version"), "lacks a key.*version"),
    (changed(("version",), 2), "version is not known; got: 2"),
    (changed(("version",), "1"), "version is not known"),
    (changed(("colour",), 1), "unknown key.*colour"),
    (changed(("topology", "colour"), 1), "topology.*colour"),
    (changed(("workload", "colour"), 1), "workload.*colour"),
    (changed(("tables", 1, "colour"), 1), "'größe'.*unknown key.*colour"),
    (changed((*SHARD_1, "colour"), 1), "'wide', shard 1.*colour"),
    (changed(("topology",), None), "topology"),
    (changed(("topology", "hbm_bytes"), 10**9), "hbm_bytes"),
    (changed(("topology", "hbm_bytes", 2), -1), "hbm_bytes of rank 2"),
    (changed(("topology", "hbm_bytes", 2), NAN), "hbm_bytes of rank 2"),
    (changed(("topology", "hbm_bytes", 2), 10**30), "hbm_bytes of rank 2"),
    (changed(("topology", "world_size"), 8), "hbm_bytes.*4 values for 8 ranks"),
    (changed(("topology", "world_size"), 0), "world_size"),
    (changed(("topology", "local_world_size"), 3), "local_world_size does not divide"),
    (without("topology", "hbm_bytes"), "topology lacks.*hbm_bytes"),
    (changed(("workload",), []), "workload must be an object"),
    (without("workload", "batch_size"), "batch_size"),
    (changed(("workload", "batch_size"), 0), "batch_size"),
    (changed(("workload", "batch_size"), 2**31), "batch_size"),
    (changed(("workload", "optimizer"), "adamw"), "optimizer.*adamw"),
    (changed(("workload", "eps"), INF), "eps"),
    (changed(("workload", "learning_rate"), 10**400), "learning_rate"),
    (changed(("workload", "ids"), []), "workload.ids"),
    (changed(("workload", "ids", "wide"), 3), "ids of table 'wide'"),
    (changed(("workload", "ids", "nobody"), {}), "nobody"),
    (changed(("workload", "ids", "wide", "bag_lengths"), "long"), "'wide': bag_lengths"),
    (changed(("workload", "ids", "wide", "zipf_exponent"), NAN), "zipf_exponent"),
    (changed(("workload", "ids", "wide", "colour"), 1), "id distribution.*colour"),
    (changed(("tables",), []), "at least one table"),
    (changed(("tables",), {}), "tables must be a list"),
    (changed(("tables", 2), "copied"), "table 2 must be an object"),
    (without("tables", 2, "name"), "table 2 lacks.*name"),
    (without("tables", 1, "shards"), "'größe' lacks.*shards"),
    (changed(("tables", 1, "name"), ""), "table name"),
    (changed(("tables", 1, "num_embeddings"), 7.0), "'größe': num_embeddings"),
    (changed(("tables", 1, "num_embeddings"), 0), "'größe': num_embeddings"),
    (changed(("tables", 1, "embedding_dim"), True), "'größe': embedding_dim"),
    (changed(("tables", 1, "pooling_factor"), NAN), "'größe': pooling_factor"),
    (changed(("tables", 1, "pooling_factor"), 10**400), "'größe': pooling_factor"),
    (changed(("tables", 1, "pooling"), "max"), "'größe': pooling.*max"),
    (changed(("tables", 1, "data_type"), ["fp32"]), "'größe': data_type"),
    (changed(("tables", 1, "weighted"), 1), "'größe': weighted"),
    (changed(("tables", 1, "compute_kernel"), "dense"), "'größe': compute_kernel"),
    (changed(("tables", 1, "compute_kernel"), {}), "'größe': compute_kernel"),
    (changed(("tables", 1, "sharding_type"), "magic"), "'größe': sharding_type.*magic"),
    (changed(("tables", 1, "feature_names"), "abc"), "'größe': feature_names"),
    (changed(("tables", 1, "feature_names"), ["a", "a"]), "'größe' names a feature twice"),
    (changed(("tables", 1, "feature_names"), [None]), "'größe': a feature name"),
    (changed(("tables", 1, "shards"), "none"), "'größe': shards"),
    (changed(SHARD_1, 7), "'wide', shard 1 must be an object"),
    (without(*SHARD_1, "rank"), "'wide', shard 1 lacks.*rank"),
    (changed((*SHARD_1, "rank"), -1), "'wide', shard 1: rank"),
    (changed((*SHARD_1, "rank"), None), "'wide', shard 1: rank"),
    (changed((*SHARD_1, "num_rows"), 1.5), "'wide', shard 1: num_rows"),
    (changed((*SHARD_1, "col_offset"), "0"), "'wide', shard 1: col_offset"),
    (changed(("provenance",), []), "provenance"),
    (changed(("provenance",), {"x": NAN}), "provenance"),
    (changed(("cost",), 3.0), "cost"),
    (changed(("cost",), {}), "cost.*source"),
    (lambda: by_hand() | {"cost": written()["cost"] | {"lower_bound_ms": NAN}}, "lower_bound_ms"),
    (lambda: by_hand() | {"cost": written()["cost"] | {"best_known_ms": "1"}}, "best_known_ms"),
    (lambda: by_hand() | {"cost": written()["cost"] | {"fwd_comms_ms": INF}}, "cost"),
]  # fmt: skip


@pytest.mark.parametrize(("make", "message"), MALFORMED)
def test_each_fault_is_one_plan_error_that_names_it(make: Callable[[], Any], message: str) -> None:
    with pytest.raises(PlanError, match=message) as caught:
        plan_from_json(make(), where="my.json")
    assert str(caught.value).startswith("my.json: ")
    assert len(str(caught.value)) < 700


@pytest.mark.parametrize("text", ["NaN", "Infinity", "-Infinity", "1e999"])
def test_numbers_that_are_not_finite_are_refused_in_a_file(tmp_path: Path, text: str) -> None:
    body = json.dumps(written()).replace('"eps": 1e-07', f'"eps": {text}')
    assert text in body
    (tmp_path / "plan.json").write_text(body)
    with pytest.raises(InputError, match=r"plan\.json"):
        load_plan(tmp_path / "plan.json")


@pytest.mark.parametrize("depth", [100, 400, 500, 700, 950, 990, 1000, 3000, 100_000])
@pytest.mark.parametrize("key", ["provenance", "tables", "version", "cost"])
def test_deep_nesting_is_read_or_refused(tmp_path: Path, depth: int, key: str) -> None:
    value = written()
    value[key] = "@"
    text = json.dumps(value).replace('"@"', '{"a":' * depth + "1" + "}" * depth)
    (tmp_path / "plan.json").write_text(text)
    try:
        plan = load_plan(tmp_path / "plan.json")
    except InputError:
        return
    assert key == "provenance"
    plan.save(tmp_path / "again.json")


def test_a_missing_or_empty_file_is_an_input_error(tmp_path: Path) -> None:
    (tmp_path / "empty.json").write_text("")
    for name in ("empty.json", "missing.json"):
        with pytest.raises(InputError, match=name):
            load_plan(tmp_path / name)


JUNK = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 3),
    st.sampled_from(
        [10**19, -(2**63), 10**400, 0.5, 1e308, 5e-324, -0.0, NAN, INF, -INF, "", "1", "nan",
         "\ud800", "\x00", "wide", [], {}, [[]], {"": None}, [0] * 3, ["a"], {"rank": 0}]
    ),
    st.text(max_size=3),
    st.recursive(st.integers(0, 1), lambda inner: st.lists(inner, max_size=2), max_leaves=4),
)  # fmt: skip
NODES = sorted({path[:n] for path in LEAVES for n in range(1, len(path) + 1)}, key=str)


@settings(max_examples=1500, deadline=None, derandomize=True)
@given(path=st.sampled_from(NODES), junk=JUNK, second=st.sampled_from(NODES), more=JUNK)
def test_junk_anywhere_is_refused_cleanly_or_makes_a_plan_that_can_be_written(
    path: tuple[Any, ...], junk: Any, second: tuple[Any, ...], more: Any
) -> None:
    value = written()
    del value["checksum"]
    put(value, path, copy.deepcopy(junk))
    # The first piece of junk may take the second's place away.
    with contextlib.suppress(KeyError, IndexError, TypeError):
        put(value, second, copy.deepcopy(more))
    try:
        plan = plan_from_json(value)
    except InputError:
        return
    again = plan_from_json(json.loads(json.dumps(plan.to_json(), allow_nan=False)))
    assert again == plan
