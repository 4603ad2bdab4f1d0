"""DLRM, the model that is trained on top of sharded tables: its dense layers.

Naumov et al., "Deep Learning Recommendation Model for Personalization and Recommendation
Systems", 2019, arXiv:1906.00091.

    numeric features ─► bottom MLP ─┐
    pooled outputs ─► projections ──┴─► pairwise dot products ─► top MLP ─► logit

Shapes: B=samples of this rank, N=numeric features, D=interaction dimension, V=vectors that
interact, P=their pairs, V·(V-1)/2.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from autoshard.errors import InputError
from autoshard.runtime.dense import DenseOutput, TrainingBatch, logistic_loss


class DLRM(nn.Module):
    """The dense part of DLRM, called as `dense(pooled, batch)`.

    Where the paper leaves things open, or assumes what a plan may not have:

    - Tables may differ in `embedding_dim`, while dot products need equal lengths. Outputs
      of another dimension than D pass through a linear projection to D without a bias.
    - Without numeric features, a learned vector takes the place of the bottom MLP's
      output. So the effect of a single row can be expressed in either case.
    - Outputs interact in the order of their names, so that tables may change places in a
      plan without changing the model.
    """

    def __init__(
        self,
        output_dims: Mapping[str, int],
        *,
        num_numeric: int = 0,
        interaction_dim: int | None = None,
        bottom: Sequence[int] = (64,),
        top: Sequence[int] = (64,),
        seed: int = 0,
    ) -> None:
        """Build the layers; equal arguments give equal weights, on any number of ranks.

        Args:
            output_dims: columns of each pooled output, by name.
            num_numeric: N; 0 for none.
            interaction_dim: D; by default the dimension that most outputs have, the
                largest of several.
            bottom: widths of the bottom MLP's hidden layers; D is added as its last.
            top: widths of the top MLP's hidden layers.
            seed: of the initial weights.

        Raises:
            InputError: a width is not usable, or there are no outputs.
        """
        super().__init__()
        if not output_dims:
            raise InputError("DLRM needs at least one pooled output")
        widths = (*bottom, *top, *([interaction_dim] if interaction_dim is not None else []))
        if num_numeric < 0 or any(
            isinstance(width, bool) or not isinstance(width, int) or width < 1 for width in widths
        ):
            raise InputError(
                "the sizes of DLRM are not usable",
                got=f"{num_numeric} numeric features, interaction_dim {interaction_dim}, "
                f"bottom {tuple(bottom)}, top {tuple(top)}",
                allowed="integers >= 1; numeric features >= 0",
            )
        self.output_names = tuple(sorted(output_dims))
        self.num_numeric = num_numeric
        if interaction_dim is None:
            counts = Counter(output_dims.values())
            interaction_dim = max(counts, key=lambda dim: (counts[dim], dim))
        self.interaction_dim = interaction_dim
        self.projections = nn.ModuleList(
            nn.Identity()
            if output_dims[name] == interaction_dim
            else nn.Linear(output_dims[name], interaction_dim, bias=False)
            for name in self.output_names
        )
        self.bottom: nn.Module | None = None
        self.bottom_vector_D: nn.Parameter | None = None
        if num_numeric:
            self.bottom = _mlp([num_numeric, *bottom, interaction_dim], last_relu=True)
        else:
            self.bottom_vector_D = nn.Parameter(torch.empty(interaction_dim))
        num_vectors = len(self.output_names) + 1
        rows, columns = torch.tril_indices(num_vectors, num_vectors, offset=-1)
        self.register_buffer("_pairs_P", rows * num_vectors + columns, persistent=False)
        num_pairs = num_vectors * (num_vectors - 1) // 2
        self.top = _mlp([interaction_dim + num_pairs, *top, 1], last_relu=False)
        self._initialize(seed)

    def forward(self, pooled: Mapping[str, Tensor], batch: TrainingBatch) -> DenseOutput:
        """The logits and their mean logistic loss over the local batch.

        Args:
            pooled: by output name, float32 [B, embedding_dim].
            batch: for numeric features and labels.

        Raises:
            InputError: the batch has another number of numeric features.
        """
        vectors = [
            projection(pooled[name])
            for name, projection in zip(self.output_names, self.projections, strict=True)
        ]
        bottom_BD = self._bottom(batch, vectors[0])
        vectors_BVD = torch.stack([bottom_BD, *vectors], dim=1)
        products_BVV = torch.bmm(vectors_BVD, vectors_BVD.transpose(1, 2))
        pairs_BP = products_BVV.flatten(1).index_select(1, self.get_buffer("_pairs_P"))
        logits_B = self.top(torch.cat([bottom_BD, pairs_BP], dim=1))[:, 0]
        return DenseOutput(logistic_loss(logits_B, batch.labels_B), logits_B)

    def _bottom(self, batch: TrainingBatch, like: Tensor) -> Tensor:
        numeric_BN = batch.dense_BN
        got = 0 if numeric_BN is None else numeric_BN.shape[1]
        if got != self.num_numeric and batch.sparse.batch_size:
            raise InputError(
                "the batch has another number of numeric features than the model",
                got=got,
                allowed=self.num_numeric,
            )
        if self.bottom is None:
            assert self.bottom_vector_D is not None
            return self.bottom_vector_D.expand(like.shape[0], -1)
        if numeric_BN is None or got != self.num_numeric:  # an empty batch
            numeric_BN = like.new_zeros(0, self.num_numeric)
        bottom_BD: Tensor = self.bottom(numeric_BN.to(like.device))
        return bottom_BD

    def _initialize(self, seed: int) -> None:
        """Normal, as in facebookresearch/dlrm: variance 2 / (in + out), of biases 1 / out."""
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            if self.bottom_vector_D is not None:
                self.bottom_vector_D.normal_(0, self.interaction_dim**-0.5, generator=generator)
            for layer in self.modules():
                if isinstance(layer, nn.Linear):
                    fan = layer.in_features + layer.out_features
                    layer.weight.normal_(0, (2 / fan) ** 0.5, generator=generator)
                    if layer.bias is not None:
                        layer.bias.normal_(0, layer.out_features**-0.5, generator=generator)


def _mlp(widths: Sequence[int], *, last_relu: bool) -> nn.Sequential:
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*(layers if last_relu else layers[:-1]))
