"""Records of long experiments: rows and metrics survive kills; held-out problems and summaries."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from autoshard.errors import InputError
from autoshard.shards import ShardSlice, fixed_rank_bytes, shard_load
from autoshard.tables import Table
from experiments.evaluation_summary import per_contender, summary_table
from experiments.heldout import HeldOutTask, Setting, held_out_tasks
from experiments.metrics import METRICS_FILE, LoggerConfig, MetricsLog
from experiments.rows import RowFile

IDENTITY = {"seed": 1, "settings": [1, 2]}


def test_rows_are_found_again(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "rows.jsonl"
    rows = RowFile(path, IDENTITY)
    rows.add("a", {"value": 1.5})
    rows.add("b", {"value": None})
    again = RowFile(path, dict(reversed(IDENTITY.items())))
    assert "a" in again
    assert "c" not in again
    assert again.rows == {"a": {"value": 1.5}, "b": {"value": None}}
    pd.testing.assert_frame_equal(pd.read_parquet(again.write_parquet()), again.frame())


def test_a_file_cut_off_anywhere_goes_on_with_its_whole_rows(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    rows = RowFile(path, IDENTITY)
    for key in "abc":
        rows.add(key, {"value": ord(key)})
    whole = path.read_bytes()
    ends = [index + 1 for index, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole) + 1):
        path.write_bytes(whole[:length])
        kept = RowFile(path, IDENTITY)
        num_whole = max(sum(end <= length for end in ends) - 1, 0)
        assert list(kept.rows) == list("abc")[:num_whole]
        for key in "abc"[num_whole:]:
            kept.add(key, {"value": ord(key)})
        assert path.read_bytes() == whole


def test_rows_of_another_configuration_are_refused_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    RowFile(path, IDENTITY).add("a", {"value": 1})
    before = path.read_bytes()
    with pytest.raises(InputError, match=r"another configuration.*another output folder"):
        RowFile(path, {**IDENTITY, "seed": 2})
    assert path.read_bytes() == before


@pytest.mark.parametrize(
    "text", ["no json\n", "[]\n", "{}\n", '{"identity": "x"}\n{"row": {}}\n', "\xff\n"]
)
def test_damaged_rows_are_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match="damaged"):
        RowFile(path, IDENTITY)


def open_log(folder: Path) -> MetricsLog:
    return MetricsLog(folder, LoggerConfig(), name="test", values={})


def steps(folder: Path) -> list[int]:
    lines = (folder / METRICS_FILE).read_text().splitlines()
    return [json.loads(line)["step"] for line in lines]


def test_steps_only_grow_also_after_a_kill(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        for step in (0, 1, 1, 0, 2):
            log.log(step, loss=1.0 / (step + 1))
    assert steps(tmp_path) == [0, 1, 2]
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-4])  # killed while writing step 2
    with open_log(tmp_path) as log:
        for step in range(5):  # the run starts over
            log.log(step, loss=1.0)
    assert steps(tmp_path) == [0, 1, 2, 3, 4]


def test_numbers_that_json_lacks_become_null(tmp_path: Path) -> None:
    with open_log(tmp_path) as log:
        log.log(0, a=math.nan, b=-math.inf, c=1, d=None, e="x", f=True)
    (line,) = (tmp_path / METRICS_FILE).read_text().splitlines()
    assert json.loads(line, parse_constant=lambda name: pytest.fail(name)) == {
        "step": 0,
        "a": None,
        "b": None,
        "c": 1,
        "d": None,
        "e": "x",
        "f": True,
    }


@pytest.mark.parametrize("line", ["nonsense", "[1]", '{"loss": 1}', '{"step": null}'])
def test_a_damaged_record_is_refused_by_line(tmp_path: Path, line: str) -> None:
    (tmp_path / METRICS_FILE).write_text('{"step": 0}\n' + line + "\n")
    with open_log(tmp_path) as log, pytest.raises(InputError, match="line 2"):
        log.log(1)


POOL = [
    Table(name=f"t{i}", num_embeddings=100 * (i + 1), embedding_dim=8, pooling_factor=float(i))
    for i in range(30)
]


def drawn(*settings: Setting, seed: int = 5) -> list[HeldOutTask]:
    return list(held_out_tasks(POOL, settings, seed))


def test_held_out_problems_depend_on_seed_and_their_own_numbers_only() -> None:
    small = Setting(num_tables=4, world_size=2, num_tasks=3, batch_size=8)
    large = Setting(num_tables=9, world_size=4, num_tasks=2, memory_slack=(1.5, 1.5))
    both, alone = drawn(small, large), drawn(large)
    assert [task.name for task in both] == ["4x2-0", "4x2-1", "4x2-2", "9x4-0", "9x4-1"]
    assert both[3:] == alone
    assert drawn(replace(large, num_tasks=1))[0].problem == alone[0].problem
    assert drawn(large, seed=6)[0].problem != alone[0].problem
    for task in both:
        assert len(task.problem.tables) == task.setting.num_tables
        assert task.problem.topology.world_size == task.setting.world_size
        assert task.problem.training.batch_size == task.setting.batch_size
    problem = alone[0].problem
    need = sum(
        shard_load(ShardSlice.whole(t), problem.training, 4).memory_bytes for t in problem.tables
    )
    room = problem.topology.hbm_bytes[0] - sum(fixed_rank_bytes(problem).values())
    assert room == pytest.approx(1.5 * need / 4, abs=1)


def test_settings_whose_problems_would_share_names_are_refused() -> None:
    setting = Setting(num_tables=4, world_size=2, num_tasks=1)
    with pytest.raises(InputError, match="4x2"):
        drawn(setting, replace(setting, batch_size=512))
    with pytest.raises(InputError, match="fewer tables"):
        drawn(replace(setting, num_tables=31))
    with pytest.raises(InputError, match="num_tasks"):
        replace(setting, num_tasks=0)


def evaluation() -> pd.DataFrame:
    objective = {
        "cost_greedy": [10.0, 20.0, 30.0, math.nan],
        "better": [5.0, 10.0, math.nan, 8.0],
        "never": [math.nan] * 4,
    }
    rows = [
        {
            "task": f"k{task}",
            "sharder": sharder,
            "training_seed": 3 if sharder == "better" else -1,
            "objective_ms": value,
            "infeasible": math.isnan(value),
            "lower_bound_ms": None if math.isnan(value) else 4.0,
            "best_known_ms": best,
            "planning_time_s": float(task),
        }
        for sharder, values in objective.items()
        for task, (value, best) in enumerate(zip(values, [5.0, 10.0, 30.0, 8.0], strict=True))
    ]
    return pd.DataFrame(rows)


def test_ratios_are_paired_and_failures_counted() -> None:
    rows = per_contender(evaluation()).set_index("sharder")
    assert rows.loc["better", "num_tasks"] == 2  # k2 failed here, k3 for cost_greedy
    assert rows.loc["better", "ratio"] == pytest.approx(0.5)
    assert rows.loc["better", "num_infeasible"] == 1
    assert rows.loc["better", "gap_to_best"] == pytest.approx(0.0)
    assert rows.loc["better", "gap_to_bound"] == pytest.approx((5 * 10 * 8 / 64) ** (1 / 3) - 1)
    assert rows.loc["better", "planning_time_s"] == 1.5
    assert rows.loc["cost_greedy", "ratio"] == 1.0
    assert rows.loc["cost_greedy", "gap_to_best"] == pytest.approx(4 ** (1 / 3) - 1)
    assert rows.loc["never", "num_infeasible"] == 4
    assert np.isnan(rows.loc["never", "ratio"])


@pytest.mark.parametrize("kept", [["never"], ["better"], ["cost_greedy", "never"]])
def test_the_table_is_printed_whatever_failed(kept: list[str]) -> None:
    frame = evaluation()
    table = summary_table(frame[frame["sharder"].isin(kept)])
    assert table.row_count == len(kept)
