import os
import signal
import subprocess
import sys
import textwrap
import time
from dataclasses import replace
from pathlib import Path

import pytest

from autoshard.errors import InputError, UnsupportedError, WorkerError
from autoshard.measure.config import KernelConfig, MeasureConfig, SamplingConfig, TimingConfig
from autoshard.measure.loading import load_kernel_rows, row_slices
from autoshard.measure.references import REFERENCE_COLUMNS
from autoshard.measure.runner import kernel_schedule, measure_kernels
from autoshard.measure.sampling import ShardSetSampler
from autoshard.measure.store import part_paths, read_part
from autoshard.problem import Optimizer
from autoshard.tables import Table
from tests.process_cases import Children, is_running

pytest.importorskip("fbgemm_gpu", reason="kernels need fbgemm-gpu-cpu or fbgemm-gpu")

NUM_SETS, NUM_REPEATED, NUM_PASSES = 20, 2, 2
NUM_ROWS = (NUM_SETS + NUM_REPEATED) * NUM_PASSES
TABLES = [
    Table(name=f"t{index}", num_embeddings=200 + index, embedding_dim=8, pooling_factor=2.0)
    for index in range(12)
]
CONFIG = MeasureConfig(
    num_sets=NUM_SETS,
    num_repeated_sets=NUM_REPEATED,
    num_passes=NUM_PASSES,
    workers=1,
    flush_rows=3,
    kernels=KernelConfig(
        arena_bytes=2**20,
        timing=TimingConfig(warmup_iterations=1, min_iterations=3, max_iterations=3),
    ),
    sampling=SamplingConfig(max_shards=4, num_samples=(64,), max_weight_bytes=2**20),
)
ROOT = Path(__file__).resolve().parents[2]
# Measures what this module does, in a process of its own that can be killed.
SCRIPT = """
    import importlib.util, sys, time
    spec = importlib.util.spec_from_file_location("measured", sys.argv[1])
    measured = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measured)
    measured.measure_kernels(
        measured.CONFIG, measured.TABLES, sys.argv[2], lambda *_: time.sleep(0.1)
    )
"""


def stored_keys(folder):
    return [key for path in part_paths(folder) for key in read_part(path)[0]["key"].to_pylist()]


def children_of(pid):
    text = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in text.split()]


def wait_until(condition, limit_s=60.0):
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the run did not get that far"
        time.sleep(0.02)


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="finds workers through /proc")
def test_a_killed_run_is_continued_without_loss_or_repetition(tmp_path):
    folder = tmp_path / "kernels"
    run = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SCRIPT), __file__, str(tmp_path)], cwd=ROOT
    )
    try:
        wait_until(lambda: folder.is_dir() and len(list(folder.glob("part-*"))) >= 2)
        workers = children_of(run.pid)
    finally:
        run.send_signal(signal.SIGKILL)
        run.wait(10)
    assert workers
    # Workers end by themselves once their parent is gone.
    wait_until(lambda: not any(is_running(pid) for pid in workers), 20.0)
    before = stored_keys(folder)
    content = {path: path.read_bytes() for path in part_paths(folder)}
    assert 6 <= len(before) < NUM_ROWS

    seen = []
    measured = measure_kernels(CONFIG, TABLES, tmp_path, lambda *report: seen.append(report))

    assert measured == NUM_ROWS - len(before)
    assert [done for done, _, _ in seen] == list(range(len(before) + 1, NUM_ROWS + 1))
    after = stored_keys(folder)
    assert len(after) == len(set(after)) == NUM_ROWS
    assert set(before) <= set(after)
    assert all(path.read_bytes() == old for path, old in content.items())

    rows = load_kernel_rows(folder)
    sampler = ShardSetSampler(TABLES, CONFIG.sampling, seed=CONFIG.seed)
    stages = kernel_schedule(CONFIG, sampler)
    places = {(p.index, p.repeat, p.pass_) for stage in stages for _, p in stage}
    assert set(zip(rows["index"], rows["repeat"], rows["pass"], strict=True)) == places
    assert rows["order"].is_unique
    for row in rows.to_dict("records"):
        drawn = sampler.draw(row["index"])
        assert row_slices(row) == drawn.slices
        assert row["split"] == drawn.split.value
        assert row["num_slices"] == len(drawn.slices)
        assert (row["iterations"], row["warmup_iterations"]) == (3, 1)
        assert all(row[name] > 0 for name in REFERENCE_COLUMNS)
        assert row["threads"] == row["concurrent_workers"] == 1

    # Nothing is left to do; more sets extend the run, by the repetition of a test set too where
    # there had been too few of these.
    assert measure_kernels(CONFIG, TABLES, tmp_path) == 0
    more = replace(CONFIG, num_sets=NUM_SETS + 2)
    wanted = {(p.index, p.repeat, p.pass_) for s in kernel_schedule(more, sampler) for _, p in s}
    assert {p for p in wanted - places if p[1] == 0} == {
        (index, 0, pass_) for index in (NUM_SETS, NUM_SETS + 1) for pass_ in range(NUM_PASSES)
    }
    assert measure_kernels(more, TABLES, tmp_path) == len(wanted - places)


def test_a_killed_worker_is_an_error_and_finished_rows_are_kept(tmp_path):
    children = Children()

    def kill_at_five(done, total, what):
        if done == 5:
            (worker,) = children.new()
            os.kill(worker.pid, signal.SIGKILL)

    with pytest.raises(WorkerError, match="killed by SIGKILL"):
        measure_kernels(CONFIG, TABLES, tmp_path, kill_at_five)
    assert not children.new()
    assert len(stored_keys(tmp_path / "kernels")) >= 5


def test_unusable_runs_are_refused_before_any_worker_starts(tmp_path):
    kernels = replace(CONFIG.kernels, optimizer=Optimizer.ADAM)
    with pytest.raises(UnsupportedError, match="adam"):
        measure_kernels(replace(CONFIG, kernels=kernels), TABLES, tmp_path)
    with pytest.raises(InputError, match="more measuring workers than cores"):
        measure_kernels(replace(CONFIG, workers=10_000), TABLES, tmp_path)
    with pytest.raises(InputError, match="fewer tables than splits"):
        measure_kernels(CONFIG, TABLES[:2], tmp_path)
    assert not (tmp_path / "kernels").exists()
