"""Which hardware and software a measurement holds for.

Timings of different machines or library versions must never be mixed unnoticed, so
every row carries two fingerprints, and every file the descriptions behind them. Host
names, processes and users are no part of either: two equal machines are one.
"""

from __future__ import annotations

import os
import platform
import subprocess
from dataclasses import dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from autoshard.files import fingerprint
from autoshard.topology import GIB

#: Swept to empty the caches where the size of the last one is unknown.
DEFAULT_LAST_LEVEL_CACHE_BYTES = 64 * 2**20
#: CPU extensions that FBGEMM's kernels choose their code by.
_VECTOR_FLAGS = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512vl", "avx512_bf16")
_PACKAGES = ("torch", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy", "autoshard")
_CPU_ROOT = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, kw_only=True)
class Environment:
    """The machine and the libraries of one process."""

    hardware: dict[str, Any]
    """CPU model, cores, caches, memory and GPUs."""
    software: dict[str, Any]
    """Versions, and threads per process."""
    commit: str | None = None
    """Of the checkout, where there is one; told, but no part of a fingerprint."""

    @property
    def hardware_fingerprint(self) -> str:
        """Identifies the kind of machine."""
        return fingerprint(self.hardware)

    @property
    def software_fingerprint(self) -> str:
        """Identifies the versions and settings."""
        return fingerprint(self.software)


@lru_cache(maxsize=4)
def describe_environment(threads: int = 1) -> Environment:
    """Describe this machine and this Python.

    Args:
        threads: that each measuring process computes with.
    """
    return Environment(
        hardware={
            "machine": platform.machine(),
            "cpu": _cpu_model(),
            "vector_flags": _vector_flags(),
            "cores": os.cpu_count() or 1,
            "caches": cache_sizes(),
            "memory_gib": round(_memory_bytes() / GIB),
            "gpus": _gpus(),
        },
        software={
            "system": platform.system(),
            "python": platform.python_version(),
            "threads": threads,
            **{name: version for name in _PACKAGES if (version := _version(name))},
        },
        commit=_commit(),
    )


def available_cores() -> tuple[int, ...]:
    """Numbers of the cores that this process may run on, ascending."""
    if hasattr(os, "sched_getaffinity"):
        return tuple(sorted(os.sched_getaffinity(0)))
    return tuple(range(os.cpu_count() or 1))


def pin_to_core(core: int) -> bool:
    """Keep this process on one core; False where the system cannot."""
    if not hasattr(os, "sched_setaffinity"):
        return False
    try:
        os.sched_setaffinity(0, {core})
    except OSError:
        return False
    return True


def cache_sizes() -> dict[str, str]:
    """Size of each cache level of core 0, such as {"L3 Unified": "32768K"}; {} if unknown."""
    sizes = {}
    for index in sorted((_CPU_ROOT / "cpu0" / "cache").glob("index*")):
        level, kind, size = (_read(index / name) for name in ("level", "type", "size"))
        if level and kind and size:
            sizes[f"L{level} {kind}"] = size
    return sizes


def last_level_cache_bytes() -> int:
    """Bytes of the CPU's largest cache, or `DEFAULT_LAST_LEVEL_CACHE_BYTES` if unknown."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    sizes = [
        int(text[:-1]) * units[text[-1]]
        for text in cache_sizes().values()
        if text[-1] in units and text[:-1].isdigit()
    ]
    return max(sizes, default=DEFAULT_LAST_LEVEL_CACHE_BYTES)


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip()
    except OSError:
        return ""


@lru_cache(maxsize=1)
def _cpu_info() -> dict[str, str]:
    """The first processor's entries in /proc/cpuinfo; {} where there is none."""
    entries: dict[str, str] = {}
    for line in _read(Path("/proc/cpuinfo")).splitlines():
        if not line.strip():
            break
        key, _, value = line.partition(":")
        entries[key.strip()] = value.strip()
    return entries


def _cpu_model() -> str:
    info = _cpu_info()
    name = info.get("model name") or platform.processor() or platform.machine()
    # Virtual machines shorten the name; family and model tell generations apart.
    numbers = [f"{key} {info[key]}" for key in ("cpu family", "model", "stepping") if key in info]
    return ", ".join([name, *numbers])


def _vector_flags() -> list[str]:
    present = set(_cpu_info().get("flags", "").split())
    return [flag for flag in _VECTOR_FLAGS if flag in present]


def _memory_bytes() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):
        return 0


def _gpus() -> list[str]:
    import torch

    if not torch.cuda.is_available():
        return []
    return [
        f"{properties.name}, {round(properties.total_memory / GIB)} GiB"
        for properties in map(torch.cuda.get_device_properties, range(torch.cuda.device_count()))
    ]


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    try:
        done = subprocess.run(
            ["git", "-C", str(root), "rev-parse", "HEAD"],
            capture_output=True,
            text=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None
