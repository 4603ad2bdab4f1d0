"""The HTML report: takeaways against figures worked out by hand, escaping, gaps in the data."""

import dataclasses
import json
import re
from html.parser import HTMLParser

import numpy as np
import pandas as pd
import pytest

from autoshard.errors import InputError
from autoshard.measure.schema import RowKind
from autoshard.memory import memory_ledger
from autoshard.objective import CostSource
from autoshard.report import figures, learning_figures
from autoshard.report.__main__ import main
from autoshard.report.measurement_section import measurement_section
from autoshard.report.model_sections import cost_model_section, learning_section
from autoshard.report.page import (
    ReportData,
    load_report_data,
    render_report,
    report_sections,
    write_report,
)
from autoshard.report.rank_section import rank_section
from autoshard.report.summary_section import summary_section
from autoshard.report.transfer_section import transfer_section
from autoshard.report.unseen_sections import evaluation_section
from autoshard.report.validation_section import validation_section
from autoshard.topology import Topology
from tests.report_cases import (
    HOSTILE,
    error_report,
    evaluation_rows,
    learning_lines,
    plan_with,
    transfer_rows,
    validation_rows,
    write_full_run,
    write_measurements,
)

SECTIONS = {
    "summary": summary_section,
    "measurements": measurement_section,
    "cost-model": cost_model_section,
    "learning": learning_section,
    "ranks": rank_section,
    "evaluation": evaluation_section,
    "transfer": transfer_section,
    "validation": validation_section,
}


def section(data, anchor):
    """One section alone; drawing all of them takes long."""
    return SECTIONS[anchor](data)


def headings(table):
    return [f"{c.title} {c.source}".strip() for c in table.columns]


@pytest.fixture(scope="module")
def full(tmp_path_factory):
    root = tmp_path_factory.mktemp("report") / "run"
    write_full_run(root)
    return load_report_data(root)


class Elements(HTMLParser):
    """Every tag with its attributes, and whether each is closed in order."""

    VOID = frozenset({"meta", "link", "br", "img", "input", "hr"})

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.texts = [], [], []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_startendtag(self, tag, attributes):
        self.tags.append((tag, dict(attributes)))

    def handle_data(self, text):
        self.texts.append(text)


def test_every_section_of_a_full_run_has_what_it_needs(full):
    parts = report_sections(full)
    assert [part.anchor for part in parts] == list(SECTIONS)
    for part in parts:
        assert not part.missing, part.anchor
        assert part.command.startswith("python -m experiments.")
        assert part.tables
        assert all(picture.alt for picture in part.pictures)
        assert part.pictures or part.anchor == "summary"
        for table in part.tables:
            assert {len(row) for row in table.rows} == {len(table.columns)}


def test_summary(full):
    part = section(full, "summary")
    # 9 + 1 + 1 + 1 ms predicted, 10 ms bound; run in 15 ms, and slow in 16 ms.
    assert part.takeaway == (
        "fast has the lowest predicted step time: 12.0 ms, 20.0% above the lower bound; "
        "it is also the fastest of 2 plans as measured, with 15.0 ms; "
        "stuck finds no plan that fits."
    )
    (table,) = part.tables
    assert headings(table)[1:3] == ["step, ms predicted", "step as run, ms measured"]
    assert table.rows == (
        ("fast", "12.0", "15.0", "20.0%", "9.1%", "0.500", ""),
        ("slow", "20.0", "16.0", "100.0%", "81.8%", "0.250", ""),
        ("stuck", "–", "–", "–", "–", "0.125", "infeasible"),
    )


def test_a_fastest_run_within_the_spread_of_others_is_told_as_such(full):
    passes = pd.concat(
        [
            full.validation.assign(run_pass=n, measured_ms=full.validation["measured_ms"] + n)
            for n in (0, 1, 2)
        ]
    )  # fast takes 15 to 17 ms, slow 16 to 18 ms
    takeaway = section(dataclasses.replace(full, validation=passes), "summary").takeaway
    assert "as measured, with 16.0 ms, though passes of 1 other plan were as fast" in takeaway


def test_sources_have_columns_of_their_own_and_extrapolation_claims_nothing():
    data = ReportData(
        folder="f",
        plans={
            "a": plan_with("a", (1.0, 2.0), extrapolated=True),
            "b": plan_with("b", (4.0, 2.0), source=CostSource.SIMULATED),
        },
    )
    part = section(data, "summary")
    assert "extrapolated" in part.takeaway
    assert "no gain is claimed" in part.takeaway
    assert "above the lower bound" not in part.takeaway
    (table,) = part.tables
    assert headings(table)[1:3] == ["step, ms predicted", "step, ms simulated"]
    assert [row[1:3] for row in table.rows] == [("5.00", "–"), ("–", "7.00")]
    ranks = section(data, "ranks")
    assert len(ranks.tables) == len(ranks.pictures) == 3  # one per source, and the memory


