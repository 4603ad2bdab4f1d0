"""How ids are drawn: the index stream of a table, and what follows from it.

Every distribution is a list of buckets: `num_rows` rows that share
`lookup_share` of all lookups evenly. From the buckets come, in closed form,
the expected number of distinct rows in n lookups and the histogram of reuse
(how often a row that occurs at all occurs), which are features of the cost
model, and the ids themselves, which the kernels are measured with.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.special import gammainc

from autoshard.errors import InputError, quoted

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]

#: Upper edges of the 17 reuse bins (0,1], (1,2], (2,4] … (16384,32768], >32768
#: of the dlrm_datasets locality statistics.
REUSE_BIN_EDGES: tuple[float, ...] = (*(float(2**k) for k in range(16)), math.inf)
NUM_REUSE_BINS = len(REUSE_BIN_EDGES)


@dataclass(frozen=True, kw_only=True)
class IdDistribution:
    """How the ids of one table are spread over its rows.

    Either a Zipf-Mandelbrot law, P(k-th hottest row) ∝ (k + zipf_shift)^(-zipf_exponent),
    or explicit buckets as measured from a trace. `zipf_exponent` 0 is uniform.
    """

    zipf_exponent: float = 0.0
    """>= 0; the slope of log popularity over log rank."""
    zipf_shift: float = 0.0
    """>= 0, in rows; flattens the head of the law."""
    bucket_rows: tuple[int, ...] = ()
    """Rows in each measured bucket, hottest first; empty for a Zipf law."""
    bucket_shares: tuple[float, ...] = ()
    """Share of all lookups that falls into each bucket; sums to 1."""

    def __post_init__(self) -> None:
        for name in ("zipf_exponent", "zipf_shift"):
            value = getattr(self, name)
            if not (isinstance(value, int | float) and math.isfinite(value) and value >= 0):
                raise InputError(f"{name} is not usable", got=value, allowed="a finite number >= 0")
        if len(self.bucket_rows) != len(self.bucket_shares):
            raise InputError(
                "bucket_rows and bucket_shares differ in length",
                got=f"{len(self.bucket_rows)} and {len(self.bucket_shares)}",
                allowed="equal lengths",
            )
        if self.bucket_rows:
            if any(
                isinstance(rows, bool) or not isinstance(rows, int) or rows < 1
                for rows in self.bucket_rows
            ):
                raise InputError(
                    "bucket_rows is not usable", got=self.bucket_rows, allowed="integers >= 1"
                )
            if any(not math.isfinite(share) or share < 0 for share in self.bucket_shares):
                raise InputError(
                    "bucket_shares is not usable", got=self.bucket_shares, allowed="numbers >= 0"
                )
            if abs(sum(self.bucket_shares) - 1.0) > 1e-6:
                raise InputError(
                    "bucket_shares do not sum to 1", got=sum(self.bucket_shares), allowed=1.0
                )

    @property
    def is_measured(self) -> bool:
        """Whether the distribution was measured from a trace."""
        return bool(self.bucket_rows)

    def buckets(self, num_embeddings: int) -> tuple[FloatArray, FloatArray]:
        """Rows and lookup share of each bucket for a table of `num_embeddings` rows.

        Returns:
            `rows_K` (whole numbers >= 1) and `shares_K` (sums to 1), float64, hottest first.
            Measured buckets that hold more rows than the table are scaled down.
        """
        return _buckets(self, num_embeddings)

    def to_json(self) -> dict[str, Any]:
        """A plain dictionary, without fields at their defaults."""
        if self.is_measured:
            return {
                "bucket_rows": list(self.bucket_rows),
                "bucket_shares": list(self.bucket_shares),
            }
        return {"zipf_exponent": self.zipf_exponent, "zipf_shift": self.zipf_shift}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> IdDistribution:
        """The inverse of `to_json`.

        Raises:
            InputError: an unknown key, or a value that is not usable.
        """
        if not isinstance(value, Mapping):
            raise InputError("an id distribution must be an object", got=quoted(value))
        known = {"zipf_exponent", "zipf_shift", "bucket_rows", "bucket_shares"}
        if unknown := sorted(set(value) - known):
            raise InputError(
                "unknown key in an id distribution", got=unknown, allowed=sorted(known)
            )
        try:
            return cls(
                zipf_exponent=_number(value.get("zipf_exponent", 0.0)),
                zipf_shift=_number(value.get("zipf_shift", 0.0)),
                bucket_rows=tuple(value.get("bucket_rows", ())),
                bucket_shares=tuple(map(_number, value.get("bucket_shares", ()))),
            )
        except TypeError as error:
            raise InputError("an id distribution is malformed", got=quoted(value)) from error


def _number(value: object) -> float:
    """A JSON number; text that looks like one is none."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{quoted(value)} is not a number")
    return float(value)


@lru_cache(maxsize=65_536)
def _buckets(ids: IdDistribution, num_embeddings: int) -> tuple[FloatArray, FloatArray]:
    if ids.is_measured:
        rows = np.array(ids.bucket_rows, dtype=np.float64)
        shares = np.array(ids.bucket_shares, dtype=np.float64)
        if rows.sum() > num_embeddings:
            # A table that was scaled down keeps the shape of its popularity curve.
            edges = np.unique(np.round(np.cumsum(rows) * num_embeddings / rows.sum()))
            position = np.concatenate([[0.0], np.cumsum(rows)]) * num_embeddings / rows.sum()
            mass = np.concatenate([[0.0], np.cumsum(shares)])
            edges = np.concatenate([[0.0], edges[edges >= 1]])
            rows, shares = np.diff(edges), np.diff(np.interp(edges, position, mass))
    elif ids.zipf_exponent == 0.0:
        rows, shares = np.array([float(num_embeddings)]), np.array([1.0])
    else:
        rows, shares = _zipf_buckets(ids.zipf_exponent, ids.zipf_shift, num_embeddings)
    if shares.sum() == 0.0:  # so steep that all shares underflow: the hottest row has everything
        shares = np.zeros_like(shares)
        shares[0] = 1.0
    shares = shares / shares.sum()
    rows.setflags(write=False)
    shares.setflags(write=False)
    return rows, shares


