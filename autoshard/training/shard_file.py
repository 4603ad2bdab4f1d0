"""Rectangles of tables in a safetensors file: written piece by piece, read piece by piece.

The format is safetensors' own, so that its readers, which map the file into memory, give
any part of any rectangle. Only its writer is not used: it copies all tensors first, and a
rank's tables may fill most of its memory.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

#: Bytes that are copied at once.
PIECE_BYTES = 32 * 2**20
#: The `state` of a part that holds weights.
WEIGHTS = "weights"

_DTYPES = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}


@dataclass(frozen=True, kw_only=True)
class StoredPart:
    """One tensor of a file: weights or an optimizer state of a rectangle of a table."""

    table: str
    state: str
    """`WEIGHTS`, or the name of an optimizer state."""
    row_offset: int
    col_offset: int
    num_rows: int
    num_cols: int
    """Columns of the rectangle, also for a state that has one number per row."""

    @property
    def key(self) -> str:
        """The tensor's name in the file."""
        return f"{self.table}/{self.state}/{self.row_offset},{self.col_offset}"

    def to_json(self) -> dict[str, Any]:
        """The part as a plain dictionary."""
        return dict(vars(self))


@dataclass(frozen=True, kw_only=True)
class FileFacts:
    """What a manifest says of a file."""

    num_bytes: int
    sha256: str


def write_parts(
    path: Path,
    parts: Sequence[tuple[StoredPart, Tensor]],
    progress: Callable[[int, int], None] | None = None,
) -> FileFacts:
    """Write tensors as one safetensors file, through to the disk.

    Args:
        path: a new file.
        parts: each a tensor [num_rows, num_cols] or [num_rows], on any device, of any strides.
        progress: called with bytes written and bytes in all.

    Raises:
        OSError: the file cannot be written.
    """
    header: dict[str, Any] = {}
    end = 0
    for part, tensor in parts:
        start, end = end, end + tensor.numel() * tensor.element_size()
        header[part.key] = {
            "dtype": _DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [start, end],
        }
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # tensors begin at a multiple of 8
    digest = hashlib.sha256()
    written = 0
    with path.open("xb") as stream:
        for piece in _pieces(encoded, parts):
            stream.write(piece)
            digest.update(piece)
            written += len(piece)
            if progress is not None:
                progress(written, 8 + len(encoded) + end)
        stream.flush()
        os.fsync(stream.fileno())
    return FileFacts(num_bytes=written, sha256=digest.hexdigest())


def _pieces(header: bytes, parts: Sequence[tuple[StoredPart, Tensor]]) -> Iterator[bytes]:
    yield len(header).to_bytes(8, "little")
    yield header
    for _, tensor in parts:
        for rows in row_ranges(tensor.shape[0], _row_bytes(tensor)):
            piece = tensor[rows].detach().to("cpu").contiguous()
            yield piece.reshape(-1).view(torch.uint8).numpy().tobytes()


def row_ranges(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """Consecutive rows of at most `PIECE_BYTES` together, or one row."""
    step = max(1, PIECE_BYTES // max(1, row_bytes))
    for start in range(0, num_rows, step):
        yield slice(start, min(start + step, num_rows))


def _row_bytes(tensor: Tensor) -> int:
    return tensor.element_size() * (tensor.shape[1] if tensor.dim() == 2 else 1)


def digest_of(path: Path, progress: Callable[[int, int], None] | None = None) -> str:
    """The SHA-256 of a file, in hexadecimal."""
    digest = hashlib.sha256()
    total, read = path.stat().st_size, 0
    with path.open("rb") as stream:
        while piece := stream.read(PIECE_BYTES):
            digest.update(piece)
            read += len(piece)
            if progress is not None:
                progress(read, total)
    return digest.hexdigest()
