"""Training of the compute networks on measured rows: seeded, early stopping by validation.

The loss is the Huber loss of the log ratio of predicted and measured time, per phase and of
the total: relative errors count, and single disturbed measurements do not decide.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from autoshard.checks import check_integers, check_numbers
from autoshard.errors import InputError
from cost_net.baselines import linear_weights
from cost_net.dataset import KernelData, shard_rows
from cost_net.networks import NETWORKS, AdditiveNet, SumNet, make_network

FloatArray = NDArray[np.float64]
#: Called with (epoch, number of epochs, metrics) after each epoch.
OnEpoch = Callable[[int, int, Mapping[str, float]], None]
HUBER_DELTA = 0.1
#: What is validated and kept are the weights averaged over about 1 / (1 − this) steps: single
#: steps at a high learning rate are too noisy to choose among by a few hundred sets.
EMA_DECAY = 0.995


class NetworkKind(Enum):
    """Which compute network."""

    ADDITIVE = "additive"
    AUTOSHARD = "autoshard"
    NEUROSHARD = "neuroshard"


@dataclass(frozen=True, kw_only=True)
class CostNetConfig:
    """How the networks are trained."""

    network: NetworkKind = NetworkKind.ADDITIVE
    options: dict[str, Any] = field(default_factory=dict)
    """Passed to the network's class."""
    num_epochs: int = 120
    """Passes over the training sets at most."""
    patience: int = 40
    """Stop after so many epochs without a better validation error."""
    batch_size: int = 32
    """Shard sets per step."""
    learning_rate: float = 3e-3
    """The highest; rises to it and falls again along one cycle."""
    weight_decay: float = 0.01
    seed: int = 0
    num_threads: int = 1
    """Threads of torch while training."""
    collective_epochs: int = 600
    """Passes over the all-to-alls."""

    def __post_init__(self) -> None:
        check_integers(self, num_epochs=1, patience=1, batch_size=1, num_threads=1)
        check_integers(self, collective_epochs=1, seed=0)
        check_numbers(self, learning_rate=0.0, weight_decay=0.0)
        assert self.network.value in NETWORKS


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """Shard sets as tensors."""

    features_SF: Tensor
    set_S: Tensor
    num_shards_N1: Tensor
    time_ms_NP: Tensor

    @classmethod
    def of(cls, data: KernelData) -> Batch:
        """Convert."""
        return cls(
            features_SF=torch.tensor(data.features_SF, dtype=torch.float32),
            set_S=torch.tensor(data.set_S),
            num_shards_N1=torch.tensor(data.num_shards_N[:, None], dtype=torch.float32),
            time_ms_NP=torch.tensor(data.time_ms_NP, dtype=torch.float32),
        )

    def take(self, rows: NDArray[np.int64]) -> Batch:
        """The sets with these numbers."""
        counts_N = self.num_shards_N1[:, 0].numpy().astype(np.int64)
        flat, counts = shard_rows(counts_N, rows)
        return Batch(
            features_SF=self.features_SF[torch.from_numpy(flat)],
            set_S=torch.from_numpy(np.repeat(np.arange(len(rows)), counts)),
            num_shards_N1=self.num_shards_N1[rows],
            time_ms_NP=self.time_ms_NP[rows],
        )


def predict_sets(network: AdditiveNet | SumNet, batch: Batch) -> Tensor:
    """Times of the sets of a batch, ms, [N, P]."""
    encoding_SD = network.encode(batch.features_SF)
    summed = torch.zeros(len(batch.num_shards_N1), encoding_SD.shape[1])
    summed = summed.index_add(0, batch.set_S, encoding_SD)
    return network.compute(summed, batch.num_shards_N1)


def relative_loss(predicted_NP: Tensor, measured_NP: Tensor) -> Tensor:
    """Huber loss of log ratios, of both phases and of their sum."""
    logs = torch.log(
        torch.cat([predicted_NP, predicted_NP.sum(dim=1, keepdim=True)], dim=1).clamp_min(1e-9)
    )
    wanted = torch.log(
        torch.cat([measured_NP, measured_NP.sum(dim=1, keepdim=True)], dim=1).clamp_min(1e-9)
    )
    return nn.functional.huber_loss(logs, wanted, delta=HUBER_DELTA)


@contextmanager
def torch_settings(config: CostNetConfig) -> Iterator[None]:
    """Seed torch and set its threads for a training; both are as before afterwards."""
    threads = torch.get_num_threads()
    torch.set_num_threads(config.num_threads)
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(config.seed)
            yield
    finally:
        torch.set_num_threads(threads)


def train_compute(
    data: KernelData, config: CostNetConfig, on_epoch: OnEpoch | None = None
) -> AdditiveNet | SumNet:
    """Train the compute network; the best epoch by validation error is what returns.

    Args:
        data: with the splits train and validation.
        config: how.
        on_epoch: told of every epoch.

    Raises:
        InputError: a split is empty.
    """
    parts = {name: data.split(name) for name in ("train", "validation")}
    for name, part in parts.items():
        if part.num_sets == 0:
            raise InputError(
                f"no measured shard set belongs to the {name} split",
                remedy="measure more sets, or set sampling.split_shares",
            )
    with torch_settings(config):
        return _train_compute(parts["train"], parts["validation"], config, on_epoch)


