"""The comparison of cost models: which errors each makes on tables that none has seen.

All numbers are of the test split, of each set's first measurement, with 95% intervals over sets
(`cost_net.bootstrap`). Beside them stands the noise floor, the second measurement as a prediction
of the first, and the bar that our network has to clear.

Shapes: Q=seeds, N=sets of the part in question, P=phases.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.checks import check_integers
from autoshard.errors import InputError
from cost_net.bootstrap import groups_of_equal
from cost_net.comparison_bar import bar_report
from cost_net.comparison_data import ComparisonData
from cost_net.contenders import Contender
from cost_net.dataset import SPLITS
from cost_net.errors import QUANTITIES
from cost_net.judging import Judge
from cost_net.learning_curve import Training, learning_curve
from cost_net.monotonicity import growth_report, range_report
from cost_net.trainings import Predictions

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]
#: Numbers of shards that are reported together: from, to.
BANDS = ((1, 1), (2, 4), (5, 16), (17, 64), (65, 200))


@dataclass(frozen=True, kw_only=True)
class ComparisonConfig:
    """How contenders are trained and judged."""

    ours: str = "additive"
    """The network that has to clear the bar."""
    num_seeds: int = 3
    """Trainings of each network, and random parts of the training sets."""
    sizes: tuple[int, ...] = (100, 300, 1000, 3000)
    """Training sets of the learning curve; all of them come last anyway."""
    min_steps: int = 2000
    """Optimizer steps that a network gets at least, however few sets it learns from."""
    min_group: int = 30
    """Test sets of equal shard count that are needed to count for Kendall's tau."""
    num_resamples: int = 1000
    """Of the bootstrap."""
    num_grown_sets: int = 300
    """Test sets that are grown, each in every way, at most."""
    num_random_sets: int = 100
    """Random sets on which predictions are checked."""
    seed: int = 0
    """Of resamples, grown and random sets."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "sizes", tuple(self.sizes))
        check_integers(self, num_seeds=1, min_steps=1, min_group=2, num_resamples=100)
        check_integers(self, num_grown_sets=1, num_random_sets=1, seed=0)
        if any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in self.sizes):
            raise InputError("sizes is not usable", got=self.sizes, allowed="integers >= 1")


def compare(
    data: ComparisonData,
    contenders: Sequence[Contender],
    results: Sequence[tuple[Training, Predictions]],
    config: ComparisonConfig,
) -> dict[str, Any]:
    """Judge what the trainings predicted.

    Args:
        data: what they predicted.
        contenders: in the order of the report.
        results: of every training, see `cost_net.learning_curve.plan_trainings`.
        config: how to judge.

    Returns:
        The report, as plain values: `test` (scores by contender), `floor`, `repeats` (on the sets
        that were measured twice), `bar`, `by_num_shards`, `by_kind`, `by_split`,
        `learning_curve`, `ranges`, `growth`, `training_seconds`, `num_sets` and `measurements`.
    """
    kernels = data.kernels
    by_size = _by_size(contenders, results)
    full = {name: sizes[max(sizes)] for name, sizes in by_size.items()}
    predicted = {name: np.stack([one.measured_NP for one in found]) for name, found in full.items()}
    test_N = kernels.split_N == "test"
    judge = Judge(data, predicted, config.min_group, config.num_resamples, config.seed)
    floor = judge.floor()
    curve = learning_curve(
        {
            name: {
                size: np.stack([one.measured_NP[test_N] for one in found])
                for size, found in sizes.items()
            }
            for name, sizes in by_size.items()
        },
        kernels.time_ms_NP[test_N],
        judge.resamples(test_N),
    )
    noise = {q: None if floor is None else floor[q]["median"]["value"] for q in QUANTITIES}
    scores = judge.scores(test_N)
    repeats = judge.repeats()
    counts_N = kernels.num_shards_N
    return {
        "num_sets": {split: int((kernels.split_N == split).sum()) for split in SPLITS},
        "num_seeds": config.num_seeds,
        "min_group": config.min_group,
        "tau_groups": {
            str(counts_N[test_N][rows[0]]): len(rows)
            for rows in groups_of_equal(counts_N[test_N], config.min_group)
        },
        "test": scores,
        "floor": floor,
        "repeats": repeats,
        "bar": bar_report(judge, config.ours, scores, floor, repeats),
        "by_num_shards": {
            _band_name(band): judge.medians(test_N & _within(counts_N, band)) for band in BANDS
        },
        "by_kind": {kind: judge.medians(test_N & of_N) for kind, of_N in data.kinds.items()},
        "by_split": {split: judge.medians(kernels.split_N == split) for split in SPLITS},
        "learning_curve": curve,
        "ranges": {
            name: range_report(
                {
                    "test": [one.measured_NP[test_N] for one in found],
                    "grown": [one.grown_MP for one in found],
                    **{kind: [one.odd[kind] for one in found] for kind in data.odd},
                }
            )
            for name, found in full.items()
        },
        "growth": {
            name: growth_report(
                data.grown, predicted[name], np.stack([one.grown_MP for one in found]), noise
            )
            for name, found in full.items()
        },
        "training_seconds": {
            name: float(np.mean([one.seconds for one in found])) for name, found in full.items()
        },
        "measurements": dict(data.facts),
    }


def _by_size(
    contenders: Sequence[Contender], results: Sequence[tuple[Training, Predictions]]
) -> dict[str, dict[int, list[Predictions]]]:
    """Results by contender and number of training sets, in the order of the seeds."""
    found: dict[str, dict[int, list[Predictions]]] = {c.name: {} for c in contenders}
    for training, predictions in sorted(results, key=lambda result: result[0].seed):
        by_size = found[training.contender.name]
        by_size.setdefault(training.num_sets, []).append(predictions)
    return found


def _band_name(band: tuple[int, int]) -> str:
    return str(band[0]) if band[0] == band[1] else f"{band[0]}–{band[1]}"


def _within(counts_N: IntArray, band: tuple[int, int]) -> BoolArray:
    return (counts_N >= band[0]) & (counts_N <= band[1])
