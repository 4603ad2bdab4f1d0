"""Embedding tables: the input of everything else."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from autoshard.distributions import IdDistribution
from autoshard.errors import InputError, quoted
from autoshard.files import fingerprint


class DataType(Enum):
    """Element type of the weights."""

    FP32 = "fp32"
    FP16 = "fp16"
    BF16 = "bf16"

    @property
    def num_bytes(self) -> int:
        """Bytes per element."""
        return 4 if self is DataType.FP32 else 2


class PoolingType(Enum):
    """How the rows of one bag are combined."""

    SUM = "sum"
    MEAN = "mean"


class BagLengths(Enum):
    """How the number of ids per bag varies around `pooling_factor`."""

    CONSTANT = "constant"
    """The two whole numbers around the pooling factor, in the shares that give the mean."""
    POISSON = "poisson"


#: The longest table or feature name; long enough for anybody, short enough for a terminal.
MAX_NAME_LENGTH = 256
#: Rows and columns are int64 in every kernel and on disk.
MAX_COUNT = 2**62
#: More ids than any bag has; keeps every product with batch and ranks finite.
MAX_POOLING_FACTOR = 2.0**40


#: Unicode categories of what is invisible, reorders the text around it or has no meaning that
#: everybody shares: control, format (such as U+202E), surrogate, private use, not assigned,
#: and the separators of lines and paragraphs.
_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp")


def hidden_characters(name: str) -> list[str]:
    """What a name must not hold, such as "U+202E"; letters of every script are fine."""
    return [
        f"U+{ord(character):04X}"
        for character in name
        if unicodedata.category(character) in _HIDDEN_CATEGORIES
    ]


def _is_name(name: object) -> bool:
    """Whether every format can hold it, and it looks on every terminal like what it is."""
    return (
        isinstance(name, str) and 0 < len(name) <= MAX_NAME_LENGTH and not hidden_characters(name)
    )


@dataclass(frozen=True, kw_only=True)
class Table:
    """One embedding table and how it is looked up."""

    name: str
    num_embeddings: int
    """Rows, >= 1."""
    embedding_dim: int
    """Columns, >= 1."""
    pooling_factor: float
    """Mean ids per sample *and feature*, >= 0, fractional allowed."""
    feature_names: tuple[str, ...] = ()
    """Features that look this table up; the table's own name by default."""
    data_type: DataType = DataType.FP32
    pooling: PoolingType = PoolingType.SUM
    weighted: bool = False
    """Whether each id carries a weight."""
    ids: IdDistribution = field(default_factory=IdDistribution)
    bag_lengths: BagLengths = BagLengths.CONSTANT

    def __post_init__(self) -> None:
        if not _is_name(self.name):
            raise InputError(
                "a table name is not usable",
                got=quoted(self.name),
                allowed=f"printable text of 1 to {MAX_NAME_LENGTH} characters",
            )
        if not self.feature_names:
            object.__setattr__(self, "feature_names", (self.name,))
        for column in ("num_embeddings", "embedding_dim"):
            value = getattr(self, column)
            if isinstance(value, bool) or not isinstance(value, int):
                raise InputError(
                    f"table {self.name!r}: {column} is not a whole number",
                    got=quoted(value),
                    allowed="integers >= 1",
                )
            if not 1 <= value <= MAX_COUNT:
                raise InputError(
                    f"table {self.name!r}: {column} is out of range",
                    got=value,
                    allowed="integers >= 1 (below 2^62)",
                )
        pooling_factor = self.pooling_factor
        if (
            isinstance(pooling_factor, bool)
            or not isinstance(pooling_factor, int | float)
            or not 0 <= pooling_factor <= MAX_POOLING_FACTOR
        ):
            raise InputError(
                f"table {self.name!r}: pooling_factor is not usable",
                got=quoted(pooling_factor),
                allowed="a finite number >= 0 (up to 2^40)",
            )
        if not all(_is_name(feature) for feature in self.feature_names):
            raise InputError(
                f"table {self.name!r}: a feature name is not usable",
                got=quoted(self.feature_names),
                allowed=f"printable text of 1 to {MAX_NAME_LENGTH} characters",
            )
        if len(set(self.feature_names)) != len(self.feature_names):
            raise InputError(f"table {self.name!r} names a feature twice", got=self.feature_names)

    @property
    def num_features(self) -> int:
        """How many features look this table up."""
        return len(self.feature_names)

    @property
    def lookups_per_sample(self) -> float:
        """Mean ids per sample over all features."""
        return self.pooling_factor * self.num_features

    @property
    def weight_bytes(self) -> int:
        """Bytes of the unpadded weights."""
        return self.num_embeddings * self.embedding_dim * self.data_type.num_bytes

    def to_json(self) -> dict[str, Any]:
        """The table as a plain dictionary; id distribution and bag lengths included."""
        return {
            "name": self.name,
            "feature_names": list(self.feature_names),
            "num_embeddings": self.num_embeddings,
            "embedding_dim": self.embedding_dim,
            "pooling_factor": float(self.pooling_factor),
            "pooling": self.pooling.value,
            "data_type": self.data_type.value,
            "weighted": self.weighted,
            "ids": self.ids.to_json(),
            "bag_lengths": self.bag_lengths.value,
        }


def check_tables(tables: Iterable[Table]) -> tuple[Table, ...]:
    """Return the tables as a tuple.

    Raises:
        InputError: there are none, or two share a name.
    """
    tables = tuple(tables)
    if not tables:
        raise InputError("the table list is empty", remedy="give at least one table")
    seen: set[str] = set()
    for table in tables:
        if table.name in seen:
            raise InputError(
                f"duplicate table name {table.name!r}", remedy="give each table its own name"
            )
        seen.add(table.name)
    return tables


def tables_fingerprint(tables: Iterable[Table]) -> str:
    """Identifies a table list, whatever its order."""
    return fingerprint(sorted((table.to_json() for table in tables), key=lambda t: t["name"]))
