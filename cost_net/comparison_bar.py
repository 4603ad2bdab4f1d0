"""The bar that a cost network has to clear before it is shipped, and whether it does.

Its median error of the total must be near the noise floor, it must rank sets as well as a second
measurement does, and it must beat every other contender in every phase.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cost_net.errors import QUANTITIES
from cost_net.judging import Judge

#: The median error of the total must be at most so many times the floor's, or the first …
FLOOR_FACTOR, MEDIAN_ALLOWED, MEDIAN_LIMIT = 1.5, 0.04, 0.08
#: … and never above the last; tau at least this share of that between two measurements.
TAU_SHARE = 0.95


def bar_report(
    judge: Judge,
    ours: str,
    scores: Mapping[str, Any],
    floor: Mapping[str, Any] | None,
    repeats: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """Hold one network against the bar.

    Args:
        judge: of all contenders.
        ours: the network's name.
        scores: of all contenders on the test split.
        floor: of the second measurement, if there is one.
        repeats: scores of all contenders on the sets that were measured twice.

    Returns:
        `median`, `tau` by quantity (None where too little was measured twice), `better_than` by
        contender and quantity, each with what was reached, what was asked and `passed`.
    """
    allowed = MEDIAN_ALLOWED
    if floor is not None:
        allowed = max(allowed, FLOOR_FACTOR * floor["total"]["median"]["value"])
    allowed = min(allowed, MEDIAN_LIMIT)
    median = scores[ours]["total"]["median"]["value"]
    bar: dict[str, Any] = {
        "median": {"value": median, "at_most": allowed, "passed": median <= allowed}
    }
    taus: dict[str, Any] = {}
    for quantity in QUANTITIES:
        best = None if floor is None else floor[quantity]["tau"]
        own = None if repeats is None else repeats[ours][quantity]["tau"]
        if best is None or own is None:
            taus[quantity] = None  # too few sets were measured twice
            continue
        least = TAU_SHARE * best["value"]
        taus[quantity] = {
            "value": own["value"],
            "of_repeats": best["value"],
            "at_least": least,
            "passed": own["value"] >= least,
        }
    bar["tau"] = taus
    differences = judge.differences(ours, judge.test_N)
    bar["better_than"] = {
        name: {
            quantity: {**interval, "passed": interval["high"] < 0}
            for quantity, interval in by_quantity.items()
        }
        for name, by_quantity in differences.items()
    }
    checks = [
        bar["median"]["passed"],
        *(tau is not None and tau["passed"] for tau in taus.values()),
    ]
    checks += [one["passed"] for by in bar["better_than"].values() for one in by.values()]
    bar["passed"] = all(checks)
    return bar
