"""Published table lists: MLPerf's DLRM-DCNv2 and the Criteo click logs.

Rows, dimensions and multi-hot sizes are published; how ids repeat is not, so every table
takes the median law of `REUSE_2021` unless told otherwise. Names are those of TorchRec's
DLRM example: table `t_cat_0` is looked up by feature `cat_0`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autoshard.distributions import IdDistribution
from autoshard.tables import PoolingType, Table
from autoshard.workloads.production import scale_rows
from autoshard.workloads.registry import register_workload
from autoshard.workloads.reuse import REUSE_2021

#: mlcommons/training, recommendation_v2 (DLRM-DCNv2): rows and multi-hot sizes.
MLPERF_DCNV2_ROWS = (
    40_000_000, 39_060, 17_295, 7_424, 20_265, 3, 7_122, 1_543, 63, 40_000_000,
    3_067_956, 405_282, 10, 2_209, 11_938, 155, 4, 976, 14, 40_000_000,
    40_000_000, 40_000_000, 590_152, 12_973, 108, 36,
)  # fmt: skip
MLPERF_DCNV2_MULTI_HOT = (
    3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1,
)  # fmt: skip
#: Criteo Kaggle display advertising challenge, as counted by facebookresearch/dlrm.
CRITEO_KAGGLE_ROWS = (
    1_460, 583, 10_131_227, 2_202_608, 305, 24, 12_517, 633, 3, 93_145, 5_683,
    8_351_593, 3_194, 27, 14_992, 5_461_306, 10, 5_652, 2_173, 4, 7_046_547, 18, 15,
    286_181, 105, 142_572,
)  # fmt: skip
#: Criteo Terabyte with ids hashed to at most 10 million rows (facebookresearch/dlrm).
CRITEO_TERABYTE_10M_ROWS = (
    9_980_333, 36_084, 17_217, 7_378, 20_134, 3, 7_112, 1_442, 61, 9_758_201,
    1_333_352, 313_829, 10, 2_208, 11_156, 122, 4, 970, 14, 9_994_222,
    7_267_859, 9_946_608, 415_421, 12_420, 101, 36,
)  # fmt: skip
#: Criteo Terabyte with ids hashed to at most 40 million rows (MLPerf DLRM v1).
CRITEO_TERABYTE_40M_ROWS = (
    39_884_406, 39_043, 17_289, 7_420, 20_263, 3, 7_120, 1_543, 63, 38_532_951,
    2_953_546, 403_346, 10, 2_208, 11_938, 155, 4, 976, 14, 39_979_771,
    25_641_295, 39_664_984, 585_935, 12_972, 108, 36,
)  # fmt: skip


@register_workload("mlperf_dcnv2")
def mlperf_dcnv2(*, scale: float = 1.0, ids: IdDistribution | None = None) -> tuple[Table, ...]:
    """MLPerf DLRM-DCNv2: 26 tables of dimension 128, multi-hot.

    Args:
        scale: multiplies all rows, in (0, 1]; at least 1 row stays.
        ids: how ids are spread, for every table.

    Raises:
        InputError: `scale` is out of range.
    """
    return _tables(MLPERF_DCNV2_ROWS, 128, MLPERF_DCNV2_MULTI_HOT, scale, ids)


@register_workload("criteo_kaggle")
def criteo_kaggle(*, scale: float = 1.0, ids: IdDistribution | None = None) -> tuple[Table, ...]:
    """Criteo Kaggle: 26 one-hot tables of dimension 16. See `mlperf_dcnv2`."""
    return _tables(CRITEO_KAGGLE_ROWS, 16, (1,) * 26, scale, ids)


@register_workload("criteo_terabyte")
def criteo_terabyte(*, scale: float = 1.0, ids: IdDistribution | None = None) -> tuple[Table, ...]:
    """Criteo Terabyte, 40M rows at most: 26 one-hot tables of dimension 128."""
    return _tables(CRITEO_TERABYTE_40M_ROWS, 128, (1,) * 26, scale, ids)


@register_workload("criteo_terabyte_10m")
def criteo_terabyte_10m(
    *, scale: float = 1.0, ids: IdDistribution | None = None
) -> tuple[Table, ...]:
    """Criteo Terabyte, 10M rows at most: 26 one-hot tables of dimension 64."""
    return _tables(CRITEO_TERABYTE_10M_ROWS, 64, (1,) * 26, scale, ids)


def _tables(
    rows: Sequence[int],
    embedding_dim: int,
    multi_hot: Sequence[int],
    scale: float,
    ids: IdDistribution | None,
) -> tuple[Table, ...]:
    scaled = scale_rows(np.array(rows, dtype=np.int64), scale)
    return tuple(
        Table(
            name=f"t_cat_{index}",
            feature_names=(f"cat_{index}",),
            num_embeddings=int(num_embeddings),
            embedding_dim=embedding_dim,
            pooling_factor=float(hot),
            pooling=PoolingType.SUM,
            ids=ids if ids is not None else REUSE_2021.distribution(int(num_embeddings)),
        )
        for index, (num_embeddings, hot) in enumerate(zip(scaled, multi_hot, strict=True))
    )
