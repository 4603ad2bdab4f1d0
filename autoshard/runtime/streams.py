"""Jagged ids on the wire: a list of streams as one flat int64 tensor, and back.

    lengths of all bags, stream by stream | ids, stream by stream | weights, two in each int64

Only streams of weighted tables carry weights.

Shapes: S=streams, B=samples of one rank, G=samples of all ranks, L=ids of a stream.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, eq=False)
class GatheredStreams:
    """Streams of all ranks."""

    lengths_SG: Tensor
    """int64 [S, G], samples in the order of the ranks."""
    values_RS: list[Sequence[Tensor]]
    """Per source rank, per stream, ids, int64."""
    weights_RS: list[Sequence[Tensor]]
    """Per source rank, per stream, float32; empty for streams without weights."""

    def values(self, streams: Sequence[int]) -> Tensor:
        """The ids of the given streams, stream-major, each in the order of the ranks."""
        return torch.cat([values[s] for s in streams for values in self.values_RS])

    def weights(self, streams: Sequence[int]) -> Tensor:
        """The weights of the given streams, ordered like `values`."""
        return torch.cat([weights[s] for s in streams for weights in self.weights_RS])


def pack_weights(weights: Sequence[Tensor]) -> list[Tensor]:
    """The part of the wire that holds the weights, in a list; nothing if there are none."""
    if not weights:
        return []
    flat = torch.cat(list(weights))
    return [torch.nn.functional.pad(flat, (0, flat.numel() % 2)).view(torch.int64)]


def gather_streams(
    pieces: Sequence[Tensor], batch_sizes_R: Sequence[int], is_weighted: Sequence[bool]
) -> GatheredStreams:
    """Take apart what every rank sent.

    Args:
        pieces: per source rank, as described above.
        batch_sizes_R: samples of each source rank.
        is_weighted: per stream, whether it carries weights.
    """
    num_streams = len(is_weighted)
    lengths_R: list[Tensor] = []
    values_RS: list[Sequence[Tensor]] = []
    weights_RS: list[Sequence[Tensor]] = []
    for flat, batch_size in zip(pieces, batch_sizes_R, strict=True):
        start = num_streams * batch_size
        lengths_SB = flat[:start].view(num_streams, batch_size)
        counts = lengths_SB.sum(1).tolist()
        end = start + sum(counts)
        lengths_R.append(lengths_SB)
        values_RS.append(flat[start:end].split(counts))
        sizes = [c if heavy else 0 for c, heavy in zip(counts, is_weighted, strict=True)]
        weights_RS.append(flat[end:].view(torch.float32)[: sum(sizes)].split(sizes))
    return GatheredStreams(torch.cat(lengths_R, dim=1), values_RS, weights_RS)
