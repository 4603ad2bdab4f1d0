"""Ranks that build tables which must be refused."""

from __future__ import annotations

from typing import Any

import torch

from autoshard.plan import ShardingPlan
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.ids import IdsMode
from autoshard.runtime.worker import RankProcess
from tests.distributed.runtime_cases import message_of


def has_cuda() -> bool:
    return torch.cuda.is_available()


def built(process: RankProcess, plan: ShardingPlan) -> str:
    """The error of building the plan's tables."""
    return message_of(lambda: ShardedEmbeddings(plan, process.collectives))


def differing(process: RankProcess, plan: ShardingPlan, what: str) -> str:
    """The error where each rank is given another `seed` or `ids_mode`."""
    values: dict[str, Any] = {"seed": process.rank, "ids_mode": list(IdsMode)[process.rank]}
    return message_of(lambda: ShardedEmbeddings(plan, process.collectives, **{what: values[what]}))
