"""Says whether this installation can plan, run and train, and how to mend what cannot.

Everything that might crash or hang (loading FBGEMM, starting gloo) is tried in processes
of its own with a time limit. Nothing here touches a network beyond the loopback device.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any

#: FBGEMM releases by the torch release that they are built against.
KNOWN_GOOD_PAIRS = (("2.13", "1.8"),)
FBGEMM_PACKAGES = ("fbgemm-gpu-cpu", "fbgemm-gpu")
#: (package, what needs it).
PACKAGES = (
    ("autoshard", "everything"),
    ("torch", "the learned policy and cost model; running"),
    ("numpy", "everything"),
    *((package, "running and measuring") for package in FBGEMM_PACKAGES),
    ("torchrec", "plans for TorchRec"),
    ("gymnasium", "training"),
    ("stable-baselines3", "training"),
    ("sb3-contrib", "training"),
    ("hydra-core", "experiments"),
    ("wandb", "logging to Weights & Biases, if asked for"),
)
_REINSTALL = (
    "pip install torch==2.13.0 fbgemm-gpu-cpu==1.8.0 (CPU) or fbgemm-gpu==1.8.0 (CUDA); "
    "not both FBGEMM packages"
)

_LOAD_FBGEMM = """
import torch, fbgemm_gpu
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    SplitTableBatchedEmbeddingBagsCodegen)
total = torch.ops.fbgemm.asynchronous_complete_cumsum(torch.tensor([1, 2]))
assert total.tolist() == [0, 1, 3], total
"""
_GLOO_RANK = """
import datetime, sys, torch, torch.distributed as dist
rank, store, limit = int(sys.argv[1]), sys.argv[2], float(sys.argv[3])
dist.init_process_group("gloo", init_method="file://" + store, rank=rank, world_size=2,
                        timeout=datetime.timedelta(seconds=limit))
value = torch.tensor([rank + 1.0])
dist.all_reduce(value)
assert value.item() == 3.0, value
dist.destroy_process_group()
"""


class Status(Enum):
    """How a check came out."""

    OK = "ok"
    ABSENT = "absent"
    """Not installed, and not needed for planning."""
    PROBLEM = "problem"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One check."""

    name: str
    status: Status
    detail: str
    remedy: str | None = None
    """What to do about it; given for every problem."""
    needed_for_planning: bool = False

    def to_json(self) -> dict[str, Any]:
        """The finding as a plain dictionary."""
        return {
            "name": self.name,
            "status": self.status.value,
            "detail": self.detail,
            "remedy": self.remedy,
            "needed_for_planning": self.needed_for_planning,
        }


def diagnose(*, timeout_s: float = 120.0) -> list[Finding]:
    """Run every check.

    Args:
        timeout_s: limit of each check that runs in processes of its own.
    """
    return [
        _check_python(),
        *_check_packages(),
        check_version_pair(installed_version("torch"), _installed_fbgemm()),
        _check_fbgemm_loads(timeout_s),
        _check_machine(),
        _check_cuda(timeout_s),
        _check_gloo(timeout_s),
        *_check_artifacts(),
        _check_planning(),
    ]


def can_plan(findings: list[Finding]) -> bool:
    """Whether nothing that planning needs is broken."""
    return not any(f.needed_for_planning and f.status is Status.PROBLEM for f in findings)


