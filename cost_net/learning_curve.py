"""Which trainings a comparison consists of, and how errors fall as the training rows grow.

Every contender is trained on nested random parts of the training sets and on all of them. On a
part, each seed draws a part of its own, so that the seeds show both what chance in the rows and
what chance in the training does; on all rows, a baseline has nothing left to chance and is
fitted once.

Shapes: Q=seeds, N=shard sets, P=phases.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_net.bootstrap import Resamples, error_intervals, error_statistics
from cost_net.contenders import Contender
from cost_net.errors import QUANTITIES, with_total

FloatArray = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Training:
    """One contender, trained once."""

    contender: Contender
    num_sets: int
    """Training sets."""
    seed: int

    @property
    def key(self) -> str:
        """Names it; usable as a file name."""
        name = re.sub(r"[^0-9a-z]+", "-", self.contender.name.lower())
        return f"{name}-{self.num_sets}-{self.seed}"


def curve_sizes(sizes: Iterable[int], num_training_sets: int) -> tuple[int, ...]:
    """The sizes below all training sets, ascending, and all of them."""
    return (*sorted({size for size in sizes if size < num_training_sets}), num_training_sets)


def plan_trainings(
    contenders: Sequence[Contender],
    sizes: Sequence[int],
    num_training_sets: int,
    num_seeds: int,
) -> list[Training]:
    """All trainings, the longest first, so that no process is left with a long one at the end."""
    trainings = [
        Training(contender=contender, num_sets=size, seed=seed)
        for contender in contenders
        for size in sizes
        for seed in range(num_seeds if contender.is_network or size < num_training_sets else 1)
    ]
    return sorted(trainings, key=lambda t: (-t.contender.is_network, -t.num_sets, t.seed))


def learning_curve(
    predicted: Mapping[str, Mapping[int, FloatArray]],
    measured_ms_NP: FloatArray,
    resamples: Resamples,
) -> dict[str, list[dict[str, Any]]]:
    """Median relative errors over the number of training sets.

    Args:
        predicted: by contender and number of training sets, [Q, N, P].
        measured_ms_NP: the same sets as measured.
        resamples: of the sets.

    Returns:
        By contender, for each number of training sets: `num_sets`, and for each of `QUANTITIES`
        the median with its interval, and `seeds`, the median of each training.
    """
    measured_N3 = with_total(measured_ms_NP)
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, by_size in predicted.items():
        curves[name] = []
        for size in sorted(by_size):
            predicted_QN3 = np.stack([with_total(one_NP) for one_NP in by_size[size]])
            errors_QN3 = np.abs(predicted_QN3 - measured_N3) / measured_N3
            point: dict[str, Any] = {"num_sets": size}
            for column, quantity in enumerate(QUANTITIES):
                errors_QN = errors_QN3[:, :, column]
                point[quantity] = {
                    **error_intervals(errors_QN, resamples)["median"].to_json(),
                    "seeds": [
                        float(error_statistics(one_N[None])["median"]) for one_N in errors_QN
                    ],
                }
            curves[name].append(point)
    return curves
