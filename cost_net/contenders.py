"""Cost models side by side: what takes part in a comparison, and how each learns from rows.

Networks and plain baselines get the very same rows: `fit` sees a training and a validation split
and nothing else.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np
from threadpoolctl import threadpool_limits  # comes with scikit-learn

from cost_net.baselines import BASELINES, Predictor
from cost_net.dataset import KernelData
from cost_net.training import CostNetConfig, predict_ms, train_compute


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One cost model of a comparison: a network, or one of `BASELINES`."""

    name: str
    config: CostNetConfig | None = None
    """How the network is trained; None for a baseline, which draws nothing at random."""

    @property
    def is_network(self) -> bool:
        """Whether seeds make a difference."""
        return self.config is not None


def make_contenders(networks: Mapping[str, CostNetConfig]) -> tuple[Contender, ...]:
    """The networks, in the order given, then every baseline from the best to the plainest.

    Args:
        networks: by name.
    """
    return (
        *(Contender(name=name, config=config) for name, config in networks.items()),
        *(Contender(name=name) for name in reversed(BASELINES)),
    )


def fit(contender: Contender, rows: KernelData, *, seed: int, min_steps: int) -> Predictor:
    """Fit one contender.

    Args:
        contender: which.
        rows: of the splits train and validation. Networks stop early by the latter.
        seed: of a network's start and order.
        min_steps: a network gets at least so many optimizer steps, so that few rows are not
            few steps as well; the epochs and the patience grow in proportion.

    Returns:
        What predicts both phases of sets, in ms.

    Raises:
        InputError: a split is empty.
    """
    if contender.config is None:
        with threadpool_limits(1):
            return BASELINES[contender.name](rows.split("train"))
    config = with_enough_steps(
        replace(contender.config, seed=seed), int((rows.split_N == "train").sum()), min_steps
    )
    network = train_compute(rows, config)
    return lambda data: predict_ms(network, data)


def with_enough_steps(config: CostNetConfig, num_sets: int, min_steps: int) -> CostNetConfig:
    """The configuration with epochs enough for `min_steps` steps on `num_sets` sets."""
    steps_per_epoch = max(1, -(-num_sets // config.batch_size))
    stretch = max(1.0, min_steps / (config.num_epochs * steps_per_epoch))
    return replace(
        config,
        num_epochs=round(config.num_epochs * stretch),
        patience=round(config.patience * stretch),
    )


def some_rows(data: KernelData, num_sets: int, *, seed: int) -> KernelData:
    """A random part of the training sets, and of the validation sets as large a share.

    Parts of one seed are nested: the larger holds the smaller.

    Args:
        data: with the splits train and validation.
        num_sets: training sets, at least 1 and at most as many as there are.
        seed: of the choice.
    """
    train, validation = (np.flatnonzero(data.split_N == s) for s in ("train", "validation"))
    order = np.random.default_rng([seed, 1])
    train, validation = order.permutation(train), order.permutation(validation)
    share = num_sets / len(train)
    num_validation = max(1, round(share * len(validation)))
    return data.of(np.sort(np.concatenate([train[:num_sets], validation[:num_validation]])))
