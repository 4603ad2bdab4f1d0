"""Fits the coefficients of `AnalyticCostModel` to measurements: a model that needs no network."""

from __future__ import annotations

import numpy as np

from autoshard.cost_models.analytic import AnalyticCostModel
from autoshard.cost_models.ranges import MeasuredRange
from autoshard.objective import CostSource
from cost_net.baselines import linear_weights
from cost_net.collective_training import physical_weights
from cost_net.dataset import MeasuredData

#: Bandwidth where more bytes never took longer.
_NO_LIMIT_BYTES_PER_MS = 1e15


def fit_analytic(data: MeasuredData, *, name: str = "fitted") -> AnalyticCostModel:
    """Fit to the training rows: kernels by relative least squares, all-to-alls robustly.

    Args:
        data: from `cost_net.dataset.load_measurements`.
        name: of the model.
    """
    kernels = data.kernels.split("train")
    weights_KP = linear_weights(kernels)  # work, then shards, then a constant
    exchanges = data.collectives.of(~data.collectives.test_M)
    busiest_M = exchanges.traffic_MC[:, 1:3].max(axis=1)
    terms_MK = np.stack([np.ones_like(busiest_M), busiest_M], axis=1)
    latency_ms, ms_per_byte = physical_weights(terms_MK, exchanges.time_ms_M)
    return AnalyticCostModel(
        coefficients_ms_KP=tuple((float(f), float(b)) for f, b in weights_KP[:-2]),
        shard_ms_P=(float(weights_KP[-2, 0]), float(weights_KP[-2, 1])),
        overhead_ms_P=(float(weights_KP[-1, 0]), float(weights_KP[-1, 1])),
        latency_ms=float(latency_ms),
        bytes_per_ms=1.0 / max(float(ms_per_byte), 1.0 / _NO_LIMIT_BYTES_PER_MS),
        name=name,
        simulated=data.source is CostSource.SIMULATED,
        measured_range=MeasuredRange.of(
            data.kernels.features_SF,
            world_sizes=data.collectives.world_sizes,
            optimizers=(data.kernels.optimizer,),
        ),
    )