def test_a_plan_that_was_run_for_other_tables_is_not_shown_as_measured(full):
    rows = full.validation.assign(num_tables=99)
    (table,) = section(dataclasses.replace(full, validation=rows), "summary").tables
    assert "measured" not in " ".join(headings(table))


def test_plans_of_another_problem_are_left_out():
    plans = {
        "a": plan_with("a", (1.0, 2.0)),
        "b": plan_with("b", (4.0, 2.0)),
        "c": plan_with("c", (0.1, 0.1), num_tables=5),
    }
    part = section(ReportData(folder="f", plans=plans), "summary")
    assert [row[0] for row in part.tables[0].rows] == ["a", "b"]
    assert part.notes == ("Left out: 1 plan of other problems.",)


def test_measurements(full):
    part = section(full, "measurements")
    # Medians of 3% (forward) and 5% (backward) over alike rows.
    assert part.takeaway == (
        "6 shard sets and 4 all-to-alls were measured on Testchip (4 cores, 8 GiB); the "
        "medians' standard error is 4.0% for half of the kernels."
    )
    assert "Oversubscribed: 4 of 4 all-to-alls" in " ".join(part.notes)


def test_every_kind_of_collective_is_told_apart(full):
    alike = full.collectives.rows
    rows = pd.concat([alike, alike.assign(collective="all_reduce").iloc[:3]], ignore_index=True)
    part = section(
        dataclasses.replace(full, collectives=dataclasses.replace(full.collectives, rows=rows)),
        "measurements",
    )
    assert part.takeaway.startswith("6 shard sets, 4 all-to-alls and 3 all-reduces were measured")
    assert [row[:2] for row in part.tables[0].rows] == [
        ("kernels", "6"),
        ("all-to-alls", "4"),
        ("all-reduces", "3"),
    ]
    assert len(part.pictures) == 3
    assert "Measured transfer times of 3 all-reduces" in part.pictures[-1].alt


def test_cost_model(full):
    part = section(full, "cost-model")
    assert part.takeaway == (
        "On test tables, the network (additive) predicts compute time with a median relative "
        "error of 10.0%, better than the best baseline (linear, 20.0%); a second measurement "
        "differs from the first by 5.0%."
    )
    assert len(part.pictures) == 3  # bars, forward, backward
    worse = dataclasses.replace(full, errors=error_report(0.3, 0.2, None))
    assert "30.0%, no better than the best baseline" in section(worse, "cost-model").takeaway


def test_all_to_alls_held_out_come_before_those_trained_on(full):
    report = error_report(0.1, 0.2, None)
    (note,) = section(dataclasses.replace(full, errors=report), "cost-model").notes
    assert note == (
        "All-to-alls, median relative error: 20.0% on the 5 measurements that were trained on. "
        "None were held out."
    )
    report["collectives"] |= {"test": {"num": 2, "median": 0.4, "mean": 0.4}}
    (note,) = section(dataclasses.replace(full, errors=report), "cost-model").notes
    assert note == (
        "All-to-alls, median relative error: 40.0% on the 2 measurements that were held out and "
        "20.0% on the 5 measurements that were trained on."
    )
    unseen = {"without": {"num": 3, "median": 0.5}, "with": {"num": 3, "median": 0.1}}
    report["collectives"] |= {"left_out_world_sizes": {"4": unseen, "16": unseen}}
    notes = section(dataclasses.replace(full, errors=report), "cost-model").notes
    assert notes[1:] == (
        "A world size that is left out of training is predicted with a median relative error of "
        "50.0% instead of 10.0% at 4 ranks and 50.0% instead of 10.0% at 16 ranks.",
    )


def test_learning(full):
    part = section(full, "learning")
    assert part.takeaway == (
        "After 2 updates, the policy plans for 0.9000 times cost_greedy's step time on 8 tasks, "
        "which is lower, and better on 25% of them; untrained it was 1.5000."
    )
    (table,) = part.tables
    assert table.rows[0][1:6] == ("1.5000", "0.9000", "2", "0.9500", "3")


