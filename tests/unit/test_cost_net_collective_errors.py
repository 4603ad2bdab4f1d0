"""Unseen world sizes and other kinds of collectives, where the physics is known."""

from __future__ import annotations

import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from rich.console import Console

from autoshard.measure.config import Collective
from cost_net.collective_errors import (
    collective_score,
    leave_one_world_size_out,
    other_kinds_report,
    world_size_table,
)
from cost_net.collective_training import train_collective
from cost_net.dataset import CollectiveData
from cost_net.networks import CollectiveNet
from cost_net.training import CostNetConfig
from tests.synthetic_measurements import collectives

CONFIG = CostNetConfig(collective_epochs=60)


class Doubling(CollectiveNet):
    """Says that every collective takes two milliseconds."""

    def forward(self, traffic_MC: torch.Tensor) -> torch.Tensor:
        return torch.full((len(traffic_MC),), 2.0)


def test_scores_by_arithmetic():
    data = collectives(4)
    data = replace(data, time_ms_M=np.array([1.0, 2.0, 4.0, 8.0]))
    # Relative errors 1, 0, 1/2 and 3/4.
    score = collective_score(data, Doubling())
    assert score == {
        "num": 4,
        "median": pytest.approx(0.625),
        "mean": pytest.approx(0.5625),
        "p90": pytest.approx(0.75 + 0.7 * 0.25),
    }
    assert collective_score(data.of(np.zeros(4, dtype=bool)), Doubling()) is None


def test_a_world_size_that_follows_the_others_is_predicted_without_it():
    data = collectives(240)
    report = leave_one_world_size_out(data, CONFIG)
    assert list(report) == ["2", "4", "8"]
    for world_size, scores in report.items():
        own_M = data.traffic_MC[:, 0] == int(world_size)
        assert scores["without"]["num"] == scores["with"]["num"] == own_M.sum()
        held_out = int((own_M & data.test_M).sum())
        assert scores["test_without"]["num"] == scores["test_with"]["num"] == held_out
        # Linear in ranks and bytes with 3% noise, also where it is extrapolated.
        assert scores["without"]["median"] < 0.15
        assert scores["with"]["median"] < 0.06


def test_a_world_size_that_does_not_follow_is_found_out():
    data = collectives(240)
    eight_M = data.traffic_MC[:, 0] == 8
    slower = replace(data, time_ms_M=np.where(eight_M, 3 * data.time_ms_M, data.time_ms_M))
    report = leave_one_world_size_out(slower, replace(CONFIG, collective_epochs=200))
    # A third of the truth is predicted without it: an error of 2/3.
    assert report["8"]["without"]["median"] == pytest.approx(2 / 3, abs=0.05)
    assert report["8"]["with"]["median"] < 0.5 * report["8"]["without"]["median"]


def test_the_rows_left_out_do_not_leak_into_the_model():
    data = collectives(120)
    two_M = data.traffic_MC[:, 0] == 2
    report = leave_one_world_size_out(data, CONFIG)["2"]["without"]
    alone = train_collective(data.of(~two_M), CONFIG)
    assert report == collective_score(data.of(two_M), alone)


def test_what_cannot_be_left_out_is_not_told():
    data = collectives(120)
    one = data.of(data.traffic_MC[:, 0] == 4)
    assert leave_one_world_size_out(one, CONFIG) == {}
    # Without 4 there would be one row of 2 ranks.
    first = np.flatnonzero((data.traffic_MC[:, 0] == 2) & ~data.test_M)[0]
    few = data.of((data.traffic_MC[:, 0] == 4) | (np.arange(120) == first))
    assert list(leave_one_world_size_out(few, CONFIG)) == ["2"]


def test_other_kinds_are_judged_beside_all_to_alls():
    exchanges = collectives(240)
    slower = collectives(240, seed=1)
    slower = replace(slower, time_ms_M=4 * slower.time_ms_M)
    single = slower.of(np.arange(240) == 1)
    network = train_collective(exchanges, CONFIG)
    others: dict[Collective, CollectiveData] = {
        Collective.ALL_REDUCE: slower,
        Collective.ALL_GATHER: single,
    }
    report = other_kinds_report(others, network, CONFIG)
    reduce = report["all_reduce"]
    assert (reduce["num"], reduce["world_sizes"]) == (240, [2, 4, 8])
    assert reduce["own"]["num"] == reduce["as_all_to_all"]["num"] == 48  # a fifth is held out
    assert reduce["as_all_to_all"]["median"] == pytest.approx(0.75, abs=0.05)
    assert reduce["own"]["median"] < 0.1
    assert report["all_gather"]["own"] is None
    assert report["all_gather"]["as_all_to_all"]["num"] == 1


def test_the_table_shows_every_world_size():
    data = collectives(120)
    data = replace(data, test_M=data.test_M & (data.traffic_MC[:, 0] != 8))
    left_out = leave_one_world_size_out(data, CONFIG)
    assert left_out["8"]["test_without"] is None
    report = {"collectives": {"left_out_world_sizes": left_out}}
    out = io.StringIO()
    Console(width=120, file=out).print(world_size_table(report))
    for scores in left_out.values():
        assert f"{scores['without']['median']:.1%}" in out.getvalue()
    assert world_size_table({"collectives": {}}) is None
    assert world_size_table({"collectives": {"left_out_world_sizes": {}}}) is None
