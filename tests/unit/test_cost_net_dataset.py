"""Measured rows as arrays: sets stay whole, splits share no table, repeats are recognised."""

from __future__ import annotations

import dataclasses

import numpy as np
import pandas as pd
import pytest

from autoshard.errors import InputError
from autoshard.features import WORK_FEATURES
from autoshard.measure.config import Collective
from autoshard.measure.loading import row_features
from cost_net.dataset import HELD_OUT_EVERY, NO_LIMIT, collective_data, kernel_data, shard_rows
from tests.cost_cases import collective_rows, kernel_rows, kernels, pool

ROWS = kernel_rows({"train": 21, "validation": 5, "test": 5}, seed=3)
DATA = kernel_data(pd.DataFrame(ROWS))


def test_rows_become_sets_of_features():
    assert DATA.num_sets == len(ROWS)
    assert DATA.num_shards_N.tolist() == [row["num_slices"] for row in ROWS]
    for number in (0, 5, len(ROWS) - 1):
        np.testing.assert_array_equal(
            DATA.features_SF[DATA.set_S == number], row_features(ROWS[number])
        )
    np.testing.assert_array_equal(DATA.time_ms_NP[:, 1], [row["bwd_ms"] for row in ROWS])


def test_chosen_sets_keep_their_shards_whatever_the_order():
    chosen = np.array([7, 0, 7, 3])
    some = DATA.of(chosen)
    assert some.num_shards_N.tolist() == DATA.num_shards_N[chosen].tolist()
    for place, number in enumerate(chosen):
        np.testing.assert_array_equal(
            some.features_SF[some.set_S == place], DATA.features_SF[DATA.set_S == number]
        )
    assert DATA.of(np.zeros(DATA.num_sets, dtype=bool)).num_sets == 0


def test_shard_rows_by_hand():
    rows, counts = shard_rows(np.array([2, 0, 3, 1]), np.array([2, 1, 0]))
    assert rows.tolist() == [2, 3, 4, 0, 1]
    assert counts.tolist() == [3, 0, 2]


def test_sums_are_those_of_each_set():
    work = slice(0, len(WORK_FEATURES))
    summed = DATA.summed(work)
    for number in range(DATA.num_sets):
        expected = row_features(ROWS[number])[:, work].sum(axis=0)
        np.testing.assert_allclose(summed[number], expected)


def test_no_table_of_one_split_occurs_in_another():
    data = kernels()
    data.check_disjoint()
    assert data.tables["test"] <= {table.name for table in pool("test")}
    assert not data.tables["test"] & (data.tables["train"] | data.tables["validation"])
    leaking = dataclasses.replace(
        data, tables={**data.tables, "test": data.tables["test"] | {min(data.tables["train"])}}
    )
    with pytest.raises(InputError, match="both the train and the test split"):
        leaking.check_disjoint()


def test_a_leak_is_found_in_the_rows_themselves():
    rows = [dict(row) for row in ROWS]
    rows[0]["split"] = "test"  # its tables still occur in training rows
    with pytest.raises(InputError, match="tables occur in both"):
        kernel_data(pd.DataFrame(rows)).check_disjoint()


def test_a_set_measured_twice_has_one_number_and_others_do_not():
    numbers, counts = np.unique(DATA.index_N, return_counts=True)
    assert sorted(counts.tolist())[-1] == 2
    assert (counts == 2).sum() == sum(row["repeat"] for row in ROWS)
    assert len(numbers) == len(ROWS) - sum(row["repeat"] for row in ROWS)
    # A second folder numbers its draws from 0 again.
    other = [row | {"protocol": "q", "key": f"q-{row['key']}"} for row in ROWS]
    both = kernel_data(pd.DataFrame(ROWS + other))
    assert np.unique(both.index_N, return_counts=True)[1].max() == 2


def test_mixed_optimizers_and_no_rows_are_refused():
    mixed = [ROWS[0], ROWS[1] | {"optimizer": "sgd"}]
    with pytest.raises(InputError, match="different optimizers"):
        kernel_data(pd.DataFrame(mixed))
    with pytest.raises(InputError, match="no kernel measurements"):
        kernel_data(pd.DataFrame(ROWS).iloc[:0])


def test_a_fifth_of_each_world_size_is_held_out_always_the_same():
    frame = pd.DataFrame(collective_rows(60))
    data = collective_data(frame)
    for size in (2, 4, 8):
        held_out = data.test_M[data.traffic_MC[:, 0] == size]
        assert held_out.sum() == len(held_out) // HELD_OUT_EVERY
    np.testing.assert_array_equal(data.test_M, collective_data(frame).test_M)
    assert data.world_sizes == (2, 4, 8)
    few = collective_data(frame.iloc[:3])
    assert not few.test_M.any()
    frame.loc[0, "total_bytes"] = 0.0
    assert len(collective_data(frame).time_ms_M) == 59


def test_all_to_alls_are_the_same_whatever_else_was_measured():
    exchanges = pd.DataFrame(collective_rows(60))
    others = [pd.DataFrame(collective_rows(30, seed=s)).assign(collective=kind.value)
              for s, kind in enumerate((Collective.ALL_REDUCE, Collective.ALL_GATHER))]  # fmt: skip
    mixed = pd.concat([others[0], exchanges.iloc[:20], others[1], exchanges.iloc[20:]])
    alone, found = collective_data(exchanges), collective_data(mixed)
    for name in ("traffic_MC", "time_ms_M", "oversubscribed_M", "test_M"):
        np.testing.assert_array_equal(getattr(found, name), getattr(alone, name))
    reduce = collective_data(mixed, Collective.ALL_REDUCE)
    np.testing.assert_array_equal(reduce.time_ms_M, others[0]["transfer_ms"])
    assert len(collective_data(mixed, Collective.REDUCE_SCATTER).time_ms_M) == 0


def test_processors_are_the_most_ranks_that_are_not_oversubscribed():
    frame = pd.DataFrame(collective_rows(60))
    frame["oversubscribed"] = frame["world_size"] > 4
    assert collective_data(frame).num_processors == 4
    assert collective_data(frame[frame["world_size"] == 8]).num_processors == 7
    frame["oversubscribed"] = False
    assert collective_data(frame).num_processors == NO_LIMIT
