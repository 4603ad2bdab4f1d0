"""Whether this machine can hold what a plan puts on its ranks.

A plan's topology says what memory its ranks have; the machine that runs it may be another
one. What does not fit would be killed by the kernel, without a word, in the middle of
building.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from autoshard.errors import InfeasibleError
from autoshard.memory import RankLedger
from autoshard.topology import GIB

_MEMINFO = Path("/proc/meminfo")
_CGROUPS_OF_PROCESS = Path("/proc/self/cgroup")
#: Per controllers of a line there: the mounted hierarchy, the limit's file, the usage's.
_CGROUP_FILES: dict[str, tuple[Path, str, str]] = {
    "": (Path("/sys/fs/cgroup"), "memory.max", "memory.current"),
    "memory": (
        Path("/sys/fs/cgroup/memory"),
        "memory.limit_in_bytes",
        "memory.usage_in_bytes",
    ),
}


def available_bytes() -> int | None:
    """Memory that new processes can get on this machine.

    Returns:
        What is free or can be freed, within the limits of the process's control groups;
        None where the system does not tell.
    """
    known = [value for value in (_free_bytes(), _cgroup_bytes()) if value is not None]
    return min(known, default=None)


def check_host_memory(ledgers: Iterable[RankLedger], available: int | None = None) -> None:
    """Refuse tables that this machine cannot hold, before anything is allocated.

    Args:
        ledgers: of the ranks that run on this machine.
        available: bytes; by default `available_bytes()`.

    Raises:
        InfeasibleError: weights and optimizer states of these ranks together are larger than
            the memory that is available.
    """
    if available is None:
        available = available_bytes()
    if available is None:
        return
    ledgers = list(ledgers)
    needed = {
        ledger.rank: ledger.lines_bytes["weights"] + ledger.lines_bytes["optimizer_state"]
        for ledger in ledgers
    }
    total = sum(needed.values())
    if total > available:
        largest = max(needed, key=lambda rank: needed[rank])
        raise InfeasibleError(
            f"this machine cannot hold the tables of its {len(ledgers)} ranks",
            got=f"{total} bytes ({total / GIB:.3f} GiB) of weights and optimizer states, "
            f"{needed[largest]} of them on rank {largest}",
            allowed=f"{available} bytes ({available / GIB:.3f} GiB) are available",
            remedy="use machines with more memory or more machines, fewer rows, or the "
            "optimizer sgd, which keeps no state",
        )


def _free_bytes() -> int | None:
    try:
        lines = _MEMINFO.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    for line in lines:
        name, _, value = line.partition(":")
        if name == "MemAvailable":
            return int(value.split()[0]) * 1024
    return None


def _cgroup_bytes() -> int | None:
    """The least that a limit of this process's control groups leaves; None without any."""
    try:
        lines = _CGROUPS_OF_PROCESS.read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    left = []
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):  # "" is version 2, which has one hierarchy
            root, *names = _CGROUP_FILES[controllers]
            # Inside a container, the path may be the host's; the root is then the container's.
            groups = [root, *(root / part for part in _ancestors(path))]
            left += [_left_in(group, *names) for group in groups]
    return min((value for value in left if value is not None), default=None)


def _ancestors(path: str) -> list[str]:
    names = [name for name in path.split("/") if name]
    return ["/".join(names[: end + 1]) for end in range(len(names))]


def _left_in(group: Path, limit_file: str, usage_file: str) -> int | None:
    """The limit less what is used, files that can be dropped not counted."""
    try:
        limit = int((group / limit_file).read_text(encoding="ascii"))
        used = int((group / usage_file).read_text(encoding="ascii"))
        statistics = (group / "memory.stat").read_text(encoding="ascii")
    except (OSError, ValueError):  # not there, or "max"
        return None
    fields = dict(line.split(maxsplit=1) for line in statistics.splitlines())
    droppable = int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    return max(0, limit - used + droppable)