def test_several_training_seeds_are_told_together(tmp_path):
    for seed, best in enumerate((0.9, 1.1)):
        (tmp_path / f"agent-{seed}").mkdir()
        (tmp_path / f"agent-{seed}/metrics.jsonl").write_text(learning_lines([1.5, best]))
    part = section(load_report_data(tmp_path), "learning")
    # The mean of 0.9 and 1.1, and their standard deviation 0.2 / √2.
    assert part.takeaway.startswith(
        f"At their best validation, 2 policies plan for 1.0000 ± {0.2 / np.sqrt(2):.4f} times "
    )
    assert "the best of them (agent-0) plans for 0.9000 times" in part.takeaway
    assert "flatters" in " ".join(part.notes)


def test_a_run_that_only_got_worse_is_called_no_lower(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(learning_lines([1.25, 1.5]))
    takeaway = section(load_report_data(tmp_path), "learning").takeaway
    assert "After 0 updates" in takeaway
    assert "1.2500 times cost_greedy's step time on 8 tasks, which is no lower" in takeaway
    assert "untrained" not in takeaway


def test_ranks(full):
    part = section(full, "ranks")
    plan = full.plans["fast"]
    full_shares = [
        sum(ledger.lines_bytes.values()) / ledger.hbm_bytes
        for ledger in memory_ledger(plan.problem, plan.slices_by_rank())
    ]
    # Compute is (10, 9) and (18, 2): slowest over mean 10/9.5 and 18/10.
    assert part.takeaway == (
        "fast loads the 2 ranks most evenly: its slowest rank computes for 1.05 times the mean; "
        "with slow it is 1.80 times. No rank is fuller than "
        f"{max(full_shares):.1%} (rank {int(np.argmax(full_shares))} under fast)."
    )
    assert [row[5:7] for row in part.tables[0].rows] == [("1.053", "0"), ("1.800", "0")]


def test_one_rank_has_nothing_to_balance():
    data = ReportData(folder="f", plans={"a": plan_with("a", (5.0,))})
    assert "one rank" in section(data, "ranks").takeaway
    render_report(data)


def test_very_many_ranks_stay_readable():
    fwd_ms = tuple(float(n % 7 + 1) for n in range(200))
    data = ReportData(folder="f", plans={"a": plan_with("a", fwd_ms, num_tables=3)})
    costs, memory = section(data, "ranks").pictures
    assert "32 of 200 ranks, slowest first" in costs.svg
    assert "32 of 200 ranks, fullest first" in memory.svg
    assert max(len(costs.svg), len(memory.svg)) < 100_000


def test_memory_of_the_fullest_rank_is_told_beside_what_it_has():
    plan = plan_with("a", (1.0, 2.0))
    one_rank = (plan.topology.hbm_bytes[0], 1)  # the second rank has one byte only
    plan = dataclasses.replace(plan, topology=Topology(world_size=2, hbm_bytes=one_rank))
    part = section(ReportData(folder="f", plans={"a": plan}), "ranks")
    needed = memory_ledger(plan.problem, plan.slices_by_rank())[1].total_bytes
    name, rank, needs, has, share, _ = part.tables[-1].rows[0]
    assert (name, rank, has) == ("a", "1", "0.000")
    assert needs == f"{needed / 2**30:.3f}"
    assert share == f"{needed:.1%}"
    assert part.tables[-1].caption == "Memory, counted by the plan's ledger"


def test_evaluation(full):
    part = section(full, "evaluation")
    # fast halves both problems that it solves, so it is the best known there.
    assert part.takeaway == (
        "Over 3 problems (predicted costs), cost_greedy comes closest of those that solve most "
        "problems (58.74% above); fast is closer (0.00%), but only on the 2 of 3 that it solves; "
        "without a plan: fast 1."
    )
    fast, greedy = part.tables[0].rows
    assert fast[:7] == ("fast", "0.5000", "[0.5000, 0.5000]", "–", "0.00%", "0.0%", "1 of 3")
    # cost_greedy is at 2, 2, 1 times the best known, and at 2, 2, 4 times the bound of 1 ms.
    assert greedy[4:7] == (f"{4 ** (1 / 3) - 1:.2%}", f"{16 ** (1 / 3) - 1:.1%}", "0 of 3")


def test_training_seeds_are_averaged_before_the_interval_is_taken():
    frame = pd.concat(
        [
            evaluation_rows({"cost_greedy": [1.0, 1.0]}),
            evaluation_rows({"ppo": [0.5, 0.5]}, training_seed=0),
            evaluation_rows({"ppo": [2.0, 2.0]}, training_seed=1),
        ],
        ignore_index=True,
    )
    part = section(ReportData(folder="f", evaluation=frame), "evaluation")
    ppo = next(row for row in part.tables[0].rows if row[0] == "ppo")
    # 0.5 and 2 average to 1 in logarithms; their standard deviation is 1.5 / √2.
    assert ppo[1:4] == ("1.0000", "[1.0000, 1.0000]", f"±{1.5 / np.sqrt(2):.4f} (2)")
    assert "no difference" in part.takeaway


def test_extrapolated_ratios_claim_nothing():
    frame = evaluation_rows({"cost_greedy": [2.0, 2.0], "ppo": [1.0, 1.0]})
    frame.loc[frame["sharder"] == "ppo", "extrapolated"] = True
    part = section(ReportData(folder="f", evaluation=frame), "evaluation")
    assert "no gain is claimed" in part.takeaway
    assert part.tables[0].rows[0][-1] == "extrapolated (2)"


def test_a_gain_over_an_extrapolated_baseline_is_not_claimed():
    frame = evaluation_rows({"cost_greedy": [2.0, 2.0], "ppo": [1.0, 1.0]})
    frame.loc[frame["sharder"] == "cost_greedy", "extrapolated"] = True
    part = section(ReportData(folder="f", evaluation=frame), "evaluation")
    assert "0.5000 times the step time of cost_greedy on the 2 problems that both solve" in (
        part.takeaway
    )
    assert "no gain is claimed" in part.takeaway
    assert "which is better" not in part.takeaway


def test_a_sharder_that_solves_one_problem_of_twenty_does_not_win():
    frame = evaluation_rows(
        {"cost_greedy": [2.0] * 20, "lucky": [1.9, *[None] * 19], "steady": [1.95] * 20}
    )
    takeaway = section(ReportData(folder="f", evaluation=frame), "evaluation").takeaway
    assert takeaway.startswith("Over 20 problems (predicted costs), steady comes closest of those")
    assert "lucky is closer (0.00%), but only on the 1 of 20 that it solves" in takeaway


def test_evaluation_without_a_single_plan():
    frame = evaluation_rows({"cost_greedy": [None, None], "ppo": [None, None]})
    data = ReportData(folder="f", evaluation=frame)
    assert section(data, "evaluation").takeaway.endswith("no sharder finds a plan.")
    render_report(data)


def test_costs_of_two_sources_are_evaluated_apart():
    frame = pd.concat(
        [
            evaluation_rows({"cost_greedy": [1.0, 1.0], "ppo": [2.0, 2.0]}),
            evaluation_rows({"cost_greedy": [5.0, 5.0]}, source="simulated"),
        ]
    )
    part = section(ReportData(folder="f", evaluation=frame), "evaluation")
    assert [len(table.rows) for table in part.tables] == [2, 1]
    assert "predicted costs" in part.tables[0].caption
    assert "simulated costs" in part.tables[1].caption


def test_transfer(full):
    part = section(full, "transfer")
    assert part.takeaway == (
        "Of 2 settings, the policy is better than cost_greedy in 1 and worse in 0; the rest shows "
        "no clear difference. Ratios go from 0.5000 (20 tables, trained on fast) to 2.0000 "
        "(4 ranks, trained on fast); it finds no plan in 1 attempt."
    )
    svg = part.pictures[0].svg
    assert ">0.500<" in svg
    assert ">2.000<" in svg
    assert part.tables[0].rows[1] == ("fast", "4 ranks", "2.0000", "–", "1", "1 of 2")


def test_more_training_seeds_do_not_make_more_problems():
    one = transfer_rows({("a", "b"): [0.8, 1.1, 0.9, 1.15]})
    five = pd.concat([one.assign(training_seed=seed) for seed in range(5)], ignore_index=True)
    (row,) = section(ReportData(folder="f", transfer=one), "transfer").tables[0].rows
    (pooled,) = section(ReportData(folder="f", transfer=five), "transfer").tables[0].rows
    assert pooled[:5] == row[:5]
    assert (row[5], pooled[5]) == ("0 of 4", "0 of 20")


def test_sharders_of_a_transfer_are_never_averaged():
    rows = transfer_rows({("a", "b"): [0.5, 0.5]})
    both = pd.concat(
        [rows, rows.assign(sharder="random", ratio_to_cost_greedy=2.0)], ignore_index=True
    )
    (table,) = section(ReportData(folder="f", transfer=both), "transfer").tables
    assert [row[:3] for row in table.rows] == [
        ("a (ppo)", "b", "0.5000"),
        ("a (random)", "b", "2.0000"),
    ]


def test_a_ratio_below_one_within_its_interval_is_no_gain():
    rows = transfer_rows({("a", "b"): [0.7, 1.39, 1.0, 1.0]})
    assert section(ReportData(folder="f", transfer=rows), "transfer").takeaway == (
        "Of 1 setting, the policy is better than cost_greedy in 0 and worse in 0; the rest shows "
        "no clear difference (ratio 0.9932)."
    )


def test_transfer_where_nothing_was_solved():
    data = ReportData(folder="f", transfer=transfer_rows({("a", "b"): [None, None]}))
    assert section(data, "transfer").missing
    render_report(data)


def test_validation(full):
    part = section(full, "validation")
    # Errors of 3, 4 and 3 ms; 3/15, 4/16 and 3/33 of the measurement; one order in all three.
    assert part.takeaway == (
        "Over 3 plans, the predicted step time is off by 3.00 ms (20.0%) in the median and by "
        "4.00 ms at most; Kendall's tau of the order is 1.00 [1.00, 1.00]."
    )
    assert headings(part.tables[0])[3:5] == ["step, ms predicted", "step, ms measured"]
    assert part.tables[0].rows[1][3:8] == ("20.0", "16.0", "16.0 – 16.0", "4.00", "+25.0%")


def test_passes_are_joined_and_marks_are_kept():
    frame = validation_rows(
        plan=["p", "p", "p", "q"],
        sharder=["a", "a", "a", "b"],
        predicted_ms=[10.0, 10.0, 10.0, 8.0],
        measured_ms=[9.0, 12.0, 11.0, np.nan],
        oversubscribed=[True, True, True, False],
    )
    part = section(ReportData(folder="f", validation=frame), "validation")
    assert [row[3:6] for row in part.tables[0].rows] == [("10.0", "11.0", "9.00 – 12.0")]
    assert part.tables[0].rows[0][-1] == "oversubscribed"
    assert any("more ranks than cores" in note for note in part.notes)
    assert "tau" not in part.takeaway


def test_a_simulated_step_is_not_called_predicted():
    plan = plan_with("a", (1.0, 2.0), source=CostSource.SIMULATED)
    frame = validation_rows(plan=["x/a.json"], sharder=["a"], predicted_ms=[5.0], measured_ms=[4.0])
    part = section(ReportData(folder="f", plans={"a": plan}, validation=frame), "validation")
    assert "the simulated step time is off by 1.00 ms" in part.takeaway
    assert headings(part.tables[0])[3] == "step, ms simulated"


def test_the_source_that_a_run_records_is_believed_without_its_plan():
    rows = validation_rows(
        plan=["a.json", "b.json"],
        sharder=["a", "b"],
        predicted_ms=[5.0, 6.0],
        measured_ms=[5.0, 6.0],
        source=["simulated", "predicted"],
    )
    part = section(ReportData(folder="f", validation=rows), "validation")
    assert [row[3:5] for row in part.tables[0].rows] == [("–", "5.00"), ("6.00", "–")]


def test_an_empty_folder_gives_a_page_of_commands(tmp_path):
    data = load_report_data(tmp_path)
    parts = report_sections(data)
    assert all(part.missing for part in parts)
    page = render_report(data)
    assert page.count("Add it with") == len(parts)
    for name in ("measure", "train_cost_net", "train_agent", "plan", "evaluate", "run_plan"):
        assert f"python -m experiments.{name} " in page


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(ReportData)])
def test_any_part_may_be_missing(full, field, monkeypatch):
    for module in (figures, learning_figures):
        monkeypatch.setattr(module, "render", lambda figure, key: "<svg></svg>")
    empty = getattr(ReportData(folder=full.folder), field)
    for part in report_sections(dataclasses.replace(full, **{field: empty})):
        assert part.takeaway


