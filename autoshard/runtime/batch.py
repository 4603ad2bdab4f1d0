"""A rank's local batch: jagged ids per named feature, checked once at the boundary.

Everything behind this file may rely on int64, on lengths that sum to the number of
ids (kernels read as far as lengths say), on finite weights, and on one device.

Shapes: F=features, B=samples of this rank, L=ids.
"""

from __future__ import annotations

import copy
import operator
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autoshard.errors import InputError

_INTEGER_TYPES = (torch.int32, torch.int64)
_INT64 = torch.iinfo(torch.int64)


@dataclass(frozen=True, eq=False)
class JaggedBatch:
    """Ids of every feature for B samples, feature-major.

    int32 and int64 may be mixed; both are stored as int64.
    """

    feature_names: tuple[str, ...]
    lengths_FB: Tensor
    """Ids per bag, int64 [F, B]."""
    values_L: Tensor
    """Ids, int64 [L]: all bags of the first feature, then the second, …"""
    weights_L: Tensor | None = None
    """One weight per id, float32 [L]; ignored by tables that are not weighted."""
    num_ids_F: list[int] = field(init=False, repr=False)
    """Ids of each feature."""

    def __post_init__(self) -> None:
        names = tuple(self.feature_names)
        object.__setattr__(self, "feature_names", names)
        if len(set(names)) < len(names):
            duplicates = sorted(name for name, count in Counter(names).items() if count > 1)
            raise InputError("a batch names a feature twice", got=duplicates)
        object.__setattr__(self, "lengths_FB", _integers(self.lengths_FB, "lengths"))
        object.__setattr__(self, "values_L", _integers(self.values_L, "ids"))
        if self.lengths_FB.dim() != 2 or self.lengths_FB.shape[0] != len(names):
            raise InputError(
                "lengths do not have one row per feature",
                got=f"shape {tuple(self.lengths_FB.shape)} for {len(names)} features "
                f"({', '.join(names[:5])}{', …' if len(names) > 5 else ''})",
                allowed="shape [number of features, batch size]",
            )
        if self.values_L.dim() != 1:
            raise InputError(
                "ids are not a flat list", got=f"shape {tuple(self.values_L.shape)}", allowed="[L]"
            )
        if self.weights_L is not None and not isinstance(self.weights_L, Tensor):
            raise InputError("weights are not a tensor", got=type(self.weights_L).__name__)
        devices = {tensor.device for tensor in self._tensors()}
        if len(devices) > 1:
            raise InputError(
                "a batch lies on several devices",
                got=sorted(map(str, devices)),
                allowed="lengths, ids and weights on one",
            )
        object.__setattr__(self, "num_ids_F", self._checked_num_ids())
        if self.weights_L is not None:
            object.__setattr__(self, "weights_L", self._checked_weights(self.weights_L))

    def _checked_num_ids(self) -> list[int]:
        names, lengths_FB, num_ids = self.feature_names, self.lengths_FB, self.num_ids
        lowest, highest = torch.aminmax(lengths_FB) if lengths_FB.numel() else (0, 0)
        if lowest < 0:
            row, sample = (lengths_FB < 0).nonzero()[0].tolist()
            raise InputError(
                f"feature {names[row]!r}: the length of bag {sample} is negative",
                got=int(lengths_FB[row, sample]),
                allowed="integers >= 0",
            )
        # Sums of lengths that are huge wrap around, and might then look right.
        is_plausible = highest <= num_ids
        num_ids_F = (
            lengths_FB.sum(1).tolist()
            if is_plausible
            else [sum(row) for row in lengths_FB.tolist()]
        )
        if sum(num_ids_F) != num_ids:
            pairs = list(zip(names, num_ids_F, strict=True))
            shown = ", ".join(f"{name}: {count}" for name, count in pairs[:8])
            raise InputError(
                "lengths do not sum to the number of ids",
                got=f"{sum(num_ids_F)} from lengths ({shown}), {num_ids} ids",
                allowed="equal numbers",
            )
        return num_ids_F

    def _checked_weights(self, weights: Tensor) -> Tensor:
        if weights.dtype is torch.bool or weights.is_complex():
            raise InputError(
                "weights are not real numbers", got=weights.dtype, allowed="float32, or made it"
            )
        if weights.shape != self.values_L.shape:
            raise InputError(
                "weights do not match the ids",
                got=f"shape {tuple(weights.shape)}",
                allowed=f"one weight per id, [{self.num_ids}]",
            )
        weights_L = weights.detach().to(torch.float32)
        finite_L = weights_L.isfinite()
        if not finite_L.all():
            at = int(finite_L.logical_not().nonzero()[0])
            ends = torch.tensor(self.num_ids_F).cumsum(0)
            feature = self.feature_names[int(torch.searchsorted(ends, at, right=True))]
            raise InputError(
                f"feature {feature!r}: a weight is not finite",
                got=f"{float(weights_L[at])} for id {int(self.values_L[at])}",
                allowed="finite float32",
            )
        return weights_L

    @classmethod
    def from_bags(
        cls,
        bags: Mapping[str, Sequence[Sequence[int]]],
        weights: Mapping[str, Sequence[Sequence[float]]] | None = None,
    ) -> JaggedBatch:
        """Build a batch from nested lists, `{feature: [ids of sample 0, ids of sample 1, …]}`.

        Args:
            bags: every feature with the same number of samples.
            weights: like `bags`, for the features that carry weights; 1 elsewhere.

        Raises:
            InputError: features disagree on the number of samples, or weights on that of ids.
        """
        nested = {name: _nested(samples, f"feature {name!r}") for name, samples in bags.items()}
        sizes = {name: len(samples) for name, samples in nested.items()}
        if len(set(sizes.values())) > 1:
            raise InputError("features differ in their number of samples", got=sizes)
        lengths = torch.tensor(
            [[len(bag) for bag in samples] for samples in nested.values()], dtype=torch.int64
        ).reshape(len(nested), next(iter(sizes.values()), 0))
        values = [
            _id(value, name) for name, samples in nested.items() for bag in samples for value in bag
        ]
        flat_weights = None if weights is None else _flat_weights(nested, weights)
        return cls(tuple(nested), lengths, torch.tensor(values, dtype=torch.int64), flat_weights)

    @classmethod
    def empty(cls, feature_names: Sequence[str]) -> JaggedBatch:
        """A batch of 0 samples."""
        names = tuple(feature_names)
        return cls(
            names, torch.zeros(len(names), 0, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
        )

    @property
    def batch_size(self) -> int:
        """B."""
        return int(self.lengths_FB.shape[1])

    @property
    def num_ids(self) -> int:
        """L."""
        return int(self.values_L.numel())

    def to(self, device: torch.device) -> JaggedBatch:
        """The same batch on `device`."""
        if self.values_L.device == device:
            return self
        return self.with_tensors(lambda tensor: tensor.to(device))

    def with_tensors(self, function: Callable[[Tensor], Tensor]) -> JaggedBatch:
        """The same batch, every tensor replaced by a copy that `function` makes of it.

        Nothing is checked again: on CUDA, that would wait for copies under way.
        """
        moved = copy.copy(self)
        for name in ("lengths_FB", "values_L", "weights_L"):
            tensor = getattr(self, name)
            object.__setattr__(moved, name, None if tensor is None else function(tensor))
        return moved

    def _tensors(self) -> list[Tensor]:
        own = (self.lengths_FB, self.values_L, self.weights_L)
        return [tensor for tensor in own if tensor is not None]


def _integers(values: Tensor, what: str) -> Tensor:
    if not isinstance(values, Tensor):
        raise InputError(f"{what} are not a tensor", got=type(values).__name__)
    if values.dtype not in _INTEGER_TYPES:
        raise InputError(f"{what} are not whole numbers", got=values.dtype, allowed="int32, int64")
    return values.to(torch.int64)


def _nested(samples: Any, what: str) -> list[list[Any]]:
    """A list per sample; tensors and arrays will do for lists, text will not."""
    try:
        if any(isinstance(bag, str | bytes) for bag in samples):
            raise TypeError
        return [list(bag) for bag in samples]
    except TypeError as error:
        raise InputError(
            f"{what}: samples are not lists",
            got=repr(samples)[:60],
            allowed="one list per sample, such as [[3, 5], []]",
        ) from error


def _id(value: Any, feature: str) -> int:
    try:
        number = operator.index(value)
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not _INT64.min <= number <= _INT64.max:
        raise InputError(
            f"feature {feature!r}: an id is not a whole number of 64 bits",
            got=repr(value)[:60],
            allowed="integers",
        )
    return number


def _flat_weights(bags: Mapping[str, list[list[Any]]], weights: Mapping[str, Any]) -> Tensor:
    unknown = sorted(set(weights) - set(bags))
    if unknown:
        raise InputError(
            "there are weights for features that are not in the batch",
            got=unknown,
            allowed=", ".join(bags),
        )
    flat: list[float] = []
    for name, samples in bags.items():
        what = f"the weights of feature {name!r}"
        given = _nested(weights.get(name, [[1.0] * len(bag) for bag in samples]), what)
        if [len(bag) for bag in given] != [len(bag) for bag in samples]:
            raise InputError(f"feature {name!r}: weights do not match the ids")
        flat.extend(_weight(value, what) for bag in given for value in bag)
    return torch.tensor(flat, dtype=torch.float32)


def _weight(value: Any, what: str) -> float:
    try:
        if isinstance(value, bool | str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError, OverflowError) as error:
        raise InputError(f"{what} are not numbers", got=repr(value)[:60]) from error
