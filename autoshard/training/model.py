"""Puts the model of a run together: sharded tables, dense layers, and their optimizers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from autoshard.errors import ArtifactError, InfeasibleError
from autoshard.plan import ShardingPlan
from autoshard.runtime.collectives import Collectives
from autoshard.runtime.dense import DenseHead
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.training.dlrm import DLRM
from autoshard.training.options import DenseOptimizer, Model, TrainingOptions

_OPTIMIZERS: Mapping[DenseOptimizer, type[torch.optim.Optimizer]] = {
    DenseOptimizer.SGD: torch.optim.SGD,
    DenseOptimizer.ADAGRAD: torch.optim.Adagrad,
    DenseOptimizer.ADAM: torch.optim.Adam,
}


@dataclass(kw_only=True)
class TrainedModel:
    """What is trained on one rank."""

    embeddings: ShardedEmbeddings
    dense: nn.Module
    dense_optimizer: torch.optim.Optimizer
    learning_rate: float
    """Of the tables."""

    @property
    def dense_learning_rate(self) -> float:
        """Of the dense layers."""
        return float(self.dense_optimizer.param_groups[0]["lr"])

    def set_learning_rates(self, tables: float | None, dense: float | None) -> None:
        """Use other learning rates from the next update on; None leaves one as it is."""
        if tables is not None:
            self.learning_rate = tables
            self.embeddings.set_learning_rate(tables)
        if dense is not None:
            for group in self.dense_optimizer.param_groups:
                group["lr"] = dense

    def dense_state(self) -> dict[str, Any]:
        """Dense layers and their optimizer, for a checkpoint."""
        return {
            "module": self.dense.state_dict(),
            "optimizer": self.dense_optimizer.state_dict(),
        }

    def load_dense_state(self, state: Mapping[str, Any]) -> None:
        """The inverse of `dense_state`.

        Raises:
            ArtifactError: the checkpoint's dense layers are others.
        """
        try:
            self.dense.load_state_dict(state["module"])
            self.dense_optimizer.load_state_dict(state["optimizer"])
        except (KeyError, ValueError, RuntimeError) as error:
            raise ArtifactError(
                "the checkpoint's dense layers are others than the run's",
                got=" ".join(str(error).split())[:200],
                remedy="give the options for the model that were given when it was trained",
            ) from error


def build_model(
    plan: ShardingPlan,
    options: TrainingOptions,
    num_numeric: int,
    collectives: Collectives,
    input_collectives: Collectives | None = None,
) -> TrainedModel:
    """Allocate this rank's part of the model; equal options give equal initial weights.

    Args:
        plan: where the tables go.
        options: which dense layers, of which sizes.
        num_numeric: numeric features of the data set.
        collectives: this rank's.
        input_collectives: for distributing the input in another thread.

    Raises:
        InfeasibleError: the dense layers do not fit into memory.
        AutoshardError: as `ShardedEmbeddings` and the dense layers do.
    """
    embeddings = ShardedEmbeddings(
        plan,
        collectives,
        input_collectives=input_collectives,
        ids_mode=options.run.ids_mode,
        seed=options.run.seed,
    )
    with within_memory():
        dense = _dense_layers(embeddings.output_dims, options, num_numeric)
        dense.to(collectives.device)
    optimizer = _OPTIMIZERS[options.dense_optimizer](
        dense.parameters(),
        lr=options.first_dense_learning_rate,  # type: ignore[call-arg]
    )
    return TrainedModel(
        embeddings=embeddings,
        dense=dense,
        dense_optimizer=optimizer,
        learning_rate=plan.training.learning_rate,
    )


def _dense_layers(
    output_dims: Mapping[str, int], options: TrainingOptions, num_numeric: int
) -> nn.Module:
    if options.model is Model.DLRM:
        return DLRM(
            output_dims,
            num_numeric=num_numeric,
            interaction_dim=options.interaction_dim,
            bottom=options.bottom,
            top=options.top,
            seed=options.run.seed,
        )
    # By name, so that tables may change places in a plan without changing the model.
    return DenseHead(dict(sorted(output_dims.items())), hidden=options.top, seed=options.run.seed)


@contextlib.contextmanager
def within_memory() -> Iterator[None]:
    """Tell a failed allocation of dense layers as what it is."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "allocate memory" not in str(error):
            raise
        raise InfeasibleError(
            "the dense layers do not fit into memory",
            got=str(error).splitlines()[0][:160],
            remedy="choose smaller --bottom, --top or --interaction-dim",
        ) from error