def test_the_page_is_whole_loads_nothing_and_repeats(full, tmp_path):
    page = render_report(full)
    elements = Elements(page)
    assert elements.open == []
    ids = [a["id"] for _, a in elements.tags if "id" in a]
    assert len(ids) == len(set(ids))
    assert not {tag for tag, _ in elements.tags} & {"script", "link", "img", "iframe", "object"}
    for _, attributes in elements.tags:
        assert "src" not in attributes
        for name in ("href", "xlink:href"):
            assert attributes.get(name, "#").startswith("#")
    assert not re.search(r"@import|url\((?!#)", page)
    # References inside of pictures lead somewhere.
    wanted = re.findall(r"url\(#([^)]+)\)", page)
    wanted += [a["href"][1:] for _, a in elements.tags if "href" in a]
    assert set(wanted) <= set(ids)
    write_report(tmp_path / "a.html", full)
    assert (tmp_path / "a.html").read_text(encoding="utf-8") == page


def test_hostile_names_are_shown_and_not_run(tmp_path):
    root = tmp_path / "run <b>"
    write_full_run(root, HOSTILE)
    page = render_report(load_report_data(root))
    elements = Elements(page)
    assert elements.open == []
    assert "script" not in {tag for tag, _ in elements.tags}
    assert "b" not in {tag for tag, _ in elements.tags}
    assert any(HOSTILE in text for text in elements.texts)


