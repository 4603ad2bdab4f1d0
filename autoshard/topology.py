"""The ranks that tables are placed on, and what each can hold."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from autoshard.checks import check_integers
from autoshard.errors import InputError, quoted
from autoshard.files import fingerprint

GIB = 2**30
MAX_WORLD_SIZE = 65_536
#: Bytes are int64 wherever placements are worked out.
MAX_BYTES = 2**62


@dataclass(frozen=True, kw_only=True)
class Topology:
    """World size, node width and memory of every rank."""

    world_size: int
    """Ranks, >= 1."""
    hbm_bytes: tuple[int, ...]
    """Memory of each rank in bytes, [world_size]."""
    local_world_size: int = 0
    """Ranks per node; divides world_size. 0 means all ranks on one node."""
    reserved_bytes: int = 0
    """Bytes on each rank that no plan may use (fragmentation, other processes)."""

    def __post_init__(self) -> None:
        check_integers(self, world_size=0, local_world_size=0, reserved_bytes=0)
        if self.reserved_bytes > MAX_BYTES:
            raise InputError(
                "reserved_bytes is out of range",
                got=self.reserved_bytes,
                allowed="up to 2^62 bytes",
            )
        if not 1 <= self.world_size <= MAX_WORLD_SIZE:
            raise InputError(
                "world_size is out of range", got=self.world_size, allowed=f"1..{MAX_WORLD_SIZE}"
            )
        if self.local_world_size == 0:
            object.__setattr__(self, "local_world_size", self.world_size)
        if self.world_size % self.local_world_size:
            raise InputError(
                "local_world_size does not divide world_size",
                got=f"local_world_size {self.local_world_size}, world_size {self.world_size}",
                allowed="a divisor of world_size",
            )
        if len(self.hbm_bytes) != self.world_size:
            raise InputError(
                "hbm_bytes does not name every rank",
                got=f"{len(self.hbm_bytes)} values for {self.world_size} ranks",
                allowed="one value per rank",
            )
        for rank, value in enumerate(self.hbm_bytes):
            if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MAX_BYTES:
                raise InputError(
                    f"hbm_bytes of rank {rank} is not usable",
                    got=quoted(value),
                    allowed="integers >= 0 (up to 2^62)",
                )

    @classmethod
    def uniform(
        cls,
        world_size: int,
        hbm_bytes: int,
        *,
        local_world_size: int = 0,
        reserved_bytes: int = 0,
    ) -> Topology:
        """A topology whose ranks all have the same memory."""
        if (
            isinstance(world_size, bool)
            or not isinstance(world_size, int)
            or not 1 <= world_size <= MAX_WORLD_SIZE
        ):
            raise InputError(
                "world_size is out of range", got=world_size, allowed=f"1..{MAX_WORLD_SIZE}"
            )
        return cls(
            world_size=world_size,
            hbm_bytes=(hbm_bytes,) * world_size,
            local_world_size=local_world_size,
            reserved_bytes=reserved_bytes,
        )

    def capacity_bytes(self, rank: int) -> int:
        """What a plan may use on `rank`: its memory less the reserve, >= 0."""
        return max(0, self.hbm_bytes[rank] - self.reserved_bytes)

    def to_json(self) -> dict[str, Any]:
        """The topology as a plain dictionary."""
        return {
            "world_size": self.world_size,
            "local_world_size": self.local_world_size,
            "hbm_bytes": list(self.hbm_bytes),
            "reserved_bytes": self.reserved_bytes,
        }

    @classmethod
    def from_json(cls, value: Any) -> Topology:
        """The inverse of `to_json`; `local_world_size` and `reserved_bytes` may be left out.

        Raises:
            InputError: a missing or unknown key, or a value that is not usable.
        """
        if not isinstance(value, Mapping):
            raise InputError("topology must be an object", got=quoted(value))
        known = {"world_size", "local_world_size", "hbm_bytes", "reserved_bytes"}
        if unknown := sorted(set(value) - known):
            raise InputError("unknown key in topology", got=unknown, allowed=sorted(known))
        if missing := sorted({"world_size", "hbm_bytes"} - set(value)):
            raise InputError("topology lacks a key", got=missing)
        hbm = value["hbm_bytes"]
        if not isinstance(hbm, Sequence) or isinstance(hbm, str):
            raise InputError(
                "hbm_bytes must be a list", got=quoted(hbm), allowed="one integer per rank"
            )
        return cls(
            world_size=value["world_size"],
            local_world_size=value.get("local_world_size", 0),
            hbm_bytes=tuple(hbm),
            reserved_bytes=value.get("reserved_bytes", 0),
        )

    @property
    def fingerprint(self) -> str:
        """Identifies the topology."""
        return fingerprint(self.to_json())
