"""What a simulated device is made of: bandwidths, caches, launches and links, each with its source.

`autoshard.cost_models.simulated` turns a spec into costs. Every number is a published one or is
called an assumption here and in `docs/simulated_device.md`; none was fitted to a measurement.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from autoshard.checks import check_integers, check_numbers
from autoshard.errors import ArtifactError, InputError, quoted
from autoshard.suggestions import did_you_mean
from autoshard.topology import GIB

#: 1 GB/s (10^9 bytes) in bytes per millisecond.
_GB_PER_S = 1e6
_US = 1e-3


@dataclass(frozen=True, kw_only=True)
class DeviceSpec:
    """One kind of GPU in one kind of node."""

    name: str
    """What it is chosen by."""
    hbm_bytes: int
    """Memory, >= 1."""
    hbm_bytes_per_ms: float
    """Peak bandwidth of the memory, > 0."""
    hbm_efficiency: float
    """Share of the peak that kernels reach, in (0, 1]."""
    l2_bytes: int
    """Size of the last cache before the memory, >= 1."""
    l2_bytes_per_ms: float
    """Bandwidth of that cache, > 0."""
    first_launch_ms: float
    """What starting a sequence of kernels costs, >= 0."""
    next_launch_ms: float
    """What each further kernel of the sequence costs besides its work, >= 0."""
    local_world_size: int
    """GPUs of one node, >= 1."""
    local_bytes_per_ms: float
    """What one GPU sends (and, at once, receives) inside its node, > 0."""
    remote_bytes_per_ms: float
    """What one GPU sends (and, at once, receives) through its network card, > 0."""
    local_latency_ms: float
    """What an all-to-all inside a node costs besides its bytes, >= 0."""
    remote_latency_ms: float
    """The same across nodes, >= 0."""

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise InputError("a device's name is not usable", got=quoted(self.name))
        check_integers(self, hbm_bytes=1, l2_bytes=1, local_world_size=1)
        rates = ("hbm_bytes_per_ms", "l2_bytes_per_ms", "local_bytes_per_ms", "remote_bytes_per_ms")
        times = ("first_launch_ms", "next_launch_ms", "local_latency_ms", "remote_latency_ms")
        check_numbers(self, hbm_efficiency=0.0, **dict.fromkeys((*rates, *times), 0.0))
        for name in ("hbm_efficiency", *rates):
            if getattr(self, name) == 0:
                raise InputError(f"{name} is not usable", got=0, allowed="a finite number > 0")
        if self.hbm_efficiency > 1:
            raise InputError(
                "hbm_efficiency is not usable", got=self.hbm_efficiency, allowed="a share up to 1"
            )

    @property
    def reached_hbm_bytes_per_ms(self) -> float:
        """Bandwidth of the memory as kernels see it."""
        return self.hbm_bytes_per_ms * self.hbm_efficiency

    def to_json(self) -> dict[str, Any]:
        """The spec as a plain dictionary."""
        return dataclasses.asdict(self)


#: Assumption. Streaming benchmarks (STREAM on GPUs) come near nine tenths of the peak on
#: either generation; gathers of whole rows are taken to reach as much.
_HBM_EFFICIENCY = 0.9
#: NVIDIA, "Getting Started with CUDA Graphs" (developer blog, 2019), on a V100: a kernel of
#: 2.9 µs took 9.6 µs when each was launched and awaited alone, and 3.8 µs when launches
#: overlapped with execution. Assumption: later GPUs are as fast, since the driver decides.
_FIRST_LAUNCH_MS = (9.6 - 2.9) * _US
_NEXT_LAUNCH_MS = (3.8 - 2.9) * _US
#: NCCL's own cost table (src/graph/tuning.cc of NVIDIA/nccl, 2022), ring with the simple
#: protocol: 8.4 µs base, and 3.4 µs for a step over NVLink or 9.6 µs over the network.
#: Assumption: an all-to-all is one such step, as its messages go out side by side.
_LOCAL_LATENCY_MS = (8.4 + 3.4) * _US
_REMOTE_LATENCY_MS = (8.4 + 9.6) * _US

A100_80GB = DeviceSpec(
    name="a100-80gb",
    hbm_bytes=80 * GIB,
    # NVIDIA A100 80GB datasheet, SXM: 2,039 GB/s.
    hbm_bytes_per_ms=2039 * _GB_PER_S,
    hbm_efficiency=_HBM_EFFICIENCY,
    # NVIDIA A100 whitepaper (2020): 40 MB, 5,120 bytes per clock; at its boost clock of 1,410 MHz.
    l2_bytes=40 * 2**20,
    l2_bytes_per_ms=5120 * 1.410e6,
    first_launch_ms=_FIRST_LAUNCH_MS,
    next_launch_ms=_NEXT_LAUNCH_MS,
    # DGX A100 datasheet: 8 GPUs; a ConnectX-6 for each, 200 Gb/s.
    local_world_size=8,
    remote_bytes_per_ms=25 * _GB_PER_S,
    # Datasheet: 600 GB/s NVLink, which is 12 links of 25 GB/s in each direction. NCCL
    # (src/graph/topo.h, SM80_NVLINK_BW) counts 20 GB/s of each as usable.
    local_bytes_per_ms=12 * 20 * _GB_PER_S,
    local_latency_ms=_LOCAL_LATENCY_MS,
    remote_latency_ms=_REMOTE_LATENCY_MS,
)
H100_80GB = DeviceSpec(
    name="h100-80gb",
    hbm_bytes=80 * GIB,
    # NVIDIA H100 datasheet, SXM5: 3.35 TB/s.
    hbm_bytes_per_ms=3350 * _GB_PER_S,
    hbm_efficiency=_HBM_EFFICIENCY,
    # NVIDIA H100 whitepaper (2022): 50 MB. Bandwidth: table 3 of PMC10448217 (2023) lists
    # 8,986 GB/s, which is the A100's 5,120 bytes per clock at 1,755 MHz.
    l2_bytes=50 * 2**20,
    l2_bytes_per_ms=5120 * 1.755e6,
    first_launch_ms=_FIRST_LAUNCH_MS,
    next_launch_ms=_NEXT_LAUNCH_MS,
    # DGX H100 datasheet: 8 GPUs; a ConnectX-7 for each, 400 Gb/s.
    local_world_size=8,
    remote_bytes_per_ms=50 * _GB_PER_S,
    # Datasheet: 900 GB/s NVLink, which is 18 links of 25 GB/s in each direction. NCCL
    # (src/graph/topo.h, SM90_NVLINK_BW) counts 20.6 GB/s of each as usable.
    local_bytes_per_ms=18 * 20.6 * _GB_PER_S,
    local_latency_ms=_LOCAL_LATENCY_MS,
    remote_latency_ms=_REMOTE_LATENCY_MS,
)

#: Every named spec.
DEVICE_SPECS: Mapping[str, DeviceSpec] = MappingProxyType(
    {spec.name: spec for spec in (A100_80GB, H100_80GB)}
)


def find_device_spec(name: str) -> DeviceSpec:
    """The spec called `name`.

    Raises:
        ArtifactError: there is none; the message lists all and suggests the nearest.
    """
    if name not in DEVICE_SPECS:
        names = ", ".join(DEVICE_SPECS)
        raise ArtifactError(
            f"simulated device {name!r} does not exist" if name else "no simulated device is named",
            allowed=names,
            remedy=did_you_mean(name, DEVICE_SPECS) or "choose one of these",
        )
    return DEVICE_SPECS[name]
