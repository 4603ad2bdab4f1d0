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
from autoshard.errors import ArtifactError
from autoshard.observation import (
    GLOBAL_FEATURES,
    NUM_GLOBAL_FEATURES,
    NUM_RANK_FEATURES,
    RANK_FEATURES,
    Observation,
)

POLICY_KIND = "autoshard-policy"
POLICY_VERSION = 1
PROGRAM_FILE = "policy.pt2"
WEIGHTS_FILE = "weights.safetensors"
CARD_FILE = "card.md"
#: Exported programs take sizes from 2 on (torch.export treats 0 and 1 as special).
MIN_PROGRAM_SIZE = 2

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
        """Identifies the weights, the features and the training."""
        return str(self.config["fingerprint"])

    def logits_NR(self, observation: Observation) -> Float32Array:
        """Score the ranks of N states.

        Args:
            observation: of any number of states and ranks.

        Returns:
            float32 [N, R]; about −1e8 where a rank is not legal.
        """
        import torch

        num, ranks = observation.legal_NR.shape
        padded = _pad(observation, max(num, MIN_PROGRAM_SIZE), max(ranks, MIN_PROGRAM_SIZE))
        with torch.inference_mode():
            logits = self._program(*(torch.from_numpy(array) for array in padded))
        return logits.numpy()[:num, :ranks]


def _pad(
    observation: Observation, num: int, ranks: int
) -> tuple[Float32Array, Float32Array, NDArray[np.bool_]]:
    """The three arrays, with states and ranks that do not exist up to the given sizes."""
    given_num, given_ranks = observation.legal_NR.shape
    if (given_num, given_ranks) == (num, ranks):
        return observation.ranks_NRK, observation.globals_NG, observation.legal_NR
    ranks_NRK = np.zeros((num, ranks, NUM_RANK_FEATURES), dtype=np.float32)
    globals_NG = np.zeros((num, NUM_GLOBAL_FEATURES), dtype=np.float32)
    legal_NR = np.zeros((num, ranks), dtype=bool)
    ranks_NRK[:given_num, :given_ranks] = observation.ranks_NRK
    globals_NG[:given_num] = observation.globals_NG
    legal_NR[:given_num, :given_ranks] = observation.legal_NR
    return ranks_NRK, globals_NG, legal_NR


def load_policy(path_or_name: str | Path = "default") -> Policy:
    """Load an exported policy.

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
                got=f"without {sorted(set(names) - set(given))}, "
                f"with {sorted(set(given) - set(names))}"
                if set(given) != set(names)
                else "another order",
                remedy="train a policy with this version, or install the version that made it",
            )
    if PROGRAM_FILE not in config["files"]:
        raise ArtifactError(
            f"policy {folder} lacks its file {PROGRAM_FILE}", remedy="export the policy again"
        )
    import torch

    try:
        program = torch.export.load(folder / PROGRAM_FILE).module()
    except Exception as error:
        raise ArtifactError(
            f"policy {folder} cannot be loaded with torch {torch.__version__}",
            got=str(error)[:200],
            remedy=f"install torch {config.get('torch')} or export the policy again",
        ) from error
    return Policy(program, config, Path(path_or_name).name)