def parameter_groups(network: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Groups for the optimizer: only matrices decay.

    Physical coefficients are stored as what softplus turns into them, far below 0 for small
    ones: towards 0 they would grow.
    """
    parameters = list(network.parameters())
    return [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": weight_decay},
        {"params": [p for p in parameters if p.ndim <= 1], "weight_decay": 0.0},
    ]


def _train_compute(
    train: KernelData, held_out: KernelData, config: CostNetConfig, on_epoch: OnEpoch | None
) -> AdditiveNet | SumNet:
    whole, validation = Batch.of(train), Batch.of(held_out)
    order = np.random.default_rng(config.seed)
    network = make_network(config.network.value, config.options)
    network.fit_statistics(whole.features_SF)
    _start_at_scale(network, train)
    batches = -(-train.num_sets // config.batch_size)
    optimizer = torch.optim.AdamW(
        parameter_groups(network, config.weight_decay), lr=config.learning_rate
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=config.learning_rate, total_steps=config.num_epochs * batches
    )
    averaged = AveragedModel(network, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY))
    mean_network: AdditiveNet | SumNet = averaged.module  # type: ignore[assignment]
    best, best_error, best_epoch = copy.deepcopy(network.state_dict()), math.inf, 0
    for epoch in range(config.num_epochs):
        total = 0.0
        shuffled = order.permutation(train.num_sets)
        for chosen in np.array_split(shuffled, batches):
            batch = whole.take(chosen)
            loss = relative_loss(predict_sets(network, batch), batch.time_ms_NP)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            averaged.update_parameters(network)
            total += float(loss.detach()) * len(chosen)
        with torch.inference_mode():
            predicted_NP = predict_sets(mean_network, validation)
            error = float(relative_loss(predicted_NP, validation.time_ms_NP))
        if error < best_error:
            best, best_error, best_epoch = copy.deepcopy(mean_network.state_dict()), error, epoch
        if on_epoch is not None:
            on_epoch(
                epoch + 1,
                config.num_epochs,
                {"train_loss": total / train.num_sets, "validation_loss": error},
            )
        if epoch - best_epoch >= config.patience:
            break
    network.load_state_dict(best)
    if isinstance(network, AdditiveNet):
        _tighten(network, [whole, validation])
    return network.eval()


def _start_at_scale(network: AdditiveNet | SumNet, train: KernelData) -> None:
    """Start from the plain model, so that training only has to refine it.

    For the additive network that is the non-negative linear regression of the times on the
    summed work; for the others their geometric mean.
    """
    with torch.no_grad():
        if isinstance(network, SumNet):
            mean_P = np.exp(np.log(train.time_ms_NP).mean(axis=0))
            network.start_at(torch.tensor(mean_P, dtype=torch.float32))
            return
        weights_KP = linear_weights(train)  # work, shards, constant
        own_K = weights_KP[:-2].sum(axis=1) * network.work_scale.double().numpy()
        # A weight of 0 would never move again: start it at a thousandth of the largest.
        own_K = np.maximum(own_K, own_K.max() * 1e-3)
        network.raw_work_K.copy_(inverse_softplus(own_K))
        network.raw_shard_P.copy_(inverse_softplus(np.maximum(weights_KP[-2], 1e-3)))
        network.raw_overhead_P.copy_(inverse_softplus(np.maximum(weights_KP[-1], 1e-3)))


def inverse_softplus(values: FloatArray) -> Tensor:
    """What softplus turns into `values`; below 1e-6 into 1e-6."""
    # log(exp(x) − 1) = x + log(1 − exp(−x)), which does not overflow.
    values = np.maximum(values, 1e-6)
    return torch.tensor(values + np.log(-np.expm1(-values)), dtype=torch.float32)


def _tighten(network: AdditiveNet, batches: list[Batch]) -> None:
    """Clamp φ to the range it took on known sets: the bound may only get tighter."""
    seen: list[Tensor] = []
    inner = network.phi

    def record(inputs: Tensor) -> Tensor:
        seen.append(inner(inputs))
        return seen[-1]

    network.phi = record  # type: ignore[method-assign]
    try:
        with torch.inference_mode():
            for batch in batches:
                predict_sets(network, batch)
    finally:
        del network.phi
    values = torch.cat(seen)
    network.phi_limits[0] = values.min(dim=0).values
    network.phi_limits[1] = values.max(dim=0).values


def predict_ms(network: AdditiveNet | SumNet, data: KernelData) -> FloatArray:
    """Times of measured sets as the network predicts them, float64 [N, P]."""
    with torch.inference_mode():
        return predict_sets(network, Batch.of(data)).double().numpy()
