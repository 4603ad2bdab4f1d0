"""The plans in docs/plan_format.md work as they stand, and the page leaves no key out."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from pathlib import Path

import pytest

from autoshard.cli.main import run_command_line
from autoshard.distributions import IdDistribution
from autoshard.errors import PlanError
from autoshard.objective import CostSource, StepCost
from autoshard.plan import PlanCost, ShardingPlan, load_plan, plan_from_json
from autoshard.problem import Optimizer, TrainingConfig
from autoshard.shards import Shard, ShardingType
from autoshard.tables import BagLengths, DataType, PoolingType, Table
from autoshard.topology import Topology

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "plan_format.md").read_text(encoding="utf-8")
PLANS = re.findall(r"^```json\n(.*?)^```", PAGE, re.M | re.S)


@pytest.fixture(params=range(2), ids=["minimal", "every sharding type"])
def plan(request, tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "by_hand.json"
    path.write_text(PLANS[request.param], encoding="utf-8")
    return path


def test_the_page_has_two_plans_and_the_second_every_sharding_type() -> None:
    assert len(PLANS) == 2
    kinds = {entry["sharding_type"] for entry in json.loads(PLANS[1])["tables"]}
    assert kinds == {kind.value for kind in ShardingType}


def test_a_plan_from_the_page_is_validated_explained_and_exported(plan: Path, capsys) -> None:
    assert run_command_line(["validate", str(plan)]) == 0
    assert f"{plan} is valid" in capsys.readouterr().out
    explain = ["explain", str(plan), "--cost-model", "analytic"]
    assert run_command_line([*explain, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["cost"]["step_ms"] > 0
    assert run_command_line([*explain, "--replan", "--sharder", "cost_greedy"]) == 0
    capsys.readouterr()
    assert run_command_line(["export", str(plan), "--out", "plan.json"]) == 0
    assert load_plan("plan.json") == load_plan(plan)


def test_a_plan_from_the_page_runs(tmp_path, capsys) -> None:
    pytest.importorskip("fbgemm_gpu", reason="running a plan needs FBGEMM")
    path = tmp_path / "by_hand.json"
    path.write_text(PLANS[0], encoding="utf-8")
    assert run_command_line(["run", str(path), "--steps", "2", "--warmup", "1", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["measured"]["losses"]) == 3


#: Where the object that a section describes stands in a plan.
PLACES = {
    "The file": (),
    "`topology`": ("topology",),
    "`workload`": ("workload",),
    "A table": ("tables", 0),
    "`cost`": ("cost",),
}


def rows_of(section: str) -> list[tuple[str, bool]]:
    """(key, whether it is needed) of each row of a section's table."""
    text = re.split(r"^#+ ", PAGE.partition(f"# {section}\n")[2], flags=re.M)[0]
    rows = re.findall(r"^\| (`.*?`) \| (yes|no) \|", text, re.M)
    return [(key, needed == "yes") for keys, needed in rows for key in re.findall(r"`(\w+)`", keys)]


@pytest.mark.parametrize(
    ("section", "key", "needed"),
    [(section, *row) for section in PLACES for row in rows_of(section)],
)
def test_keys_are_needed_where_the_page_says_so(section: str, key: str, needed: bool) -> None:
    plan = plan_from_json(json.loads(PLANS[0]))
    step = StepCost(
        source=CostSource.PREDICTED,
        fwd_compute_ms=(1.0, 2.0), bwd_compute_ms=(1.0, 2.0), fwd_comms_ms=1.0, bwd_comms_ms=1.0,
    )  # fmt: skip
    value = plan.with_cost(PlanCost(step=step, lower_bound_ms=1.0, best_known_ms=6.0)).to_json()
    value["checksum"] = None  # so that what is left out is not an alteration
    place = value
    for name in PLACES[section]:
        place = place[name]
    del place[key]
    if needed:
        with pytest.raises(PlanError, match=key):
            plan_from_json(value)
    else:
        assert [e.shards for e in plan_from_json(value).tables] == [e.shards for e in plan.tables]


def test_every_section_with_a_table_was_found() -> None:
    assert all(len(rows_of(section)) >= 4 for section in PLACES)


def keys() -> dict[str, set[str]]:
    """What the code knows, apart from the page."""

    def names(*kinds: type) -> set[str]:
        return {field.name for kind in kinds for field in dataclasses.fields(kind)}

    def values(*kinds: type) -> set[str]:
        return {member.value for kind in kinds for member in kind}

    inside = {"training", "step", "table", "ids"}  # written out as `workload` and by key
    return {
        "plan": (names(ShardingPlan) - inside) | {"version", "workload", "checksum"},
        "topology": names(Topology),
        "workload": names(TrainingConfig) | {"ids"},
        "ids": names(IdDistribution),
        "table": (names(Table) - inside) | {"sharding_type", "compute_kernel", "shards"},
        "shard": names(Shard),
        "cost": (names(StepCost, PlanCost) - inside) | {"step_ms"},
        "values": values(ShardingType, Optimizer, DataType, PoolingType, BagLengths, CostSource),
    }


@pytest.mark.parametrize("part", keys())
def test_the_page_names_every_key_and_value(part: str) -> None:
    prose = re.sub(r"^```.*?^```", "", PAGE, flags=re.M | re.S)
    named = set(re.findall(r"`(\w+)`", prose)) | set(re.findall(r'"(\w+)":', prose))
    assert keys()[part] <= named


def test_the_checksum_is_what_the_page_says(plan: Path) -> None:
    """Worked out here from the words on the page alone."""
    value = load_plan(plan).to_json()
    body = {key: item for key, item in value.items() if key not in ("provenance", "checksum")}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    assert value["checksum"] == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_the_readme_leads_to_the_page() -> None:
    assert "(docs/plan_format.md)" in (ROOT / "README.md").read_text(encoding="utf-8")
