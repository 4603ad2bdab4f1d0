"""Trained placement policies: loading an exported one and asking it for logits.

A policy is an artifact folder (see `autoshard.artifact_files`) that `agents.export` wrote;
running it needs torch, but none of the training code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from autoshard.artifact_files import (
    check_names,
    find_artifact,
    load_artifact_program,
    read_artifact,
)
from autoshard.observation import (
    GLOBAL_FEATURES,
    RANK_FEATURES,
    Observation,
)

POLICY_KIND = "autoshard-policy"
POLICY_VERSION = 2
PROGRAM_FILE = "policy.pt2"
WEIGHTS_FILE = "weights.safetensors"
CARD_FILE = "card.md"
#: What decides the logits.
POLICY_IDENTITY = ("rank_features", "global_features", "hidden_size", WEIGHTS_FILE)

Float32Array = NDArray[np.float32]


class Scorer(Protocol):
    """Anything that scores ranks: a loaded `Policy`, or a network in training."""

    def logits_NR(self, observation: Observation) -> Float32Array:
        """Logits, float32 [N, R]; far below all others where a rank is not legal."""


class Policy:
    """A loaded policy."""

    def __init__(self, program: Callable[..., Any], config: Mapping[str, Any], name: str) -> None:
        """Wrap a program; `load_policy` is what makes these."""
        self._program = program
        self.config = config
        self.name = name

    @property
    def fingerprint(self) -> str:
        """Identifies the weights and the features."""
        return str(self.config["fingerprint"])

    def logits_NR(self, observation: Observation) -> Float32Array:
        """Score the ranks of N states.

        Args:
            observation: of any number of states and ranks.

        Returns:
            float32 [N, R]; about −1e8 where a rank is not legal.
        """
        import torch

        arrays = (observation.ranks_NRK, observation.globals_NG, observation.legal_NR)
        with torch.inference_mode():
            logits: Float32Array = self._program(*map(torch.from_numpy, arrays)).numpy()
        return logits


def find_policy(path_or_name: str | Path) -> tuple[Path, dict[str, Any]]:
    """The folder and config of an exported policy, checked but not loaded (torch is not needed).

    Args:
        path_or_name: its folder, or the name of a shipped policy.

    Raises:
        ArtifactError: it does not exist, is damaged, or reads other features than this
            version of autoshard computes.
    """
    folder = find_artifact(path_or_name, folder="policies", what="policy")
    config = read_artifact(folder, kind=POLICY_KIND, version=POLICY_VERSION, what="policy")
    check_names(config, "rank_features", RANK_FEATURES, folder, "policy")
    check_names(config, "global_features", GLOBAL_FEATURES, folder, "policy")
    return folder, config


def load_policy(path_or_name: str | Path = "default") -> Policy:
    """Load an exported policy.

    Args:
        path_or_name: its folder, or the name of a shipped policy.

    Raises:
        ArtifactError: as in `find_policy`, or its program is missing or torch cannot load it.
    """
    folder, config = find_policy(path_or_name)
    program = load_artifact_program(folder, config, PROGRAM_FILE, "policy")
    return Policy(program, config, Path(path_or_name).name)
