"""The command line: results on stdout, one clear error on stderr, exit codes as promised."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import get_args, get_type_hints

import pandas as pd
import pytest

from autoshard.cli.main import app, run_command_line
from autoshard.cli.options import parse_hbm_gib
from autoshard.errors import InputError
from autoshard.plan import load_plan

HEADER = "name,num_embeddings,embedding_dim,pooling_factor"
TABLES = f"{HEADER}\na,1000,16,4\nb,2000,8,2\nc,500,32,1\nd,4000,4,3\n"
MODEL = ("--cost-model", "analytic")
FAST = (*MODEL, "--sharder", "cost_greedy")
SHAPE = ("--world-size", "2", "--hbm-gib", "1")


@pytest.fixture
def folder(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("AUTOSHARD_TRACEBACK", raising=False)
    Path("tables.csv").write_text(TABLES)
    return tmp_path


@pytest.fixture
def call(folder, capsys):
    """Runs one command in this process: (exit code, stdout, stderr)."""

    def run(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        code = run_command_line([str(argument) for argument in arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return run


@pytest.fixture
def refuse(call):
    """Runs a command that must fail on its input; returns its one message."""

    def run(*arguments: object) -> str:
        code, out, err = call(*arguments)
        assert code == 2
        assert out == ""
        (line,) = err.splitlines()
        assert line.startswith("error: ")
        return line

    return run


@pytest.fixture
def plan(call):
    """Writes plan.json with a fast sharder."""
    code, _, err = call("plan", "tables.csv", *SHAPE, *FAST, "--out", "plan.json")
    assert (code, err) == (0, "wrote plan.json\n")
    return Path("plan.json")


def in_process(*arguments: str, **options: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "autoshard.cli.main", *arguments],
        capture_output=True,
        text=True,
        timeout=100,
        **options,
    )


# plan


def test_plan_writes_a_valid_plan_and_says_how_good_it_is(call, plan):
    loaded = load_plan(plan)
    assert [entry.table.name for entry in loaded.tables] == ["a", "b", "c", "d"]
    assert loaded.provenance["sharder"] == "cost_greedy"
    code, out, _ = call("plan", "tables.csv", *SHAPE, *FAST)
    assert code == 0
    for words in ("predicted, extrapolated", "Memory ledger", "Lower bound", "4 tables in 4"):
        assert words in out


def test_equal_arguments_give_equal_plans(call, plan):
    call("plan", "tables.csv", *SHAPE, *FAST, "--out", "again.json")
    assert Path("again.json").read_bytes() == plan.read_bytes()


def test_json_holds_the_plan_and_nothing_else(call):
    code, out, err = call("plan", "tables.csv", *SHAPE, *FAST, "--json")
    value = json.loads(out)
    assert (code, err) == (0, "")
    assert value["plan"]["topology"]["hbm_bytes"] == [2**30, 2**30]
    assert len(value["ledger"]) == 2
    cost = value["cost"]
    assert cost["step_ms"] / cost["lower_bound_ms"] - 1 == pytest.approx(cost["gap_to_bound"])


def test_memory_per_rank_and_options_reach_the_plan(call):
    code, _, err = call(
        *("plan", "tables.csv", "--world-size", 4, "--local-world-size", 2),
        *("--hbm-gib", "1,1.5,2,0.25", "--batch-size", 64, "--optimizer", "adam"),
        *("--dense-gib", "0.125", "--reserve-gib", "0.0625", *FAST, "--out", "new.json"),
    )
    assert code == 0
    assert "warning: 'autoshard run' will not run this plan" in err
    loaded = load_plan("new.json")
    assert loaded.topology.hbm_bytes == (2**30, 3 * 2**29, 2**31, 2**28)
    assert loaded.topology.local_world_size == 2
    assert loaded.topology.reserved_bytes == 2**26
    assert loaded.training.batch_size == 64
    assert loaded.training.dense_bytes == 2**27


def test_compare_prints_every_sharder(call, monkeypatch):
    monkeypatch.setattr(
        "autoshard.planning.sharder_names", lambda: ("random", "size_greedy", "cost_greedy")
    )
    code, out, _ = call("plan", "tables.csv", *SHAPE, *FAST, "--compare", "--json")
    rows = json.loads(out)["comparison"]
    assert code == 0
    assert [row["sharder"] for row in rows] == ["random", "size_greedy", "cost_greedy"]
    best = min(row["cost"]["step_ms"] for row in rows)
    assert {row["cost"]["best_known_ms"] for row in rows} == {best}
    code, out, err = call("plan", "tables.csv", *SHAPE, *FAST, "--compare")
    assert "/ lower bound" in out
    assert "planning with size_greedy" in err


def test_a_plan_that_is_itself_the_best_known_says_so(call, monkeypatch):
    """The search that made a plan is no other plan to compare it with."""
    searched = (*SHAPE, *MODEL, "--sharder", "autoshard", "--evaluations", 50)
    code, out, _ = call("plan", "tables.csv", *searched)
    assert code == 0
    assert "Best plan known: this one" in out
    cost = json.loads(call("plan", "tables.csv", *searched, "--json")[1])["cost"]
    assert cost["is_best_known"] is True
    assert cost["best_known_ms"] == cost["step_ms"]
    monkeypatch.setattr("autoshard.planning.sharder_names", lambda: ("random", "autoshard"))
    compared = ("plan", "tables.csv", *SHAPE, *MODEL, "--sharder", "random", "--compare")
    out = call(*compared)[1]
    assert "this one" not in out
    assert re.search(r"Best plan known: [\d.]+ ms; this plan is [\d.]+% above it", out)
    assert json.loads(call(*compared, "--json")[1])["cost"]["is_best_known"] is False
    # Without any search there is nothing to say.
    assert "Best plan known" not in call("plan", "tables.csv", *SHAPE, *FAST)[1]


def test_many_ranks_are_summarised(call):
    code, out, _ = call(
        *("plan", "workload:production?num_tables=40&seed=0&row_scale=0.01"),
        *("--world-size", 64, "--hbm-gib", 4, *FAST),
    )
    assert code == 0
    assert "16 slowest and fullest of 64 ranks" in out
    assert len(out.splitlines()) < 70


def test_workload_options_are_read(call):
    source = "workload:dlrm?num_tables=3&seed=1&dims=8,16&row_scale=0.5"
    assert call("convert", source, "made.csv")[0] == 0
    made = pd.read_csv("made.csv")
    assert len(made) == 3
    assert set(made["embedding_dim"]) <= {8, 16}


def test_hbm_values_are_exact():
    assert parse_hbm_gib("0.1", 2) == (107374182, 107374182)  # 2^30 / 10, rounded down
    assert parse_hbm_gib(" 1, 2 ", 2) == (2**30, 2**31)
    with pytest.raises(InputError):
        parse_hbm_gib("1,0", 2)


@pytest.mark.parametrize(
    "value",
    ["nan", "inf", "-1", "1,2,3", "", "x", "1,", "1e99", "0", "1;2", "١", "1_0", "1e" + "9" * 30],
)
def test_unusable_memory(refuse, value):
    assert "--hbm-gib" in refuse("plan", "tables.csv", "--world-size", 2, f"--hbm-gib={value}")


BAD_TABLES = {
    "negative row count": (f"{HEADER}\na,-5,16,4\n".encode(), ("line 2", "num_embeddings", "-5")),
    "fractional row count": (f"{HEADER}\na,1.5,16,4\n".encode(), ("line 2", "num_embeddings")),
    "duplicate name": (f"{TABLES}a,7,8,1\n".encode(), ("line 6", "'a'", "line 2")),
    "empty file": (b"", ("is empty",)),
    "header only": (HEADER.encode(), ("no tables",)),
    "missing column": (b"name,num_embeddings,embedding_dim\na,1,4\n", ("pooling_factor",)),
    "mistyped column": (TABLES.replace("dim", "dmi").encode(), ("embedding_dim",)),
    "binary file": (bytes(range(256)) * 8, ("not a text file",)),
    "NaN": (f"{HEADER}\na,10,16,nan\n".encode(), ("line 2", "pooling_factor")),
    "short row": (f"{HEADER}\na,10\n".encode(), ("line 2",)),
}


@pytest.mark.parametrize("case", BAD_TABLES)
def test_bad_table_lists(refuse, case):
    content, words = BAD_TABLES[case]
    Path("bad.csv").write_bytes(content)
    message = refuse("plan", "bad.csv", *SHAPE, *FAST, "--out", "plan.json")
    for word in ("bad.csv", *words):
        assert word in message
    assert not Path("plan.json").exists()


def test_too_little_memory_names_tables_and_writes_nothing(refuse):
    message = refuse(
        *("plan", "tables.csv", "--world-size", 2, "--hbm-gib", "0.0001"),
        *(*FAST, "--batch-size", 4, "--out", "plan.json"),
    )
    assert "GiB" in message
    assert "remedy" in message
    assert not Path("plan.json").exists()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["pln"], "Did you mean 'plan'"),
        (["plan", "tables.csv", "--wrld-size", "2"], "--world-size"),
        (["plan"], "Missing argument 'TABLES'"),
        (["plan", "tables.csv", "--world-size", "two", "--hbm-gib", "1"], "--world-size"),
        (["plan", "tables.csv", "--world-size", "0", "--hbm-gib", "1"], "--world-size"),
        (["plan", "tables.csv", "--world-size", "99999999999", "--hbm-gib", "1"], "1..65536"),
        (["plan", "tables.csv", *SHAPE, "--local-world-size", "3"], "divide"),
        (["plan", "tables.csv", *SHAPE, "--batch-size", "99999999999"], "batch_size"),
        (["plan", "tables.csv", *SHAPE, "--optimizer", "lamb"], "rowwise_adagrad"),
        (["plan", "tables.csv", *SHAPE, "--time-limit", "nan"], "--time-limit"),
        (["plan", "tables.csv", *SHAPE, "--time-limit", "-1"], "--time-limit"),
        (["plan", "tables.csv", *SHAPE, "--seed", "-1"], "--seed"),
        (["plan", "tables.csv", *SHAPE, "--evaluations", "0"], "--evaluations"),
        (["plan", "tables.csv", *SHAPE, "--sharder", "cost_gredy"], "did you mean 'cost_greedy'"),
        (["plan", "tables.csv", *SHAPE, "--compare", "--sharder", "x"], "unknown sharder 'x'"),
        (["plan", "tables.csv", *SHAPE, "--cost-model", "nowhere"], "nowhere"),
        (["plan", "tables.csv", *SHAPE, *MODEL, "--policy", "nowhere"], "nowhere"),
        (["plan", "missing.csv", *SHAPE], "missing.csv does not exist"),
        (["plan", "tables.txt", *SHAPE], ".parquet"),
        (["plan", ".", *SHAPE], "not known"),
        (["plan", "tables.csv", *SHAPE, "--out", "."], "a folder"),
        (["plan", "tables.csv", *SHAPE, "--out", "tables.csv/plan.json"], "not a folder"),
        (["plan", "tables.csv", *SHAPE, "--out", "no/plan.json"], "folder no does not exist"),
        (["export", "plan.json", "--out", "no/plan.csv"], "folder no does not exist"),
        (["convert", "tables.csv", "no/tables.json"], "folder no does not exist"),
        (["plan", "tables.csv", *SHAPE, "--out", ""], "output path is empty"),
        (["plan", "tables.csv", *SHAPE, "--out", "x" * 300], "too long"),
        (["plan", "workload:producton", *SHAPE], "did you mean 'production'"),
        (["plan", "workload:production?num_tables=x", *SHAPE], "whole number"),
        (["plan", "workload:production?num_tables=٣&seed=0", *SHAPE], "whole number"),
        (["plan", "workload:production?num_tables=1_0&seed=0", *SHAPE], "whole number"),
        (["plan", "workload:mlperf_dcnv2?scale=nan", *SHAPE], "a number"),
        (["plan", "workload:production?num_tabels=3&seed=0", *SHAPE], "num_tabels"),
        (["plan", "workload:production?num_tables=3", *SHAPE], "'seed'"),
        (["plan", "workload:production?num_tables", *SHAPE], "option=value"),
        (["plan", "workload:dlrm?num_tables=3&num_tables=4&seed=0", *SHAPE], "given twice"),
        (["plan", "workload:mlperf_dcnv2?ids=3", *SHAPE], "cannot be given as text"),
        (["validate", "missing.json"], "missing.json does not exist"),
        (["validate", "tables.csv"], "is not JSON"),
        (["validate", "."], "directory"),
        (["explain", "missing.json"], "missing.json"),
        (["diff", "missing.json", "missing.json"], "missing.json"),
        (["export", "missing.json", "--format", "jsno"], "did you mean 'json'"),
        (["run", "missing.json"], "missing.json"),
        (["run", "missing.json", "--timeout-s", "0"], "--timeout-s"),
        (["convert", "tables.csv", "tables.xlsx"], ".parquet"),
        (["convert", "missing.pt", "tables.csv"], "missing.pt"),
        (["doctor", "--timeout-s", "inf"], "--timeout-s"),
    ],
)
def test_bad_requests(refuse, arguments, words):
    assert words in refuse(*arguments)


def numeric_options() -> list[tuple[str, str]]:
    """(command, option) of every option that takes a number."""
    found = []
    for command in app.registered_commands:
        for name, kind in get_type_hints(command.callback).items():
            if {int, float} & {kind, *get_args(kind)}:
                found.append((str(command.name), f"--{name.replace('_', '-')}"))
    return found


@pytest.mark.parametrize(("command", "option"), numeric_options())
def test_numbers_are_written_in_ascii_digits(refuse, command, option):
    for text in ("٣", "３", "1_0", "x", "", "nan", "1e", "0x10"):
        assert option in refuse(command, f"{option}={text}")


def test_options_that_take_numbers_are_found():
    assert {("plan", "--world-size"), ("run", "--steps"), ("doctor", "--timeout-s")} <= set(
        numeric_options()
    )


def test_a_bad_policy_or_sharder_is_told_before_anything_is_read(refuse):
    with_missing_tables = ("plan", "missing.csv", *SHAPE, "--cost-model", "missing")
    assert "policy 'nowhere'" in refuse(*with_missing_tables, "--policy", "nowhere")
    assert "unknown sharder" in refuse(*with_missing_tables, "--sharder", "nobody")
    unused = ("--sharder", "cost_greedy", "--policy", "nowhere")
    assert "policy 'nowhere'" in refuse(*with_missing_tables, *unused)
    assert "policy 'nowhere'" in refuse("explain", "no.json", "--replan", "--policy", "nowhere")


def test_messages_are_for_people(refuse, plan):
    """Nothing of how Python writes lists, dictionaries and enum members."""
    value = json.loads(plan.read_text())
    del value["checksum"]
    table = value["tables"][0]
    faults = {
        "compute_kernel is not supported": {"tables": [{**table, "compute_kernel": "dense"}]},
        "unknown key": {"colour": 1, "size": 2},
        "lacks a key": {"topology": {"world_size": 2}},
        "tables must be a list": {"tables": {"a": {"b": ["c"]}}},
        "fwd_compute_ms is not a list": {"cost": {**value["cost"], "fwd_compute_ms": {"0": 1}}},
        "hbm_bytes must be a list": {"topology": {"world_size": 2, "hbm_bytes": {"a": [1]}}},
        "feature_names must be a list": {"tables": [{**table, "feature_names": {"a": 1}}]},
    }
    for words, change in faults.items():
        Path("bad.json").write_text(json.dumps({**value, **change}))
        message = refuse("validate", "bad.json")
        assert words in message
        got = message.partition("; got: ")[2]
        assert got
        assert not re.search(r"[\[(]'|\{'|',\)|<\w+\.\w+", got), message


def test_control_characters_do_not_reach_the_terminal(refuse):
    Path("evil.csv").write_text(f"{HEADER}\n\x1b[31mred,x,1,1\n")
    assert "\x1b" not in refuse("plan", "evil.csv", *SHAPE)


def test_markup_in_names_is_text(call):
    Path("marked.csv").write_text(f"{HEADER}\n[red]t[/red],100,8,1\n:smile:,100,8,1\n")
    call("plan", "marked.csv", *SHAPE, *FAST, "--out", "plan.json")
    code, out, _ = call("explain", "plan.json", *MODEL)
    assert code == 0
    assert "[red]t[/red]" in out
    assert ":smile:" in out


def test_no_command_prints_help(call):
    code, out, err = call()
    assert code == 2
    assert "autoshard plan tables.csv" in out + err
    code, out, err = call("--help")
    assert (code, err) == (0, "")


@pytest.mark.parametrize(
    "command", ["plan", "validate", "explain", "diff", "export", "run", "convert", "doctor"]
)
def test_every_help_has_an_example(call, command):
    code, out, _ = call(command, "--help")
    assert code == 0
    assert f"autoshard {command}" in out.partition("For example:")[2]


# validate, explain, diff, export, convert


def test_validate_against_tables(call, refuse, plan):
    code, out, _ = call("validate", plan, "tables.csv")
    assert code == 0
    assert "plan.json is valid and made for tables.csv" in out
    code, out, _ = call("validate", plan, "--json")
    assert json.loads(out)["valid"] is True
    Path("tables.csv").write_text(TABLES.replace("b,2000", "b,2001"))
    assert "num_embeddings 2000 -> 2001" in refuse("validate", plan, "tables.csv")


def test_altered_plan_is_refused(refuse, plan):
    value = json.loads(plan.read_text())
    value["tables"][0]["shards"][0]["num_rows"] -= 1
    plan.write_text(json.dumps(value))
    assert "altered" in refuse("validate", plan)
    del value["checksum"]
    plan.write_text(json.dumps(value))
    assert "table 'a' (table_wise), shard 0 must be the whole table" in refuse("validate", plan)


def by_hand(plan: Path, **ranks: int) -> Path:
    """The plan without cost and checksum, and with tables on other ranks."""
    value = json.loads(plan.read_text())
    del value["cost"], value["checksum"], value["provenance"]
    for entry in value["tables"]:
        for shard in entry["shards"]:
            shard["rank"] = ranks.get(entry["name"], 0)
    path = plan.with_name("by_hand.json")
    path.write_text(json.dumps(value))
    return path


def test_explain_costs_a_plan_written_by_hand(call, plan):
    hand = by_hand(plan, d=1)
    code, out, _ = call("explain", hand, *FAST, "--replan")
    assert code == 0
    assert "The largest term is" in out
    assert "Rank 0 is the slowest in backward" in out
    assert "no saving is claimed" in out  # the analytic model stands on no measurements
    code, out, _ = call("explain", hand, *MODEL, "--against", plan, "--json")
    value = json.loads(out)
    assert value["cost"]["step_ms"] > value["other"]["cost"]["step_ms"]
    assert value["other"]["cost"]["step_ms"] == load_plan(plan).cost.step.step_ms


def test_explain_refuses_other_tables_and_two_comparisons(call, refuse, plan):
    Path("few.csv").write_text(f"{HEADER}\na,1000,16,4\n")
    call("plan", "few.csv", *SHAPE, *FAST, "--out", "few.json")
    assert "different tables" in refuse("explain", plan, *MODEL, "--against", "few.json")
    call("plan", "tables.csv", "--world-size", 3, "--hbm-gib", 1, *FAST, "--out", "three.json")
    assert "different topologies" in refuse("explain", plan, *MODEL, "--against", "three.json")
    assert "exclude each other" in refuse("explain", plan, "--against", plan, "--replan")


def test_diff(call, plan):
    code, out, _ = call("diff", plan, plan)
    assert code == 0
    assert "place all 4 tables alike" in out
    hand = by_hand(plan)
    code, out, _ = call("diff", plan, hand)
    assert "Costs are not compared" in out
    code, out, _ = call("diff", plan, hand, *MODEL, "--json")
    value = json.loads(out)
    moved = [e for e in load_plan(plan).tables if e.shards[0].rank != 0]
    assert {move["name"] for move in value["moved"]} == {entry.table.name for entry in moved}
    assert value["moved_bytes"] == sum(entry.table.weight_bytes for entry in moved)
    assert len(value["costs"]) == 2
    assert value["equal"] is False


def test_export(call, plan):
    code, out, _ = call("export", plan, "--format", "csv")
    assert code == 0
    assert len(out.splitlines()) == 5
    call("export", plan, "--format", "json", "--out", "again.json")
    assert Path("again.json").read_bytes() == plan.read_bytes()


def test_convert_there_and_back(call):
    for source, target in (
        ("tables.csv", "t.parquet"),
        ("t.parquet", "t.json"),
        ("t.json", "back.csv"),
    ):
        assert call("convert", source, target)[0] == 0
    pd.testing.assert_frame_equal(
        pd.read_csv("tables.csv"), pd.read_csv("back.csv"), check_dtype=False
    )


def test_convert_measures_a_trace(call):
    lookups = {name: [[1, 2, 3], [3], []] for name in "abcd"}
    pd.DataFrame(lookups).to_parquet("lookups.parquet")
    assert call("convert", "tables.csv", "measured.csv", "--trace", "lookups.parquet")[0] == 0
    measured = pd.read_csv("measured.csv")
    assert measured["pooling_factor"].tolist() == pytest.approx([4 / 3] * 4)
    assert measured["num_embeddings"].tolist() == [1000, 2000, 500, 4000]


# faults and signals


def test_internal_faults_are_short_unless_asked(call, monkeypatch):
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("a fault\nof two lines")

    monkeypatch.setattr("autoshard.plan.load_plan", fail)
    code, out, err = call("validate", "plan.json")
    assert (code, out) == (1, "")
    (line,) = err.splitlines()
    assert "internal fault: RuntimeError: a fault of two lines" in line
    assert "AUTOSHARD_TRACEBACK=1" in line
    monkeypatch.setenv("AUTOSHARD_TRACEBACK", "1")
    with pytest.raises(RuntimeError):
        run_command_line(["validate", "plan.json"])


def test_interrupt_is_quiet(call, monkeypatch):
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("autoshard.plan.load_plan", interrupt)
    assert call("validate", "plan.json") == (130, "", "")


def test_streams_and_codes_of_a_real_process(folder):
    done = in_process("plan", "tables.csv", *SHAPE, *FAST, "--json", "--out", "plan.json")
    assert done.returncode == 0
    assert done.stderr == "wrote plan.json\n"
    assert json.loads(done.stdout)["out"] == "plan.json"
    failed = in_process("plan", "nothing.csv", *SHAPE)
    assert failed.returncode == 2
    assert failed.stdout == ""
    assert failed.stderr.startswith("error: ")
    assert "Traceback" not in failed.stderr


def test_a_reader_that_leaves_gets_no_traceback(folder):
    # The pipe holds less than the plan, so that writing meets the closed end.
    arguments = ["plan", "workload:production?num_tables=300&seed=0&row_scale=0.001"]
    process = subprocess.Popen(
        [sys.executable, "-m", "autoshard.cli.main", *arguments, *SHAPE, *FAST, "--json"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    process.stdout.close()
    stderr = process.stderr.read()
    process.stderr.close()
    assert (process.wait(timeout=60), stderr) == (141, "")


@pytest.mark.skipif(not hasattr(signal, "SIGINT"), reason="needs POSIX signals")
def test_interrupt_of_a_real_process(folder):
    # A fifo that nobody writes to: the command waits in it until the signal comes.
    os.mkfifo("fifo.csv")
    process = subprocess.Popen(
        [sys.executable, "-m", "autoshard.cli.main", "plan", "fifo.csv", *SHAPE, *FAST],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    # Opening for writing returns once the command has opened it for reading.
    descriptor = os.open("fifo.csv", os.O_WRONLY)
    try:
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)
    finally:
        os.close(descriptor)
        process.kill()
    assert (process.returncode, out, err) == (130, "", "")


HIDE = """
    import sys

    HIDDEN = ("fbgemm_gpu", "gymnasium", "stable_baselines3", "sb3_contrib", "hydra", "wandb")

    class Hidden:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in HIDDEN:
                raise ModuleNotFoundError(f"No module named {name!r} (hidden)", name=name)

    sys.meta_path.insert(0, Hidden())
