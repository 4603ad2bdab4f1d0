import os
import re
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from autoshard.errors import WorkerError
from autoshard.features import TRAFFIC_FEATURES
from autoshard.measure.collectives import time_collectives
from autoshard.measure.config import Collective, CollectiveConfig, MeasureConfig, TimingConfig
from autoshard.measure.loading import load_collective_rows
from autoshard.measure.runner import collective_schedule, measure_collectives
from autoshard.measure.traffic_sampling import Traffic
from tests.process_cases import Children, is_running

ROOT = Path(__file__).absolute().parents[2]
QUICK = TimingConfig(warmup_iterations=1, min_iterations=5, max_iterations=5)
CONFIG = CollectiveConfig(world_sizes=(2, 3), timing=QUICK, item_time_limit_s=30.0)
EVEN = [kind for kind in Collective if kind is not Collective.ALL_TO_ALL]


def traffic(*bytes_per_peer, index=0, collective=Collective.ALL_TO_ALL):
    return Traffic(index=index, collective=collective, bytes_per_peer=bytes_per_peer)


def test_waiting_for_a_late_rank_is_not_transfer():
    items = [traffic(4096, 8192), *(traffic(8192, 8192, collective=kind) for kind in EVEN)]
    timings = list(time_collectives(items, CONFIG, arrival_delay_ms=(0.0, 50.0)))
    assert [timed.collective for timed, _ in timings] == list(Collective)
    for timed, timing in timings:
        assert timing.wait_ms >= 45.0, timed
        assert timing.transfer.median_ms < 25.0, timed


def test_every_kind_is_measured_stored_and_not_repeated(tmp_path):
    few = replace(CONFIG, world_sizes=(2,), num_collectives=3, max_rank_bytes=2**16)
    assert measure_collectives(MeasureConfig(collectives=few), tmp_path) == 3
    # Some all-to-alls are there already, as in folders from before there were other kinds.
    all_kinds = replace(few, world_sizes=(2, 3), kinds=tuple(Collective))
    config = MeasureConfig(collectives=all_kinds)
    assert measure_collectives(config, tmp_path) == 21
    rows = load_collective_rows(tmp_path / "collectives")
    expected = {(t.collective.value, t.world_size, t.index): t for t in collective_schedule(config)}
    assert len(rows) == len(expected) == 24
    for row in rows.to_dict("records"):
        drawn = expected[row["collective"], int(row["world_size"]), row["index"]]
        if drawn.collective is Collective.ALL_TO_ALL:
            assert row["direction"] == drawn.direction.value
        else:
            assert pd.isna(row["direction"])
        np.testing.assert_array_equal([row[name] for name in TRAFFIC_FEATURES], drawn.features())
        assert tuple(row["bytes_per_peer"]) == drawn.bytes_per_peer
        assert row["oversubscribed"] == (drawn.world_size > len(os.sched_getaffinity(0)))
        assert row["transfer_min_ms"] > 0
        assert row["transfer_min_ms"] <= row["transfer_p20_ms"] <= row["transfer_p80_ms"]
        assert (row["iterations"], row["warmup_iterations"]) == (5, 1)
    assert measure_collectives(config, tmp_path) == 0


@pytest.mark.parametrize("kind", list(Collective))
@pytest.mark.parametrize(
    ("sent", "limit_s", "message"),
    [
        (signal.SIGKILL, 30.0, r"rank 1 died: killed by SIGKILL.*rank 0: \w+.*, rank 1: \w+"),
        (signal.SIGSTOP, 2.0, r"did not end in time.*rank 0: \w+.*, rank 1: \w+"),
    ],
)
def test_a_dead_or_silent_rank_ends_the_run(sent, limit_s, message, kind):
    children = Children()
    items = [traffic(64, 64, index=index, collective=kind) for index in range(2000)]
    config = replace(CONFIG, item_time_limit_s=limit_s)
    timings = time_collectives(items, config)
    for _ in range(3):
        next(timings)
    os.kill(max(child.pid for child in children.new()), sent)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=message) as caught:
        list(timings)
    assert time.monotonic() - start < 20.0
    # What each rank was at: the stage, and of which collective.
    name = kind.value.replace("_", "-")
    assert len(re.findall(rf"rank \d: [a-z ]+ \({name} \d+ on 2 ranks\)", str(caught.value))) == 2
    assert not children.new()


def test_a_failing_rank_is_named_with_its_cause():
    children = Children()
    # A delay is missing for rank 1.
    with pytest.raises(WorkerError, match=r"rank 1 failed\n(?s:.*)IndexError"):
        list(time_collectives([traffic(64, 64)], CONFIG, arrival_delay_ms=(0.0,)))
    assert not children.new()


def test_ranks_that_are_through_stay_still_until_all_are():
    children = Children()
    timings = time_collectives([traffic(8, 8, 8), traffic(8, 8)], CONFIG)
    assert [next(timings)[0].world_size for _ in range(2)] == [3, 2]
    assert len(children.new()) == 3  # leaving takes a core for a second, while others are timed
    assert list(timings) == []
    assert children.new() == []


LONELY = """
import sys, time
import multiprocessing
from tests.distributed.test_measure_collectives import CONFIG, time_collectives, traffic

if __name__ == "__main__":
    timings = time_collectives([traffic(8, 8, 8), traffic(8, 8)], CONFIG)
    next(timings), next(timings)
    print(*(child.pid for child in multiprocessing.active_children()), flush=True)
    time.sleep(60)
"""


def test_waiting_ranks_end_with_their_parent(tmp_path):
    script = tmp_path / "lonely.py"
    script.write_text(LONELY)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    with subprocess.Popen(
        [sys.executable, str(script)], stdout=subprocess.PIPE, text=True, env=environment
    ) as parent:
        ranks = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(ranks) == 3
        parent.kill()
    deadline_s = time.monotonic() + 30
    while any(is_running(rank) for rank in ranks):
        assert time.monotonic() < deadline_s
        time.sleep(0.1)
