"""What a training run is asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import Any, TypeVar

from autoshard.errors import InputError
from autoshard.problem import MAX_FLOAT32
from autoshard.runtime.results import RunOptions
from autoshard.suggestions import did_you_mean

E = TypeVar("E", bound=Enum)


class Model(Enum):
    """The dense layers."""

    DLRM = "dlrm"
    MLP = "mlp"
    """A multi-layer perceptron over all pooled outputs; takes no numeric features."""


class DenseOptimizer(Enum):
    """torch's optimizers, for the dense layers."""

    SGD = "sgd"
    ADAGRAD = "adagrad"
    ADAM = "adam"

    @property
    def default_learning_rate(self) -> float:
        """What is used where none is given."""
        return 1e-3 if self is DenseOptimizer.ADAM else 1e-2


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How a model is trained under a plan."""

    run: RunOptions = field(default_factory=RunOptions)
    """Seed, device, time limits and loop; its numbers of steps do not count here."""
    data: str = "clicks"
    """A data set; see `autoshard.clicks.sources`."""
    model: Model = Model.DLRM
    epochs: int = 1
    """Passes over the training data, >= 1."""
    max_steps: int | None = None
    """Steps after which training ends, those before a resumption included."""
    eval_every: int | None = None
    """Steps between evaluations; by default one at the end of each epoch."""
    eval_samples: int | None = None
    """Samples that an evaluation uses, rounded up to whole steps; all by default."""
    checkpoint: str | None = None
    """Folder for checkpoints; none are written without it."""
    checkpoint_every: int | None = None
    """Steps between checkpoints; one is always written at the end."""
    keep_checkpoints: int = 2
    resume: bool = False
    """Go on from the newest checkpoint in the folder, if there is one."""
    learning_rate: float | None = None
    """Of the tables; by default the checkpoint's, else the plan's."""
    dense_optimizer: DenseOptimizer = DenseOptimizer.ADAM
    dense_learning_rate: float | None = None
    """By default the checkpoint's, else the optimizer's usual one."""
    bottom: tuple[int, ...] = (64,)
    """Hidden widths of DLRM's bottom MLP."""
    top: tuple[int, ...] = (64,)
    """Hidden widths of DLRM's top MLP, or of the MLP."""
    interaction_dim: int | None = None
    """Of DLRM; by default the dimension that most outputs have."""
    out_dir: str | None = None
    """Folder for the learning curve."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", parse_member(Model, self.model, "model"))
        object.__setattr__(
            self,
            "dense_optimizer",
            parse_member(DenseOptimizer, self.dense_optimizer, "dense_optimizer"),
        )
        for name in ("epochs", "keep_checkpoints"):
            _check_count(name, getattr(self, name))
        for name in (
            "max_steps", "eval_every", "eval_samples", "checkpoint_every", "interaction_dim",
        ):  # fmt: skip
            if getattr(self, name) is not None:
                _check_count(name, getattr(self, name))
        for name in ("bottom", "top"):
            for width in getattr(self, name):
                _check_count(name, width)
        for name in ("learning_rate", "dense_learning_rate"):
            value = getattr(self, name)
            if value is not None and (
                isinstance(value, bool)
                or not isinstance(value, int | float)
                or not 0 <= value <= MAX_FLOAT32
            ):
                raise InputError(
                    f"{name} is not usable",
                    got=value,
                    allowed=f"numbers from 0 to {MAX_FLOAT32:g}",
                )
        if self.checkpoint is None and (self.resume or self.checkpoint_every is not None):
            raise InputError(
                "checkpoints are asked for, but not where they are",
                remedy="give the folder as checkpoint",
            )

    @property
    def first_dense_learning_rate(self) -> float:
        """Of a run that does not resume."""
        given = self.dense_learning_rate
        return self.dense_optimizer.default_learning_rate if given is None else given


def parse_member(kind: type[E], value: object, what: str) -> E:
    """The member of an enum with that value.

    Raises:
        InputError: there is none.
    """
    try:
        return kind(value)
    except ValueError as error:
        names = [str(member.value) for member in kind]
        raise InputError(
            f"{what} is not known",
            got=value,
            allowed=", ".join(names),
            remedy=did_you_mean(value, names),
        ) from error


def _check_count(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
        raise InputError(f"{name} is not usable", got=value, allowed="integers >= 1, below 2^63")
