"""The doctor reads versions and failures rightly; what it starts ends in time."""

from __future__ import annotations

import json
import sys

import pytest

from autoshard import doctor
from autoshard.cli.main import run_command_line
from autoshard.doctor import Finding, Status, check_version_pair, explain_fbgemm_load

SYMBOL = "OSError: /x/fbgemm_gpu_py.so: undefined symbol: _ZN3c10ltERKNS_6SymIntEi"


@pytest.mark.parametrize(
    ("torch", "fbgemm", "status"),
    [
        ("2.13.0+cpu", {"fbgemm-gpu-cpu": "1.8.0"}, Status.OK),
        ("2.13.1", {"fbgemm-gpu": "1.8.0+cu128"}, Status.OK),
        ("2.12.0", {"fbgemm-gpu-cpu": "1.8.0"}, Status.PROBLEM),
        ("2.13.0", {"fbgemm-gpu": "1.7.0"}, Status.PROBLEM),
        (None, {"fbgemm-gpu": "1.8.0"}, Status.PROBLEM),
        ("2.13.0", {"fbgemm-gpu": "1.8.0", "fbgemm-gpu-cpu": "1.8.0"}, Status.PROBLEM),
        ("2.13.0", {}, Status.ABSENT),
    ],
)
def test_version_pairs(torch, fbgemm, status):
    finding = check_version_pair(torch, fbgemm)
    assert finding.status is status
    assert (finding.remedy is None) is (status is Status.OK)


@pytest.mark.parametrize(
    ("status", "output", "words"),
    [
        (1, f"warning\n{SYMBOL}\n", "built against another torch release"),
        (1, "OSError: libcudart.so.12: cannot open shared object file", "no CUDA libraries"),
        (1, "ModuleNotFoundError: No module named 'x'\n", "No module named 'x'"),
        (-11, "", "killed by signal 11"),
        (None, "", "did not end in time"),
        (3, "", "no message"),
    ],
)
def test_loads_that_fail_are_explained(status, output, words):
    finding = explain_fbgemm_load(status, output)
    assert finding.status is Status.PROBLEM
    assert words in finding.detail
    assert finding.remedy


def test_load_that_works():
    assert explain_fbgemm_load(0, "noise").status is Status.OK


def test_only_planning_decides():
    def finding(status: Status, *, needed: bool) -> Finding:
        return Finding(name="x", status=status, detail="", needed_for_planning=needed)

    assert doctor.can_plan([finding(Status.PROBLEM, needed=False)])
    assert doctor.can_plan([finding(Status.OK, needed=True)])
    assert not doctor.can_plan([finding(Status.PROBLEM, needed=True)])


def test_processes_end_when_their_time_is_over():
    process = doctor._run_python("import time; time.sleep(600)")
    assert doctor._outcome(process, 0.2) == (None, "")
    assert process.poll() is not None


def test_output_of_processes_is_kept():
    process = doctor._run_python("import sys; print('out'); sys.exit('err')")
    status, output = doctor._outcome(process, 60)
    assert status == 1
    assert set(output.split()) == {"out", "err"}


def test_every_check_ends_and_problems_have_remedies():
    findings = doctor.diagnose(timeout_s=100)
    names = [finding.name for finding in findings]
    assert {"python", "torch", "fbgemm loads", "gloo", "cuda", "machine", "planning"} <= set(names)
    assert len(set(names)) == len(names)
    for finding in findings:
        assert finding.detail
        assert finding.remedy or finding.status is not Status.PROBLEM
    assert doctor.can_plan(findings)


@pytest.mark.parametrize(("works", "code"), [(True, 0), (False, 1)])
def test_command(monkeypatch, capsys, works, code):
    status = Status.OK if works else Status.PROBLEM
    findings = [
        Finding(name="odd", status=Status.PROBLEM, detail="is odd", remedy="make it even"),
        Finding(name="planning", status=status, detail="?", remedy="!", needed_for_planning=True),
    ]
    monkeypatch.setattr(doctor, "diagnose", lambda **_: findings)
    assert run_command_line(["doctor"]) == code
    assert "make it even" in capsys.readouterr().out
    assert run_command_line(["doctor", "--json"]) == code
    value = json.loads(capsys.readouterr().out)
    assert value["can_plan"] is works
    assert [finding["name"] for finding in value["findings"]] == ["odd", "planning"]


def test_a_broken_check_is_a_finding():
    def fail(_: str) -> str:
        raise RuntimeError("broken")

    finding = doctor._try("thing", fail, "")
    assert finding.status is Status.PROBLEM
    assert finding.detail == "RuntimeError: broken"
    assert finding.needed_for_planning
    assert finding.remedy


def test_python_is_this_one():
    assert doctor._check_python().detail.startswith(sys.version.split()[0])
