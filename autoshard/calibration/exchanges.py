"""Calibration of all-to-alls: what latency and what bandwidth cost, each by a factor.

The model's times are linear in four coefficients (latency, latency per further rank, bytes of
the busiest rank, bytes in all), each >= 0; the first two get one factor, the last two another.
What the network learned about sizes, a bounded factor on the whole, stays.

Shapes: M=all-to-alls, K=4 coefficients.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from autoshard.calibration.data import ExchangeRows
from autoshard.calibration.errors import huber, spread
from autoshard.calibration.folds import folds_of, helps
from autoshard.calibration.minimising import minimise
from autoshard.calibration.tunable import (
    TunableModel,
    inverse_softplus,
    predict_exchange_ms,
    softplus,
)

FloatArray = NDArray[np.float64]
COEFFICIENTS = "raw"
#: Which factor each coefficient takes: latency, turns, messages; busiest and total bytes.
_FACTOR_OF = torch.tensor([0, 0, 0, 1, 1])
#: The facts of the lower bound that follow the coefficients, in their order.
BOUND_FACTS = ("latency_ms", "turn_ms", "message_ms", "busiest_ms_per_byte", "total_ms_per_byte")
#: Fewer say too little about their own error.
MIN_EXCHANGES = 10
_OFF = -60.0
_FAINT = 1e-6
_LEAST_MS = 1e-9


@dataclass(frozen=True, kw_only=True, eq=False)
class CalibratedExchanges:
    """All-to-alls of the new machine."""

    state: Mapping[str, Tensor]
    factors: tuple[float, float] | None
    """Of latency and of bandwidth terms; None where the base model's were kept."""
    report: dict[str, Any]


def calibrate_exchanges(
    model: TunableModel, rows: ExchangeRows, num_folds: int, seed: int
) -> CalibratedExchanges:
    """Scale the model's all-to-alls, if cross-validation says that it helps.

    Args:
        model: the base.
        rows: what to fit to; fewer than `MIN_EXCHANGES` change nothing.
        num_folds: of the cross-validation.
        seed: decides the folds.

    Returns:
        The state, and a report: `num`, `world_sizes`, `kept`, and errors `before` and `after`,
        the latter of folds that a fit had not seen.
    """
    before_M = predict_exchange_ms(model, model.exchange_state, rows)
    index_M = np.arange(len(rows.time_ms_M))

    def scored(predicted_M: FloatArray) -> dict[str, Any]:
        return spread(np.abs(predicted_M / rows.time_ms_M - 1.0), index_M, seed)

    report: dict[str, Any] = {
        "num": len(index_M),
        "world_sizes": list(rows.world_sizes),
        "before": scored(before_M),
    }
    state, factors, after_M = model.exchange_state, None, before_M
    if len(index_M) >= MIN_EXCHANGES:
        scaled_M = np.empty_like(before_M)
        for train_M, held_out_M in folds_of(index_M, num_folds, seed):
            fitted, _ = _fit(model, rows.of(train_M))
            scaled_M[held_out_M] = predict_exchange_ms(model, fitted, rows.of(held_out_M))
        if helps(_losses(before_M, rows), _losses(scaled_M, rows)):
            state, factors = _fit(model, rows)
            after_M = scaled_M
    report["kept"] = "scaled" if factors else "base"
    report["factors"] = (
        None if factors is None else dict(zip(("latency", "bandwidth"), factors, strict=True))
    )
    report["after"] = scored(after_M)
    return CalibratedExchanges(state=state, factors=factors, report=report)


def tuned_bound(model: TunableModel, state: Mapping[str, Tensor]) -> dict[str, Any]:
    """The facts of the lower bound with other coefficients.

    A factor's least value is clamped inside the program, and stays.
    """
    facts = dict(model.config["collective_bound"])
    ratio_K = softplus(state[COEFFICIENTS]) / softplus(model.exchange_state[COEFFICIENTS])
    for name, ratio in zip(BOUND_FACTS, ratio_K.tolist(), strict=True):
        facts[name] = float(facts[name]) * ratio
    return facts


def _fit(model: TunableModel, rows: ExchangeRows) -> tuple[dict[str, Tensor], tuple[float, float]]:
    traffic_MC = torch.tensor(rows.traffic_MC, dtype=torch.float32)
    wanted_M = torch.log(torch.tensor(rows.time_ms_M, dtype=torch.float32))
    base = model.exchange_state
    parts = []
    with torch.no_grad():
        for number in range(len(base[COEFFICIENTS])):
            only = torch.full_like(base[COEFFICIENTS], _OFF)
            only[number] = base[COEFFICIENTS][number]
            parts.append(model.exchange({**base, COEFFICIENTS: only}, traffic_MC))
    parts_KM = torch.stack(parts)
    log_factors = torch.zeros(2, requires_grad=True)

    def loss() -> Tensor:
        predicted_M = torch.exp(log_factors)[_FACTOR_OF] @ parts_KM
        ratios_M = torch.log(predicted_M.clamp_min(_LEAST_MS)) - wanted_M
        return huber(ratios_M).mean() + _FAINT * (log_factors**2).sum()

    minimise([log_factors], loss)
    factors = torch.exp(log_factors.detach()).double()
    scaled = inverse_softplus(softplus(base[COEFFICIENTS]) * factors[_FACTOR_OF])
    latency, bandwidth = factors.tolist()
    return {**base, COEFFICIENTS: scaled}, (latency, bandwidth)


def _losses(predicted_M: FloatArray, rows: ExchangeRows) -> FloatArray:
    ratios_M = np.log(np.maximum(predicted_M, _LEAST_MS) / rows.time_ms_M)
    return huber(torch.tensor(ratios_M)).numpy()
