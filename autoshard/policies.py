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

from autoshard.artifact_files import find_artifact, read_artifact
from autoshard.errors import ArtifactError, listed
from autoshard.observation import (
    GLOBAL_FEATURES,
    RANK_FEATURES,
    Observation,
)
from autoshard.programs import load_program

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
    for key, names in (("rank_features", RANK_FEATURES), ("global_features", GLOBAL_FEATURES)):
        given = config.get(key)
        if given != list(names):
            given = given if isinstance(given, list) else []
            raise ArtifactError(
                f"policy {folder} reads other {key} than this version computes",
                got=f"without {listed(sorted(set(names) - set(given))) or 'none'}, "
                f"with {listed(sorted(set(given) - set(names), key=str)) or 'none'} besides"
                if set(given) != set(names)
                else "another order",
                remedy="train a policy with this version, or install the version that made it",
            )
    if PROGRAM_FILE not in config["files"]:
        raise ArtifactError(
            f"policy {folder} lacks its file {PROGRAM_FILE}", remedy="export the policy again"
        )
    return folder, config


def load_policy(path_or_name: str | Path = "default") -> Policy:
    """Load an exported policy.

    Args:
        path_or_name: its folder, or the name of a shipped policy.

    Raises:
        ArtifactError: as in `find_policy`, or torch cannot load it.
    """
    folder, config = find_policy(path_or_name)
    import torch

    try:
        program = load_program(folder / PROGRAM_FILE)
    except Exception as error:
        raise ArtifactError(
            f"policy {folder} cannot be loaded with torch {torch.__version__}",
            got=str(error)[:200],
            remedy=f"install torch {config.get('torch')} or export the policy again",
        ) from error
    return Policy(program, config, Path(path_or_name).name)
