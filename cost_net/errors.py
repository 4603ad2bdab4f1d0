"""The error report of a cost model: beside plain baselines, and beside the noise floor.

Relative error is |predicted − measured| / measured. Kendall's tau is taken within groups of
equal shard count, weighted by the groups' pairs, since it is easy to rank 60 shards above 2.
The noise floor is what a second measurement would score as a prediction of the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.table import Table as RichTable
from scipy.stats import kendalltau

from autoshard.measure.config import SimulatedDevice
from cost_net.dataset import PHASES, SPLITS, KernelData

FloatArray = NDArray[np.float64]
QUANTITIES = (*PHASES, "total")
#: A group of equal shard count needs so many sets to count for tau.
MIN_GROUP = 5


def with_total(time_ms_NP: FloatArray) -> FloatArray:
    """Append the sum of both phases, [N, 3]."""
    return np.hstack([time_ms_NP, time_ms_NP.sum(axis=1, keepdims=True)])


def score(
    predicted_ms_NP: FloatArray, measured_ms_NP: FloatArray, num_shards_N: NDArray[np.int64]
) -> dict[str, dict[str, float | None]]:
    """Errors per phase and of the total.

    Returns:
        For each of `QUANTITIES`: `median`, `mean`, `p90` relative error, and `tau` (None if no
        group is large enough).
    """
    predicted, measured = with_total(predicted_ms_NP), with_total(measured_ms_NP)
    errors = np.abs(predicted - measured) / measured
    return {
        name: {
            "median": float(np.median(errors[:, column])),
            "mean": float(np.mean(errors[:, column])),
            "p90": float(np.quantile(errors[:, column], 0.9)),
            "tau": grouped_tau(predicted[:, column], measured[:, column], num_shards_N),
        }
        for column, name in enumerate(QUANTITIES)
    }


def grouped_tau(
    predicted_N: FloatArray, measured_N: FloatArray, num_shards_N: NDArray[np.int64]
) -> float | None:
    """Mean Kendall's tau of the groups of equal shard count, weighted by their pairs."""
    total, weight = 0.0, 0.0
    for count in np.unique(num_shards_N):
        rows = num_shards_N == count
        size = int(rows.sum())
        if size < MIN_GROUP:
            continue
        tau = float(kendalltau(predicted_N[rows], measured_N[rows]).statistic)
        if np.isfinite(tau):
            pairs = size * (size - 1) / 2
            total, weight = total + tau * pairs, weight + pairs
    return total / weight if weight else None


def noise_floor(data: KernelData) -> dict[str, Any] | None:
    """Scores of the second measurement as a prediction of the first; None if nothing repeats."""
    order = np.argsort(data.index_N, kind="stable")
    index = data.index_N[order]
    pairs = np.flatnonzero(index[1:] == index[:-1])
    if len(pairs) < 2:
        return None
    first, second = order[pairs], order[pairs + 1]
    scores = score(data.time_ms_NP[second], data.time_ms_NP[first], data.num_shards_N[first])
    return {"num_pairs": len(pairs), **scores}


def error_table(report: Mapping[str, Any], split: str | None = None) -> RichTable:
    """The report of one split for the terminal.

    Args:
        report: `errors.json`, with `splits[split][model][quantity]` and `noise_floor`.
        split: which split; by default test, or the nearest to it that was measured.
    """
    split = split or next(name for name in reversed(SPLITS) if name in report["splits"])
    facts = report["splits"][split]
    device = report.get("measurements", {}).get("device")
    simulated = device == SimulatedDevice.SIMULATED.value
    table = RichTable(
        title=f"Cost model on {split} tables: relative error, {facts['num_sets']} "
        f"{'simulated ' if simulated else ''}shard sets"
    )
    table.add_column("predictor", no_wrap=True)
    for name in QUANTITIES:
        table.add_column(f"{name}\nmedian", justify="right")
    for column in ("total\nmean", "total\np90", "tau"):
        table.add_column(column, justify="right")
    rows = dict(facts["models"])
    if report.get("noise_floor"):
        rows["a second measurement"] = report["noise_floor"]
    for model, scores in rows.items():
        total = scores["total"]
        tau = total["tau"]
        table.add_row(
            model,
            *(f"{scores[name]['median']:.1%}" for name in QUANTITIES),
            f"{total['mean']:.1%}",
            f"{total['p90']:.1%}",
            "–" if tau is None else f"{tau:.3f}",
        )
    return table