def installed_version(package: str) -> str | None:
    """The installed version of a package, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _installed_fbgemm() -> dict[str, str]:
    found = {package: installed_version(package) for package in FBGEMM_PACKAGES}
    return {package: version for package, version in found.items() if version is not None}


def _check_python() -> Finding:
    good = sys.version_info[:2] == (3, 11)
    return Finding(
        name="python",
        status=Status.OK if good else Status.PROBLEM,
        detail=f"{platform.python_version()} on {platform.system()} {platform.machine()}",
        remedy=None if good else "use Python 3.11, which this release is made for",
    )


def _check_packages() -> list[Finding]:
    findings = []
    for package, purpose in PACKAGES:
        version = installed_version(package)
        needed = purpose == "everything"
        missing = Status.PROBLEM if needed else Status.ABSENT
        findings.append(
            Finding(
                name=package,
                status=Status.OK if version else missing,
                detail=version or f"not installed; needed for {purpose}",
                remedy=f"pip install {package}" if needed and not version else None,
                needed_for_planning=needed,
            )
        )
    return findings


def check_version_pair(torch_version: str | None, fbgemm: dict[str, str]) -> Finding:
    """Whether torch and FBGEMM are of releases that were built for each other.

    Args:
        torch_version: such as "2.13.0+cpu"; None if not installed.
        fbgemm: version by package of `FBGEMM_PACKAGES`, installed ones only.
    """
    name = "torch and fbgemm versions"
    if not fbgemm:
        return Finding(
            name=name,
            status=Status.ABSENT,
            detail="no FBGEMM: planning works, running and measuring do not",
            remedy=_REINSTALL,
        )
    if len(fbgemm) > 1:
        return Finding(
            name=name,
            status=Status.PROBLEM,
            detail="fbgemm-gpu and fbgemm-gpu-cpu are both installed; they overwrite each other",
            remedy="pip uninstall -y fbgemm-gpu fbgemm-gpu-cpu, then install one of them",
        )
    ((package, version),) = fbgemm.items()
    pair = (_minor(torch_version or "none"), _minor(version))
    detail = f"torch {torch_version} with {package} {version}"
    if pair in KNOWN_GOOD_PAIRS:
        return Finding(name=name, status=Status.OK, detail=f"{detail}: known to go together")
    known = ", ".join(f"torch {torch}.x with fbgemm {fb}.x" for torch, fb in KNOWN_GOOD_PAIRS)
    return Finding(
        name=name,
        status=Status.PROBLEM,
        detail=f"{detail}: not a pair known to go together ({known})",
        remedy=_REINSTALL,
    )


def _minor(version: str) -> str:
    return ".".join(version.split("+")[0].split(".")[:2])


def _run_python(code: str, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, *arguments],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
    )


def _outcome(process: subprocess.Popen[str], timeout_s: float) -> tuple[int | None, str]:
    """Exit status (None if the time ran out) and output of a process, which is then gone."""
    try:
        output, _ = process.communicate(timeout=timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return None, ""
    finally:
        if process.poll() is None:  # an interrupt; leave nothing running
            process.kill()
            process.wait()
    return process.returncode, output


def _check_fbgemm_loads(timeout_s: float) -> Finding:
    if not _installed_fbgemm():
        return Finding(name="fbgemm loads", status=Status.ABSENT, detail="not installed")
    return explain_fbgemm_load(*_outcome(_run_python(_LOAD_FBGEMM), timeout_s))


def explain_fbgemm_load(status: int | None, output: str) -> Finding:
    """What an attempt to load FBGEMM says.

    Args:
        status: the exit status; None if it did not end in time.
        output: all that it printed.
    """
    name = "fbgemm loads"
    if status == 0:
        return Finding(name=name, status=Status.OK, detail="kernels load and run")
    if status is None:
        return Finding(
            name=name,
            status=Status.PROBLEM,
            detail="loading did not end in time",
            remedy="try again on a less busy machine, or reinstall: " + _REINSTALL,
        )
    if "undefined symbol" in output:
        line = next(line for line in output.splitlines() if "undefined symbol" in line)
        return Finding(
            name=name,
            status=Status.PROBLEM,
            detail="FBGEMM was built against another torch release than the installed one "
            f"({line.strip()[:160]})",
            remedy=_REINSTALL,
        )
    if "libcuda" in output or "libcudart" in output or "libnvrtc" in output:
        return Finding(
            name=name,
            status=Status.PROBLEM,
            detail=f"the CUDA build of FBGEMM finds no CUDA libraries ({_last_line(output)})",
            remedy="install fbgemm-gpu-cpu instead of fbgemm-gpu on a machine without CUDA",
        )
    how = f"killed by signal {-status}" if status < 0 else _last_line(output)
    return Finding(name=name, status=Status.PROBLEM, detail=how, remedy=_REINSTALL)


def _last_line(output: str) -> str:
    lines = output.strip().splitlines()
    return lines[-1][:200] if lines else "no message"


def _check_machine() -> Finding:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    detail = f"{cores} cores"
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        detail += f", {total / 2**30:.1f} GiB memory"
    except (ValueError, OSError, AttributeError):
        detail += ", memory size not known"
    free = shutil.disk_usage(tempfile.gettempdir()).free
    detail += f", {free / 2**30:.1f} GiB free in {tempfile.gettempdir()}"
    return Finding(name="machine", status=Status.OK, detail=detail)


def _check_cuda(timeout_s: float) -> Finding:
    code = (
        "import torch\n"
        "print(';'.join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))"
        " if torch.cuda.is_available() else '')"
    )
    status, output = _outcome(_run_python(code), timeout_s)
    if status != 0:
        return Finding(
            name="cuda",
            status=Status.PROBLEM,
            detail="torch does not load" if status is not None else "did not answer in time",
            remedy=_REINSTALL,
        )
    devices = _last_line(output) if output.strip() else ""
    return Finding(
        name="cuda",
        status=Status.OK if devices else Status.ABSENT,
        detail=devices or "no CUDA device; plans run on the CPU",
    )


def _check_gloo(timeout_s: float) -> Finding:
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        processes = [_run_python(_GLOO_RANK, str(r), store, str(timeout_s)) for r in range(2)]
        try:
            outcomes = [_outcome(process, timeout_s) for process in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
    failed = [outcome for outcome in outcomes if outcome[0] != 0]
    if not failed:
        return Finding(
            name="gloo", status=Status.OK, detail="two processes exchanged a number on loopback"
        )
    status, output = failed[0]
    return Finding(
        name="gloo",
        status=Status.PROBLEM,
        detail="did not end in time" if status is None else _last_line(output),
        remedy="set GLOO_SOCKET_IFNAME=lo, and see that the host name resolves and no firewall "
        "blocks loopback",
    )


def _check_artifacts() -> list[Finding]:
    from autoshard.artifact_files import shipped_names

    findings = []
    for folder, what, load in (
        ("cost_models", "cost model", _load_cost_model),
        ("policies", "policy", _load_policy),
    ):
        names = shipped_names(folder)
        if "default" not in names:
            findings.append(
                Finding(
                    name=f"{what} 'default'",
                    status=Status.PROBLEM,
                    detail="not shipped with this installation",
                    remedy="reinstall autoshard, or name a trained one with "
                    f"--{what.replace(' ', '-')}",
                    needed_for_planning=True,
                )
            )
        findings.extend(_try(f"{what} {name!r}", load, name) for name in names)
    return findings


def _load_cost_model(name: str) -> str:
    from autoshard.cost_models.exported import load_cost_model

    return f"loads, fingerprint {load_cost_model(name).fingerprint}"


def _load_policy(name: str) -> str:
    from autoshard.policies import load_policy

    return f"loads, fingerprint {load_policy(name).fingerprint}"


def _plan_something() -> str:
    from autoshard.cost_models.analytic import AnalyticCostModel
    from autoshard.planning import make_plan
    from autoshard.problem import ShardingProblem, TrainingConfig
    from autoshard.tables import Table
    from autoshard.topology import GIB, Topology

    tables = tuple(
        Table(name=f"t{i}", num_embeddings=1000 * (i + 1), embedding_dim=16, pooling_factor=2)
        for i in range(4)
    )
    problem = ShardingProblem(
        tables=tables,
        topology=Topology.uniform(2, GIB),
        training=TrainingConfig(batch_size=64),
    )
    plan = make_plan(problem, sharder="cost_greedy", cost_model=AnalyticCostModel())
    return f"planned {len(plan.tables)} tables on {plan.topology.world_size} ranks"


def _check_planning() -> Finding:
    return _try("planning", lambda _: _plan_something(), "")


def _try(name: str, attempt: Callable[[str], str], argument: str) -> Finding:
    """A check that planning needs: what it says, or the error that it raised."""
    try:
        return Finding(
            name=name, status=Status.OK, detail=attempt(argument), needed_for_planning=True
        )
    except Exception as error:
        return Finding(
            name=name,
            status=Status.PROBLEM,
            detail=f"{type(error).__name__}: {str(error)[:300]}",
            remedy=getattr(error, "remedy", None) or "reinstall autoshard and torch",
            needed_for_planning=True,
        )
