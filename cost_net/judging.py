"""Scores of many predictors on any part of the measured sets, with intervals over the sets.

Shapes: Q=seeds, N=sets of the part in question, P=phases; 3=phases and their sum.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_net.bootstrap import (
    Resamples,
    error_intervals,
    error_statistics,
    groups_of_equal,
    intervals_to_json,
    median_difference,
    tau_interval,
)
from cost_net.comparison_data import ComparisonData
from cost_net.errors import QUANTITIES, with_total

FloatArray = NDArray[np.float64]
BoolArray = NDArray[np.bool_]


class Judge:
    """Scores of all contenders on any part of the measured sets."""

    def __init__(
        self,
        data: ComparisonData,
        predicted: Mapping[str, FloatArray],
        min_group: int,
        num_resamples: int,
        seed: int,
    ) -> None:
        """Prepare.

        Args:
            data: the measured sets.
            predicted: by contender, of all of them, [Q, N, P], in ms.
            min_group: sets of equal shard count that are needed to count for tau.
            num_resamples: of the bootstrap.
            seed: of the resamples.
        """
        self.min_group, self.num_resamples, self.seed = min_group, num_resamples, seed
        self.test_N = data.kernels.split_N == "test"
        self.counts_N = data.kernels.num_shards_N
        self.measured_N3 = with_total(data.kernels.time_ms_NP)
        self.second_N3 = with_total(data.second_ms_NP)
        self.repeated_N = np.isfinite(self.second_N3[:, 2]) & self.test_N
        self.predicted = {
            name: np.stack([with_total(one_NP) for one_NP in values_QNP])
            for name, values_QNP in predicted.items()
        }

    def resamples(self, of_N: BoolArray) -> Resamples:
        """The same for every contender."""
        return Resamples.draw(int(of_N.sum()), self.num_resamples, seed=self.seed)

    def errors(self, name: str, of_N: BoolArray) -> FloatArray:
        """Relative errors of a contender, [Q, N, 3]."""
        measured_N3 = self.measured_N3[of_N]
        return np.abs(self.predicted[name][:, of_N] - measured_N3) / measured_N3

    def scores(self, of_N: BoolArray) -> dict[str, Any]:
        """Of every contender: see `_score`."""
        resamples = self.resamples(of_N)
        return {
            name: self._score(predicted_QN3[:, of_N], of_N, resamples)
            for name, predicted_QN3 in self.predicted.items()
        }

    def _score(
        self, predicted_QN3: FloatArray, of_N: BoolArray, resamples: Resamples
    ) -> dict[str, Any]:
        """`median`, `mean`, `p90` and `tau` of each quantity with intervals, medians by seed."""
        measured_N3 = self.measured_N3[of_N]
        groups = groups_of_equal(self.counts_N[of_N], self.min_group)
        counts_BN = resamples.counts_BN()
        result: dict[str, Any] = {}
        for column, quantity in enumerate(QUANTITIES):
            predicted_QN, measured_N = predicted_QN3[:, :, column], measured_N3[:, column]
            errors_QN = np.abs(predicted_QN - measured_N) / measured_N
            tau = tau_interval(predicted_QN, measured_N, groups, counts_BN)
            result[quantity] = {
                **intervals_to_json(error_intervals(errors_QN, resamples)),
                "tau": None if tau is None else tau.to_json(),
                "seeds": [float(error_statistics(one_N[None])["median"]) for one_N in errors_QN],
            }
        return result

    def floor(self) -> dict[str, Any] | None:
        """The second measurement as a prediction of the first; None if nothing was repeated."""
        of_N = self.repeated_N
        if of_N.sum() < 2:
            return None
        scores = self._score(self.second_N3[None, of_N], of_N, self.resamples(of_N))
        return {"num_sets": int(of_N.sum()), **scores}

    def repeats(self) -> dict[str, Any] | None:
        """Scores of all contenders on the sets that were measured twice."""
        return self.scores(self.repeated_N) if self.repeated_N.sum() >= 2 else None

    def medians(self, of_N: BoolArray) -> dict[str, Any]:
        """Median errors on a part: `num_sets`, and by contender and quantity with intervals."""
        num = int(of_N.sum())
        if num == 0:
            return {"num_sets": 0, "floor": None, "models": {}}
        resamples = self.resamples(of_N)
        models = {}
        for name in self.predicted:
            errors_QN3 = self.errors(name, of_N)
            models[name] = {
                quantity: error_intervals(errors_QN3[:, :, column], resamples)["median"].to_json()
                for column, quantity in enumerate(QUANTITIES)
            }
        twice_N = of_N & self.repeated_N
        floor = None
        if twice_N.any():
            errors_N3 = np.abs(self.second_N3[twice_N] / self.measured_N3[twice_N] - 1.0)
            floor = dict(zip(QUANTITIES, np.median(errors_N3, axis=0).tolist(), strict=True))
        return {"num_sets": num, "floor": floor, "models": models}

    def differences(self, ours: str, of_N: BoolArray) -> dict[str, Any]:
        """Our median less each other's, by contender and quantity, with paired intervals."""
        resamples = self.resamples(of_N)
        own_QN3 = self.errors(ours, of_N)
        return {
            name: {
                quantity: median_difference(
                    own_QN3[:, :, column], self.errors(name, of_N)[:, :, column], resamples
                ).to_json()
                for column, quantity in enumerate(QUANTITIES)
            }
            for name in self.predicted
            if name != ours
        }
