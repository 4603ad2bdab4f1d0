"""How often ids repeat: laws from which each generated table draws its id distribution.

Reuse decides how many distinct rows a batch touches and so what a kernel costs. The
facebookresearch/dlrm_datasets repository publishes, for real embedding lookups, the
share of distinct rows and of lookups in each bin of reuse (`locality_stats.txt`). The
laws here were fitted so that the expected histogram over `dlrm_tables` at the published
batch size matches. Only the sum over all tables is published, so only the sum is
matched: how single tables differ around it is a modelling choice.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from autoshard.distributions import IdDistribution

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class ReuseLaw:
    """A distribution of Zipf-Mandelbrot parameters over tables.

    exponent ~ Normal(exponent_mean, exponent_std), at least 0;
    log10(shift) ~ Normal(log_shift_at_one + log_shift_slope · log10(num_embeddings),
    log_shift_std): the bigger the table, the more rows share the top of its curve.
    """

    exponent_mean: float
    exponent_std: float
    log_shift_at_one: float
    log_shift_slope: float
    log_shift_std: float

    def distribution(
        self, num_embeddings: int, exponent_normal: float = 0.0, shift_normal: float = 0.0
    ) -> IdDistribution:
        """The id distribution of one table.

        Args:
            num_embeddings: rows of the table.
            exponent_normal: standard normal draw for the exponent; 0 is the median table.
            shift_normal: standard normal draw for the shift.
        """
        exponent = self.exponent_mean + self.exponent_std * exponent_normal
        log_shift = (
            self.log_shift_at_one
            + self.log_shift_slope * np.log10(num_embeddings)
            + self.log_shift_std * shift_normal
        )
        # Rounded, so that a table list written as text stays short.
        return IdDistribution(
            zipf_exponent=round(max(float(exponent), 0.0), 6),
            zipf_shift=float(f"{10.0**log_shift:.6g}"),
        )


#: Fitted to `2021/fbgemm_t856_bs65536` (856 tables × 65,536 samples). Over 16,000 tables of
#: `dlrm_tables`, each bin's share is within 0.013 (rows) and 0.017 (lookups) of the published.
REUSE_2021 = ReuseLaw(
    exponent_mean=2.43,
    exponent_std=0.24,
    log_shift_at_one=-0.24,
    log_shift_slope=0.894,
    log_shift_std=0.10,
)
#: Fitted to `2022/fbgemm_t788_bs131072_0` (788 tables × 131,072 samples): within 0.046 and
#: 0.029. The worst bin is that of rows seen once, which the law makes too common.
REUSE_2022 = ReuseLaw(
    exponent_mean=3.52,
    exponent_std=0.24,
    log_shift_at_one=0.053,
    log_shift_slope=0.845,
    log_shift_std=0.62,
)
