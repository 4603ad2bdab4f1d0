import os
import signal
import time
from dataclasses import replace

import numpy as np
import pytest

from autoshard.errors import WorkerError
from autoshard.features import TRAFFIC_FEATURES
from autoshard.measure.collectives import time_collectives
from autoshard.measure.config import CollectiveConfig, MeasureConfig, TimingConfig
from autoshard.measure.loading import load_collective_rows
from autoshard.measure.runner import collective_schedule, measure_collectives
from autoshard.measure.traffic_sampling import Direction, Traffic
from tests.process_cases import Children

QUICK = TimingConfig(warmup_iterations=1, min_iterations=5, max_iterations=5)
CONFIG = CollectiveConfig(world_sizes=(2, 3), timing=QUICK, item_time_limit_s=30.0)


def traffic(*bytes_per_peer, index=0, direction=Direction.FROM_OWNERS):
    return Traffic(index=index, direction=direction, bytes_per_peer=bytes_per_peer)


def test_waiting_for_a_late_rank_is_not_transfer():
    (timed,) = time_collectives([traffic(4096, 8192)], CONFIG, arrival_delay_ms=(0.0, 50.0))
    timing = timed[1]
    assert timing.wait_ms > 40.0
    assert timing.transfer.median_ms < 25.0


def test_uneven_groups_are_measured_stored_and_not_repeated(tmp_path):
    config = MeasureConfig(collectives=replace(CONFIG, num_collectives=4, max_rank_bytes=2**16))
    assert measure_collectives(config, tmp_path) == 8
    rows = load_collective_rows(tmp_path / "collectives")
    expected = {(t.world_size, t.index): t for t in collective_schedule(config)}
    assert len(rows) == len(expected) == 8
    for row in rows.to_dict("records"):
        drawn = expected[int(row["world_size"]), row["index"]]
        np.testing.assert_array_equal([row[name] for name in TRAFFIC_FEATURES], drawn.features())
        assert tuple(row["bytes_per_peer"]) == drawn.bytes_per_peer
        assert row["oversubscribed"] == (drawn.world_size > len(os.sched_getaffinity(0)))
        assert row["transfer_min_ms"] > 0
        assert row["transfer_min_ms"] <= row["transfer_p20_ms"] <= row["transfer_p80_ms"]
        assert (row["iterations"], row["warmup_iterations"]) == (5, 1)
    assert measure_collectives(config, tmp_path) == 0
    more = replace(config, collectives=replace(config.collectives, num_collectives=5))
    assert measure_collectives(more, tmp_path) == 2


@pytest.mark.parametrize(
    ("sent", "limit_s", "message"),
    [
        (signal.SIGKILL, 30.0, r"rank \d died: killed by SIGKILL"),
        (signal.SIGSTOP, 3.0, r"did not end in time.*rank 0: "),
    ],
)
def test_a_dead_or_silent_rank_ends_the_run(sent, limit_s, message):
    children = Children()
    items = [traffic(64, 64, index=index) for index in range(400)]
    config = replace(CONFIG, item_time_limit_s=limit_s)
    timings = time_collectives(items, config)
    for _ in range(3):
        next(timings)
    os.kill(max(child.pid for child in children.new()), sent)
    start = time.monotonic()
    with pytest.raises(WorkerError, match=message):
        list(timings)
    assert time.monotonic() - start < 20.0
    assert not children.new()


def test_a_failing_rank_is_named_with_its_cause():
    children = Children()
    # A delay is missing for rank 1.
    with pytest.raises(WorkerError, match=r"rank 1 failed\n(?s:.*)IndexError"):
        list(time_collectives([traffic(64, 64)], CONFIG, arrival_delay_ms=(0.0,)))
    assert not children.new()
