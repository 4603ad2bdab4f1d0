"""What a policy sees: checked by arithmetic and by permuting ranks."""

from __future__ import annotations

import numpy as np
import pytest

from autoshard.observation import (
    FEATURE_LIMIT,
    GLOBAL_FEATURES,
    RANK_FEATURES,
    Observation,
    observe,
)
from autoshard.placement import PlacementState, PlacementTask
from tests.placement_cases import COST_MODEL, make_task, predicted


def place(task: PlacementTask, ranks: list[int]) -> PlacementState:
    state = PlacementState([task], COST_MODEL)
    for rank in ranks:
        state.place(np.array([rank]), np.array([True]), state.candidates())
    return state


def see(state: PlacementState) -> Observation:
    return observe(state, state.candidates())


def feature(seen: Observation, name: str) -> np.ndarray:
    return seen.ranks_NRK[0, :, RANK_FEATURES.index(name)]


def test_permuting_ranks_permutes_what_is_seen() -> None:
    task = make_task(num_tables=9, world_size=4)
    seen = see(place(task, [0, 1, 2, 0, 3]))
    permuted = see(place(task, [2, 0, 3, 2, 1]))
    new_of_old = [2, 0, 3, 1]
    np.testing.assert_allclose(
        permuted.ranks_NRK[0, new_of_old], seen.ranks_NRK[0], rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(permuted.globals_NG, seen.globals_NG, rtol=1e-5, atol=1e-6)


def test_tasks_side_by_side_do_not_mix() -> None:
    tasks = [make_task(num_tables=5, world_size=2), make_task(num_tables=7, world_size=4, seed=1)]
    both = see(PlacementState(tasks, COST_MODEL))
    for index, task in enumerate(tasks):
        alone = see(PlacementState([task], COST_MODEL))
        ranks = task.world_size
        np.testing.assert_array_equal(both.ranks_NRK[index, :ranks], alone.ranks_NRK[0])
        np.testing.assert_array_equal(both.globals_NG[index], alone.globals_NG[0])


def test_regrets_are_differences_of_objectives() -> None:
    task = make_task(num_tables=6, world_size=3)
    seen = see(place(task, [0, 1, 2, 0]))
    scale = task.alone_ms_SP.sum() / 3
    after = []
    for rank in range(3):
        state = place(task, [0, 1, 2, 0, rank])
        after.append(state.objective_ms_N()[0])
    np.testing.assert_allclose(
        feature(seen, "objective_regret"), (np.array(after) - min(after)) / scale, atol=1e-6
    )
    order = feature(seen, "objective_order")
    assert after[int(np.argmax(order))] == pytest.approx(min(after))
    assert max(order) == 1.0


def test_orders_are_one_half_third_and_equal_ranks_stand_equal() -> None:
    task = make_task(num_tables=6, world_size=4)
    seen = see(place(task, [0, 1]))
    # Ranks 2 and 3 are empty: the cheapest, and equal.
    assert feature(seen, "compute_order").tolist()[2:] == [1.0, 1.0]
    assert sorted(feature(seen, "compute_order")[:2]) == pytest.approx([1 / 4, 1 / 3])


def test_the_projection_of_the_last_slice_is_the_objective() -> None:
    task = make_task(num_tables=5, world_size=2)
    ranks = [0, 1, 1, 0]
    seen = see(place(task, ranks))
    finished = np.array([predicted(task, [*ranks, rank]).step_ms for rank in range(2)])
    scale = task.alone_ms_SP.sum() / 2
    best = seen.globals_NG[0, GLOBAL_FEATURES.index("projected_objective")]
    assert best == pytest.approx(finished.min() / scale, rel=1e-6)
    np.testing.assert_allclose(
        feature(seen, "projected_regret"), (finished - finished.min()) / scale, atol=1e-6
    )


def test_shares_of_a_finished_even_split_are_one() -> None:
    task = make_task(num_tables=1, world_size=1)
    seen = see(PlacementState([task], COST_MODEL))
    for name in ("output_share_with_slice", "ids_share_with_slice"):
        assert feature(seen, name).tolist() == [1.0]
    # Compute has the rank's fixed overhead besides the table's own cost, already in alone_ms.
    assert feature(seen, "fwd_share_with_slice")[0] == pytest.approx(1.0)


def test_everything_is_finite_and_bounded() -> None:
    task = make_task(num_tables=12, world_size=8)
    state = PlacementState([task], COST_MODEL, max_ranks=16)
    for step in range(12):
        seen = see(state)
        for values in (seen.ranks_NRK, seen.globals_NG):
            assert values.dtype == np.float32
            assert np.isfinite(values).all()
            assert np.abs(values).max() <= FEATURE_LIMIT
        state.place(np.array([step % 2]), np.array([True]), state.candidates())
    assert not see(state).legal_NR.any()