"""


def test_planning_needs_neither_kernels_nor_training_code(folder):
    (folder / "sitecustomize.py").write_text(textwrap.dedent(HIDE))
    environment = {**os.environ, "PYTHONPATH": str(folder)}
    probe = subprocess.run(
        [sys.executable, "-c", "import fbgemm_gpu"], env=environment, capture_output=True, text=True
    )
    assert "hidden" in probe.stderr  # or this test would test nothing
    # The defaults: the shipped cost model and the shipped policy.
    done = in_process(
        "plan", "tables.csv", *SHAPE, "--evaluations", "500", "--out", "plan.json", env=environment
    )
    assert (done.returncode, done.stderr) == (0, "wrote plan.json\n")
    done = in_process("run", "plan.json", "--steps", "1", env=environment)
    assert done.returncode == 2
    assert "fbgemm" in done.stderr
    assert "Traceback" not in done.stderr


def test_help_is_light(folder):
    code = (
        "import sys; from autoshard.cli.main import run_command_line; run_command_line(['--help']);"
        "sys.exit(sum(name in sys.modules for name in ('torch', 'numpy', 'pandas', 'fbgemm_gpu')))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert done.returncode == 0


def test_run_prints_measured_beside_predicted(call, monkeypatch):
    from autoshard.runtime import launch

    Path("small.csv").write_text(f"{HEADER}\na,50,8,2\nb,40,4,1\n")
    shape = ("--world-size", 1, "--hbm-gib", 1, "--batch-size", 4)
    call("plan", "small.csv", *shape, *FAST, "--out", "plan.json")
    results = []
    run_plan = launch.run_plan
    monkeypatch.setattr(
        launch, "run_plan", lambda *args, **kw: results.append(run_plan(*args, **kw)) or results[0]
    )
    code, out, _ = call("run", "plan.json", "--steps", 2, "--warmup", 1)
    assert code == 0
    assert "the plan says (predicted, extrapolated)" in out
    assert "this run (measured" in out
    monkeypatch.setattr(launch, "run_plan", lambda *_, **__: results[0])
    code, out, _ = call("run", "plan.json", "--json")
    value = json.loads(out)
    assert value["measured"]["cost"]["source"] == "measured"
    assert len(value["measured"]["losses"]) == 3
    assert value["predicted"]["source"] == "predicted"


def test_an_output_never_replaces_the_input_or_a_device(tmp_path, capsys):
    tables = tmp_path / "tables.csv"
    tables.write_text("name,num_embeddings,embedding_dim,pooling_factor\na,10,4,1\n")
    before = tables.read_text()
    for out in (str(tables), "/dev/null"):
        arguments = ["plan", str(tables), "--world-size", "1", "--hbm-gib", "1", "--out", out]
        code = run_command_line([*arguments, "--sharder", "random", "--cost-model", "analytic"])
        captured = capsys.readouterr()
        assert code == 2
        assert captured.err.startswith("error: ")
        assert captured.err.count("\n") == 1
    assert tables.read_text() == before
