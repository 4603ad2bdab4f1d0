"""Training of the network of one kind of collective: a robust physical fit, then a correction.

Starting from the fit matters: from arbitrary coefficients the training stops where the
correction has hidden a wrong latency or bandwidth.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import nnls
from torch import Tensor, nn

from autoshard.errors import InputError
from cost_net.dataset import CollectiveData
from cost_net.networks import CollectiveNet
from cost_net.training import (
    HUBER_DELTA,
    CostNetConfig,
    inverse_softplus,
    parameter_groups,
    torch_settings,
)

FloatArray = NDArray[np.float64]
#: Rounds of reweighting that turn least squares into least absolute errors.
_ROUNDS = 20
#: Relative errors below this count the same in the reweighting.
_SMALL_ERROR = 0.05
_LEARNING_RATE = 1e-2
#: What a factor other than 1 costs, per squared logarithm: what the physics can say, it shall say,
#: since it alone holds where nothing was measured.
_FACTOR_PENALTY = 0.05


def physical_weights(terms_MK: FloatArray, time_ms_M: FloatArray) -> FloatArray:
    """Non-negative weights of `CollectiveNet.terms` with small absolute *relative* errors.

    Iteratively reweighted non-negative least squares: rows are divided by their time and
    weighted by 1/sqrt(error), which makes the sum of squares one of absolute errors, so that
    exchanges which the machine disturbed do not decide.

    Returns:
        float64 [K], >= 0.
    """
    scale_K = np.maximum(terms_MK.max(axis=0), 1e-12)
    inputs_MK = terms_MK / scale_K / time_ms_M[:, None]
    importance_M = np.ones(len(time_ms_M))
    weights_K = np.zeros(terms_MK.shape[1])
    for _ in range(_ROUNDS):
        weights_K, _ = nnls(inputs_MK * importance_M[:, None], importance_M)
        errors_M = np.abs(inputs_MK @ weights_K - 1.0)
        importance_M = 1.0 / np.sqrt(np.maximum(errors_M, _SMALL_ERROR))
    return weights_K / scale_K


def train_collective(data: CollectiveData, config: CostNetConfig) -> CollectiveNet:
    """Train on the rows that are not held out.

    Raises:
        InputError: there are none.
    """
    data = data.of(~data.test_M)
    if len(data.time_ms_M) == 0:
        raise InputError(
            "there are no measurements of all-to-alls",
            remedy="measure with collectives.num_collectives > 0",
        )
    with torch_settings(config):
        return _train(data, config)


def _train(data: CollectiveData, config: CostNetConfig) -> CollectiveNet:
    network = CollectiveNet(num_processors=data.num_processors)
    traffic_MC = torch.tensor(data.traffic_MC, dtype=torch.float32)
    wanted_M = torch.log(torch.tensor(data.time_ms_M, dtype=torch.float32).clamp_min(1e-6))
    network.fit_statistics(traffic_MC)
    terms_MK = network.terms(torch.tensor(data.traffic_MC)).numpy()
    weights_K = physical_weights(terms_MK, np.maximum(data.time_ms_M, 1e-6))
    with torch.no_grad():
        # A weight of 0 would never move again: start it at a thousandth of the largest.
        network.raw.copy_(inverse_softplus(np.maximum(weights_K, weights_K.max() * 1e-3)))
    optimizer = torch.optim.AdamW(parameter_groups(network, config.weight_decay), lr=_LEARNING_RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(
        optimizer, config.collective_epochs, eta_min=_LEARNING_RATE / 100
    )
    for _ in range(config.collective_epochs):
        predicted_M = torch.log(network(traffic_MC).clamp_min(1e-9))
        loss = nn.functional.huber_loss(predicted_M, wanted_M, delta=HUBER_DELTA)
        loss = loss + _FACTOR_PENALTY * torch.log(network.factor_of(traffic_MC)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    _tighten(network, traffic_MC)
    return network.eval()


def _tighten(network: CollectiveNet, traffic_MC: Tensor) -> None:
    """Clamp the factor to the range it took on known exchanges: the bound only gets tighter."""
    with torch.no_grad():
        factor_M = network.factor_of(traffic_MC)
        network.limits[0], network.limits[1] = factor_M.min(), factor_M.max()


def predict_collective_ms(network: CollectiveNet, data: CollectiveData) -> FloatArray:
    """Times of measured collectives as the network predicts them, float64 [M]."""
    with torch.inference_mode():
        return network(torch.tensor(data.traffic_MC, dtype=torch.float32)).double().numpy()
