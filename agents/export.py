"""Export of a trained policy as an artifact folder that planning loads without training code."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch.export import Dim

from agents.config import AgentConfig
from agents.networks import PolicyNetwork
from agents.training import TrainingResult
from autoshard.artifact_files import write_artifact
from autoshard.observation import (
    GLOBAL_FEATURES,
    NUM_GLOBAL_FEATURES,
    NUM_RANK_FEATURES,
    RANK_FEATURES,
)
from autoshard.policies import (
    CARD_FILE,
    POLICY_IDENTITY,
    POLICY_KIND,
    POLICY_VERSION,
    PROGRAM_FILE,
    WEIGHTS_FILE,
)
from autoshard.programs import save_program
from autoshard.protocols import CostModel


def export_policy(
    result: TrainingResult,
    config: AgentConfig,
    cost_model: CostModel,
    folder: str | Path,
    *,
    facts: Mapping[str, Any] | None = None,
) -> str:
    """Write the best policy of a run as an artifact, whole or not at all.

    Args:
        result: what training returned.
        config: how it was trained.
        cost_model: what it was trained with.
        folder: where the artifact goes; an older one there is replaced.
        facts: further plain JSON values to record, such as the workload.

    Returns:
        The policy's fingerprint.

    Raises:
        InputError: the place is not writable or holds something else.
    """
    network = result.network.eval()
    training = {
        "num_placements": result.num_placements,
        "best_after_updates": result.num_updates,
        "seconds": round(result.seconds, 1),
        "validation": result.best.to_json(),
        "untrained": result.untrained.to_json(),
        "agent": config.to_json(),
        **(facts or {}),
    }
    described = {
        "rank_features": list(RANK_FEATURES),
        "global_features": list(GLOBAL_FEATURES),
        "hidden_size": config.hidden_size,
        "cost_model": {"name": cost_model.name, "fingerprint": cost_model.fingerprint},
        "training": training,
        "torch": torch.__version__,
    }
    weights = {key: value.contiguous() for key, value in network.state_dict().items()}
    program = export_program(network)
    return write_artifact(
        folder,
        kind=POLICY_KIND,
        version=POLICY_VERSION,
        config=described,
        identity=POLICY_IDENTITY,
        writers={
            WEIGHTS_FILE: lambda path: save_file(weights, path),
            PROGRAM_FILE: partial(save_program, program),
            CARD_FILE: lambda path: _write_card(path, described),
        },
    )


def export_program(network: PolicyNetwork) -> torch.export.ExportedProgram:
    """The network as a program (ranks_NRK, globals_NG, legal_NR) → logits_NR, any N and R >= 1."""
    num, ranks = 3, 5
    example = (
        torch.zeros(num, ranks, NUM_RANK_FEATURES),
        torch.zeros(num, NUM_GLOBAL_FEATURES),
        torch.ones(num, ranks, dtype=torch.bool),
    )
    n, r = Dim("N", min=1), Dim("R", min=1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.export.export(
            network, example, dynamic_shapes=({0: n, 1: r}, {0: n}, {0: n, 1: r})
        )


def _write_card(path: Path, described: Mapping[str, Any]) -> None:
    training = described["training"]
    best, untrained = training["validation"], training["untrained"]
    path.write_text(
        f"""# Placement policy

Places embedding tables on ranks, one slice at a time, in descending predicted cost.
Trained with PPO on the cost model `{described["cost_model"]["name"]}`
({described["cost_model"]["fingerprint"]}); {training["num_placements"]:,} placements,
{training["seconds"]} s, seed {training["agent"]["seed"]}.

On validation tasks unseen in training, its best-rank rollout against `cost_greedy`:

| | trained | untrained |
|---|---|---|
| objective / cost_greedy, geometric mean | {_figure(best, untrained, "objective_ratio")} |
| worst ratio | {_figure(best, untrained, "worst_ratio")} |
| share of tasks where better | {_figure(best, untrained, "share_better")} |
| tasks compared | {best["num_compared"]} | {untrained["num_compared"]} |
| tasks that only cost_greedy solves | {best["num_failed"]} | {untrained["num_failed"]} |
| tasks that only the policy solves | {best["num_rescued"]} | {untrained["num_rescued"]} |

The policy was chosen on these tasks, so its figures are slightly flattering. Costs are
predicted, not measured.
""",
        encoding="utf-8",
    )


def _figure(best: Mapping[str, Any], untrained: Mapping[str, Any], key: str) -> str:
    return f"{best[key]:.4f} | {untrained[key]:.4f}"