def _zipf_buckets(
    exponent: float, shift: float, num_embeddings: int
) -> tuple[FloatArray, FloatArray]:
    """The 16 hottest rows one by one, then buckets that grow by a quarter each."""
    edges = [float(k) for k in range(min(16, num_embeddings) + 1)]
    while edges[-1] < num_embeddings:
        edges.append(min(float(num_embeddings), math.ceil(edges[-1] * 1.25)))
    edge = np.array(edges)
    # Integrate the density between bucket edges, half a row early: exact enough
    # for wide buckets and finite at k = 0. Single rows get their exact share below.
    x = edge + shift + 0.5
    # Relative to the first edge, so that large shifts neither overflow nor cancel.
    log_x = np.log(x / x[0])
    if abs(exponent - 1.0) < 1e-9:
        primitive = log_x
    else:
        primitive = np.expm1((1.0 - exponent) * log_x) / (1.0 - exponent)
    shares = np.maximum(np.diff(primitive), 0.0)
    rows = np.diff(edge)
    single = rows == 1.0
    shares[single] = ((edge[1:][single] + shift) / x[0]) ** -exponent / x[0]
    return rows, shares


def expected_unique_rows(
    ids: IdDistribution, num_embeddings: int, num_lookups: float, row_share: float = 1.0
) -> float:
    """Expected number of distinct rows among `num_lookups` lookups.

    Args:
        ids: the distribution.
        num_embeddings: rows of the whole table.
        num_lookups: lookups into the whole table, may be fractional, >= 0.
        row_share: the share of rows (evenly over all buckets) that is counted.

    Returns:
        Σ_k rows_k · (1 − exp(−n·share_k/rows_k)): each row is hit a Poisson number of times.
    """
    rows, shares = ids.buckets(num_embeddings)
    return float(np.sum(-rows * np.expm1(-num_lookups * shares / rows)) * row_share)


def reuse_histogram(
    ids: IdDistribution, num_embeddings: int, num_lookups: float
) -> tuple[FloatArray, FloatArray]:
    """Expected reuse histogram over `REUSE_BIN_EDGES` in `num_lookups` lookups.

    A row that occurs c times belongs to the bin (lower, upper] with lower < c <= upper.

    Returns:
        Share of distinct rows and share of lookups in each bin, float64 [17];
        both sum to 1, or are all 0 when there are no lookups.
    """
    rows, shares = ids.buckets(num_embeddings)
    rate = num_lookups * shares / rows
    at_most = np.array(REUSE_BIN_EDGES[:-1])
    # P(count <= c) of a Poisson is the upper incomplete gamma Q(c + 1, rate);
    # E[count; count <= c] = rate · P(count <= c − 1).
    cdf = 1.0 - gammainc(at_most[None, :] + 1.0, rate[:, None])
    first = rate[:, None] * (1.0 - gammainc(at_most[None, :], rate[:, None]))
    zero = np.exp(-rate)[:, None]
    one = np.ones_like(zero)
    row_mass = np.diff(np.concatenate([zero, cdf, one], axis=1), axis=1)
    lookup_mass = np.diff(
        np.concatenate([np.zeros_like(zero), first, rate[:, None]], axis=1), axis=1
    )
    row_bins = np.maximum(rows @ row_mass, 0.0)
    lookup_bins = np.maximum(rows @ lookup_mass, 0.0)
    return (
        row_bins / row_bins.sum() if row_bins.sum() > 0 else row_bins,
        lookup_bins / lookup_bins.sum() if lookup_bins.sum() > 0 else lookup_bins,
    )


def sample_ids(
    ids: IdDistribution, num_embeddings: int, num_lookups: int, generator: np.random.Generator
) -> IntArray:
    """Draw ids, int64 [num_lookups], in [0, num_embeddings).

    The hottest rows are scattered over the table by a fixed bijection, as hashing does.
    """
    rows, shares = ids.buckets(num_embeddings)
    # Invert the cumulative distribution, which is linear inside a bucket.
    position = np.concatenate([[0.0], np.cumsum(rows)])
    mass = np.concatenate([[0.0], np.cumsum(shares)])
    rank = np.interp(generator.random(num_lookups), mass, position).astype(np.int64)
    last = min(int(position[-1]), num_embeddings) - 1
    return scatter_rows(np.minimum(rank, last), num_embeddings)


def scatter_rows(rank: IntArray, num_embeddings: int) -> IntArray:
    """Map popularity ranks to row numbers, one to one: row = rank · m mod num_embeddings.

    m is the integer nearest num_embeddings / golden ratio that is coprime to it.
    """
    multiplier = max(1, round(num_embeddings * 0.6180339887498949))
    while math.gcd(multiplier, num_embeddings) != 1:
        multiplier += 1
    # In pieces of the multiplier that cannot overflow int64: one piece below 2^31 rows.
    bits = max(1, 62 - num_embeddings.bit_length())
    num_pieces = -(-multiplier.bit_length() // bits)
    if num_pieces == 1:
        return (rank * multiplier) % num_embeddings
    row = np.zeros_like(rank)
    for piece in reversed(range(num_pieces)):
        digit = (multiplier >> (piece * bits)) & ((1 << bits) - 1)
        row = ((row << bits) % num_embeddings + (rank * digit) % num_embeddings) % num_embeddings
    return row
