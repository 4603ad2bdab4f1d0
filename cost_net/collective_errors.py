"""How well collectives are predicted: those held out, unseen world sizes, and other kinds.

A part of the error report, beside `errors` for kernels. A model that is to serve any number
of ranks is judged on a number that it never saw: `leave_one_world_size_out`.

Shapes: M=collectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from rich.table import Table as RichTable

from autoshard.measure.config import Collective
from cost_net.collective_training import predict_collective_ms, train_collective
from cost_net.dataset import CollectiveData
from cost_net.networks import CollectiveNet
from cost_net.training import CostNetConfig

Scores = dict[str, float | int]
#: Fewer rows have no spread to scale inputs by.
_MIN_TRAINED = 2


def collective_score(part: CollectiveData, network: CollectiveNet) -> Scores | None:
    """Number of collectives, median, mean and 90th percentile of their relative errors.

    Returns:
        `num`, `median`, `mean`, `p90`; None if there are no rows.
    """
    if len(part.time_ms_M) == 0:
        return None
    predicted_M = predict_collective_ms(network, part)
    errors_M = np.abs(predicted_M / np.maximum(part.time_ms_M, 1e-9) - 1)
    return {
        "num": len(errors_M),
        "median": float(np.median(errors_M)),
        "mean": float(np.mean(errors_M)),
        "p90": float(np.quantile(errors_M, 0.9)),
    }


def leave_one_world_size_out(
    data: CollectiveData, config: CostNetConfig, network: CollectiveNet | None = None
) -> dict[str, dict[str, Scores | None]]:
    """Train without one world size and predict it, for every world size in turn.

    The smallest and the largest show extrapolation, those between them interpolation.

    Args:
        data: of one kind.
        config: how to train.
        network: one trained on all world sizes with `config`; trained here if None.

    Returns:
        By world size, as text for JSON: scores (see `collective_score`) on all its rows of a
        model trained `without` them and of one trained `with` all world sizes, and the same on
        the rows that neither was trained on, `test_without` and `test_with` (None if no row
        was held out). A world size without which there is too little to train on is left out.
    """
    report: dict[str, dict[str, Scores | None]] = {}
    for world_size in data.world_sizes:
        own_M = data.traffic_MC[:, 0] == world_size
        if np.count_nonzero(~own_M & ~data.test_M) < _MIN_TRAINED:
            continue
        network = network or train_collective(data, config)
        own, held_out = data.of(own_M), data.of(own_M & data.test_M)
        without = train_collective(data.of(~own_M), config)
        report[str(world_size)] = {
            "without": collective_score(own, without),
            "with": collective_score(own, network),
            "test_without": collective_score(held_out, without),
            "test_with": collective_score(held_out, network),
        }
    return report


def other_kinds_report(
    others: Mapping[Collective, CollectiveData], network: CollectiveNet, config: CostNetConfig
) -> dict[str, Any]:
    """How far other kinds of collectives are from what all-to-alls teach.

    Args:
        others: measured rows by kind.
        network: trained on all-to-alls.
        config: how to train one for each kind.

    Returns:
        By kind: `num` rows, `world_sizes`, scores on the held-out rows (on all rows where none
        was held out) of the network of all-to-alls, `as_all_to_all`, and of one trained on
        rows of the kind, `own` (None if there are too few).
    """
    report: dict[str, Any] = {}
    for kind, data in others.items():
        judged = data.of(data.test_M) if data.test_M.any() else data
        enough = np.count_nonzero(~data.test_M) >= _MIN_TRAINED
        report[kind.value] = {
            "num": len(data.time_ms_M),
            "world_sizes": list(data.world_sizes),
            "as_all_to_all": collective_score(judged, network),
            "own": collective_score(judged, train_collective(data, config)) if enough else None,
        }
    return report


def world_size_table(report: Mapping[str, Any]) -> RichTable | None:
    """The unseen world sizes of `errors.json` for the terminal; None if there are none."""
    rows = (report.get("collectives") or {}).get("left_out_world_sizes")
    if not rows:
        return None
    table = RichTable(title="All-to-alls of a world size left out of training: median error")
    table.add_column("ranks", justify="right")
    table.add_column("rows", justify="right")
    for title in ("without", "with all", "without,\nheld out", "with all,\nheld out"):
        table.add_column(title, justify="right")
    for world_size, scores in rows.items():
        table.add_row(
            world_size,
            str(scores["without"]["num"]),
            *(
                f"{scores[name]['median']:.1%}" if scores[name] else "–"
                for name in ("without", "with", "test_without", "test_with")
            ),
        )
    return table