def test_top_level_files_of_single_experiments(tmp_path):
    write_measurements(tmp_path / "kernels.parquet", RowKind.KERNELS, 3)
    (tmp_path / "errors.json").write_text(json.dumps(error_report(0.1, 0.2, None)))
    plan_with("a", (1.0, 2.0)).save(tmp_path / "a.json")
    data = load_report_data(tmp_path)
    assert len(data.kernels.rows) == 3
    assert data.errors["network"] == "network (additive)"
    assert list(data.plans) == ["a"]


def test_parts_of_an_unfinished_measurement_count(tmp_path):
    write_measurements(tmp_path / "measurements/kernels/part-000000.parquet", RowKind.KERNELS, 2)
    write_measurements(tmp_path / "measurements/kernels/part-000001.parquet", RowKind.KERNELS, 3)
    assert len(load_report_data(tmp_path).kernels.rows) == 5


def test_a_last_line_cut_off_by_a_kill_is_ignored(tmp_path):
    (tmp_path / "metrics.jsonl").write_text(learning_lines([1.5, 1.0]) + '{"update": 2, "num')
    assert len(load_report_data(tmp_path).learning["agent"]) == 2


DAMAGED = {
    "measurements/kernels.parquet": b"PAR1 torn",
    "measurements/collectives.parquet": b"",
    "cost_net/errors.json": b'{"network": "a"}',
    "cost_net/predictions.parquet": b"PAR1 torn",
    "agent/metrics.jsonl": b'{"update": 1}\n{"upd\n',
    "plans/metrics.jsonl": b"[1]\n",
    "plans/slow.json": b'{"version": 1}',
    "runs/validation.parquet": b"torn",
    "evaluation/evaluation.parquet": b"torn",
    "transfer/transfer.parquet": b"torn",
}


