"""FBGEMM, imported only where tables are allocated: planning works without it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autoshard.errors import DependencyError


@dataclass(frozen=True)
class Fbgemm:
    """The names of FBGEMM that the kernel needs."""

    SplitTableBatchedEmbeddingBagsCodegen: Any
    BoundsCheckMode: Any
    ComputeDevice: Any
    EmbeddingLocation: Any
    OptimType: Any
    PoolingMode: Any
    SparseType: Any


def load_fbgemm() -> Fbgemm:
    """Import FBGEMM, which also registers its operators with torch.

    Raises:
        DependencyError: it is missing or does not load.
    """
    try:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            BoundsCheckMode,
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
        )
    except (ImportError, OSError) as error:
        raise DependencyError(
            "running a plan needs FBGEMM, which is missing or does not load",
            got=str(error).splitlines()[0] if str(error) else type(error).__name__,
            allowed="fbgemm-gpu-cpu 1.8.0 or fbgemm-gpu 1.8.0 with torch 2.13",
            remedy="pip install 'autoshard[cpu]' (or 'autoshard[cuda]'), then autoshard doctor",
        ) from error
    return Fbgemm(
        SplitTableBatchedEmbeddingBagsCodegen=SplitTableBatchedEmbeddingBagsCodegen,
        BoundsCheckMode=BoundsCheckMode,
        ComputeDevice=ComputeDevice,
        EmbeddingLocation=EmbeddingLocation,
        OptimType=EmbOptimType,
        PoolingMode=PoolingMode,
        SparseType=SparseType,
    )
