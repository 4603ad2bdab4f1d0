"""Whether a contender's predictions can be trusted beyond the rows it was shown.

They must be finite and not negative on any set, however absurd; and a set that grew must not be
called cheaper by more than measurements of one set differ.

Shapes: Q=seeds, M=grown sets, N=measured sets, P=phases.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cost_net.errors import QUANTITIES, with_total
from cost_net.probe_sets import GROWTHS, GrownSets

FloatArray = NDArray[np.float64]
#: Grown sets in which a replica's exchange is another one now; see `GrownSets.switched_M`.
SWITCHED = "another exchange"


def growth_report(
    grown: GrownSets,
    before_QNP: FloatArray,
    after_QMP: FloatArray,
    noise: Mapping[str, float | None],
) -> dict[str, dict[str, dict[str, Any]]]:
    """How often, and by how much, grown sets are predicted to cost less.

    Args:
        grown: the sets.
        before_QNP: predictions of the measured sets.
        after_QMP: predictions of the grown sets.
        noise: for each of `QUANTITIES`, by what share two measurements of one set differ
            (their median); None where that was not measured.

    Returns:
        For each way to grow, `all` of them, and each quantity, of sets whose replicas exchange
        as before, and for `SWITCHED`, which holds the others: `num` predictions,
        `share_cheaper`, `share_beyond_noise` (None without noise), `median_decrease` of the
        cheaper ones and `largest_decrease`, as shares of the prediction before (0 if none).
    """
    before_QM3 = _totals(before_QNP)[:, grown.base_M]
    with np.errstate(invalid="ignore", divide="ignore"):
        change_QM3 = _totals(after_QMP) / before_QM3 - 1.0
    report: dict[str, dict[str, dict[str, Any]]] = {}
    for growth in ("all", *GROWTHS, SWITCHED):
        rows = grown.switched_M if growth == SWITCHED else ~grown.switched_M
        if growth in GROWTHS:
            rows = rows & (grown.growth_M == growth)
        report[growth] = {
            quantity: _decreases(change_QM3[:, rows, column].ravel(), noise[quantity])
            for column, quantity in enumerate(QUANTITIES)
        }
    return report


def _decreases(changes: FloatArray, noise: float | None) -> dict[str, Any]:
    changes = changes[np.isfinite(changes)]
    # Sums of 32-bit numbers differ in their last digits.
    decreases = -changes[changes < -1e-6]
    num = len(changes)
    return {
        "num": num,
        "share_cheaper": len(decreases) / num if num else 0.0,
        "share_beyond_noise": (
            None if noise is None or not num else float(np.mean(changes < -noise))
        ),
        "median_decrease": float(np.median(decreases)) if len(decreases) else 0.0,
        "largest_decrease": float(decreases.max()) if len(decreases) else 0.0,
    }


def _totals(predicted_QNP: FloatArray) -> FloatArray:
    return np.stack([with_total(one_NP) for one_NP in predicted_QNP])


def range_report(predicted: Mapping[str, Sequence[FloatArray]]) -> dict[str, dict[str, Any]]:
    """Predictions that are no costs.

    Args:
        predicted: for each kind of sets, what each seed's model says, [sets, P].

    Returns:
        For each kind: `num` predictions, how many are `negative`, how many `not_finite`, and
        the `largest_ms` of the finite ones.
    """
    report = {}
    for kind, per_seed in predicted.items():
        values = np.concatenate([values.ravel() for values in per_seed])
        finite = values[np.isfinite(values)]
        report[kind] = {
            "num": len(values),
            "negative": int((finite < 0).sum()),
            "not_finite": len(values) - len(finite),
            "largest_ms": float(finite.max()) if len(finite) else None,
        }
    return report