@pytest.mark.parametrize("name", DAMAGED)
def test_a_damaged_file_is_named(tmp_path, name, capsys):
    path = tmp_path / name
    path.parent.mkdir(parents=True)
    path.write_bytes(DAMAGED[name])
    with pytest.raises(InputError, match=re.escape(str(path))):
        load_report_data(tmp_path)
    assert main([str(tmp_path), "--out", str(tmp_path / "r.html")]) == 2
    assert str(path) in capsys.readouterr().err
    assert not (tmp_path / "r.html").exists()


def test_columns_that_are_missing_or_no_numbers_are_named(tmp_path):
    (tmp_path / "transfer").mkdir()
    frame = transfer_rows({("a", "b"): [1.0]})
    path = tmp_path / "transfer/transfer.parquet"
    frame.drop(columns="infeasible").to_parquet(path)
    with pytest.raises(InputError, match=r"lacks columns; got: infeasible"):
        load_report_data(tmp_path)
    frame.assign(ratio_to_cost_greedy="much").to_parquet(path)
    with pytest.raises(InputError, match="'ratio_to_cost_greedy' does not hold numbers"):
        load_report_data(tmp_path)


def test_the_command_writes_the_page(full, tmp_path, capsys):
    out = tmp_path / "report.html"
    assert main([full.folder, "--out", str(out)]) == 0
    assert out.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert capsys.readouterr().out.strip() == str(out)


def test_a_page_in_a_folder_that_does_not_exist_is_refused(full, tmp_path, capsys):
    assert main([full.folder, "--out", str(tmp_path / "no" / "report.html")]) == 2
    assert "no does not exist" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()


def test_a_folder_that_does_not_exist_is_refused(tmp_path, capsys):
    assert main([str(tmp_path / "nowhere")]) == 2
    assert "nowhere does not exist" in capsys.readouterr().err
