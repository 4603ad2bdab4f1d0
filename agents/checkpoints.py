"""Training checkpoints: one safetensors file with weights, optimizer state and plain facts.

No class of ours is pickled, and the file is replaced in one step, so that a killed run finds
either its previous checkpoint or the new one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from autoshard.errors import ArtifactError
from autoshard.files import write_atomically

CHECKPOINT_FILE = "checkpoint.safetensors"
_CHECKPOINT_VERSION = "1"


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """What a run goes on from."""

    policy: Mapping[str, Tensor]
    """The policy's state dict."""
    optimizer: Mapping[str, Tensor]
    """`<parameter index>.<Adam state>`."""
    best: Mapping[str, Tensor]
    """State dict of the best policy network so far."""
    facts: dict[str, Any]
    """Plain JSON values: config, progress and the best result."""


def optimizer_tensors(optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """The optimizer's state, flat."""
    return {
        f"{index}.{name}": value
        for index, values in optimizer.state_dict()["state"].items()
        for name, value in values.items()
    }


def load_optimizer(optimizer: torch.optim.Optimizer, tensors: Mapping[str, Tensor]) -> None:
    """The inverse of `optimizer_tensors`."""
    whole = optimizer.state_dict()
    state: dict[int, dict[str, Tensor]] = {}
    for key, value in tensors.items():
        index, _, name = key.partition(".")
        state.setdefault(int(index), {})[name] = value
    whole["state"] = state
    optimizer.load_state_dict(whole)


def save_checkpoint(
    path: Path,
    *,
    policy: nn.Module,
    optimizer: torch.optim.Optimizer,
    best: Mapping[str, Tensor],
    facts: Mapping[str, Any],
) -> None:
    """Write a checkpoint in place of the previous one."""
    groups = {
        "policy": policy.state_dict(),
        "optimizer": optimizer_tensors(optimizer),
        "best": best,
    }
    tensors = {
        # Clones: safetensors refuses tensors that share memory.
        f"{group}/{name}": value.detach().clone().contiguous()
        for group, values in groups.items()
        for name, value in values.items()
    }
    metadata = {"version": _CHECKPOINT_VERSION, "facts": json.dumps(facts)}
    write_atomically(path, lambda temporary: save_file(tensors, temporary, metadata))


def load_checkpoint(path: Path) -> Checkpoint:
    """Read a checkpoint.

    Raises:
        ArtifactError: it is damaged or of another version.
    """
    groups: dict[str, dict[str, Tensor]] = {"policy": {}, "optimizer": {}, "best": {}}
    try:
        with safe_open(path, framework="pt") as stream:
            metadata = stream.metadata() or {}
            if metadata.get("version") != _CHECKPOINT_VERSION:
                raise ArtifactError(
                    f"checkpoint {path} has another version",
                    got=metadata.get("version"),
                    allowed=_CHECKPOINT_VERSION,
                    remedy="train in a new folder",
                )
            for key in stream.keys():  # noqa: SIM118 (not a dictionary)
                group, _, name = key.partition("/")
                groups[group][name] = stream.get_tensor(key)
            facts = json.loads(metadata["facts"])
    except (SafetensorError, KeyError, ValueError, OSError) as error:
        if isinstance(error, ArtifactError):
            raise
        raise ArtifactError(
            f"checkpoint {path} is damaged", got=str(error), remedy="train in a new folder"
        ) from error
    return Checkpoint(**groups, facts=facts)
