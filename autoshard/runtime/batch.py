"""A rank's local batch: jagged ids per named feature, checked once at the boundary.

Everything behind this file may rely on int64, on lengths that sum to the number of
ids, and on one device.

Shapes: F=features, B=samples of this rank, L=ids.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from autoshard.errors import InputError

_INTEGER_TYPES = (torch.int32, torch.int64)


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
        if self.lengths_FB.numel() and int(self.lengths_FB.min()) < 0:
            row, sample = (self.lengths_FB < 0).nonzero()[0].tolist()
            raise InputError(
                f"feature {names[row]!r}: the length of bag {sample} is negative",
                got=int(self.lengths_FB[row, sample]),
                allowed="integers >= 0",
            )
        object.__setattr__(self, "num_ids_F", self.lengths_FB.sum(1).tolist())
        total = sum(self.num_ids_F)
        if total != self.values_L.numel():
            per_feature = dict(zip(names, self.num_ids_F, strict=True))
            shown = ", ".join(f"{name}: {count}" for name, count in list(per_feature.items())[:8])
            raise InputError(
                "lengths do not sum to the number of ids",
                got=f"{total} from lengths ({shown}), {self.values_L.numel()} ids",
                allowed="equal numbers",
            )
        if self.weights_L is not None:
            if self.weights_L.shape != self.values_L.shape:
                raise InputError(
                    "weights do not match the ids",
                    got=f"shape {tuple(self.weights_L.shape)}",
                    allowed=f"one weight per id, [{self.values_L.numel()}]",
                )
            object.__setattr__(self, "weights_L", self.weights_L.detach().to(torch.float32))

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
        sizes = {name: len(samples) for name, samples in bags.items()}
        if len(set(sizes.values())) > 1:
            raise InputError("features differ in their number of samples", got=sizes)
        lengths = torch.tensor(
            [[len(bag) for bag in samples] for samples in bags.values()], dtype=torch.int64
        ).reshape(len(bags), next(iter(sizes.values()), 0))
        values = [value for samples in bags.values() for bag in samples for value in bag]
        flat_weights: Tensor | None = None
        if weights is not None:
            flat: list[float] = []
            for name, samples in bags.items():
                given = weights.get(name, [[1.0] * len(bag) for bag in samples])
                if [len(w) for w in given] != [len(bag) for bag in samples]:
                    raise InputError(f"feature {name!r}: weights do not match the ids")
                flat.extend(w for bag in given for w in bag)
            flat_weights = torch.tensor(flat, dtype=torch.float32)
        return cls(tuple(bags), lengths, torch.tensor(values, dtype=torch.int64), flat_weights)

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
        if self.values_L.device == device and self.lengths_FB.device == device:
            return self
        weights = None if self.weights_L is None else self.weights_L.to(device)
        return JaggedBatch(
            self.feature_names, self.lengths_FB.to(device), self.values_L.to(device), weights
        )


def _integers(values: Tensor, what: str) -> Tensor:
    if not isinstance(values, Tensor):
        raise InputError(f"{what} are not a tensor", got=type(values).__name__)
    if values.dtype not in _INTEGER_TYPES:
        raise InputError(f"{what} are not whole numbers", got=values.dtype, allowed="int32, int64")
    return values.to(torch.int64)
