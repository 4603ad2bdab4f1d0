"""Initial weights that depend on the seed and the table, not on where its rows lie.

Any shard of a table can draw its own rows without the rest, and replicas start equal.
"""

from __future__ import annotations

import hashlib
import math

import torch
from torch import Tensor

from autoshard.tables import Table

#: Elements, in whole rows, that share one random stream. A shard draws the blocks it overlaps.
BLOCK_ELEMENTS = 2**20


def initialize_rows(
    weights: Tensor, table: Table, *, seed: int, row_offset: int = 0, col_offset: int = 0
) -> None:
    """Fill `weights` with the table's initial values, uniform in ±1/sqrt(num_embeddings).

    Args:
        weights: a view [rows, columns] of the shard, any float dtype.
        table: the table that the shard belongs to.
        seed: of the run.
        row_offset: the shard's first row in the table.
        col_offset: the shard's first column in the table.
    """
    bound = 1.0 / math.sqrt(table.num_embeddings)
    num_rows, num_cols = weights.shape
    block_rows = max(1, BLOCK_ELEMENTS // table.embedding_dim)
    first, last = row_offset, row_offset + num_rows
    for start in range(first - first % block_rows, last, block_rows):
        end = min(start + block_rows, table.num_embeddings)
        block = torch.empty(end - start, table.embedding_dim)
        block.uniform_(-bound, bound, generator=_generator(seed, table.name, start // block_rows))
        low, high = max(start, first), min(end, last)
        weights[low - first : high - first].copy_(
            block[low - start : high - start, col_offset : col_offset + num_cols]
        )


def _generator(seed: int, name: str, block: int) -> torch.Generator:
    digest = hashlib.sha256(f"{seed}/{block}/{name}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "big") >> 1)
