"""Synthetic run folders for tests of the report, with figures that can be checked by hand."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow as pa

from autoshard.features import TRAFFIC_FEATURES
from autoshard.measure.schema import RowKind, arrow_schema
from autoshard.measure.store import write_rows
from autoshard.objective import CostSource, StepCost
from autoshard.plan import PlanCost, ShardingPlan
from autoshard.planning import make_plan
from tests.placement_cases import COST_MODEL, make_problem, random_tables

#: The names that someone could give, in every place where the page shows a name.
HOSTILE = "<script>alert('x')</script> & $x^{$ \"q\""


def plan_with(
    sharder: str,
    fwd_ms: tuple[float, ...],
    *,
    source: CostSource = CostSource.PREDICTED,
    extrapolated: bool = False,
    num_tables: int = 4,
) -> ShardingPlan:
    """A plan on `len(fwd_ms)` ranks whose step takes max(fwd_ms) + 3 ms; the bound is 10 ms."""
    plan = make_plan(
        make_problem(random_tables(num_tables), len(fwd_ms)),
        sharder="size_greedy",
        cost_model=COST_MODEL,
    )
    step = StepCost(
        source=source,
        fwd_compute_ms=fwd_ms,
        bwd_compute_ms=(1.0,) * len(fwd_ms),
        fwd_comms_ms=1.0,
        bwd_comms_ms=1.0,
        extrapolated=extrapolated,
    )
    cost = PlanCost(step=step, lower_bound_ms=10.0, best_known_ms=11.0)
    return replace(plan.with_cost(cost), provenance={"sharder": sharder, "seed": 0})


def validation_rows(**columns: list[object]) -> pd.DataFrame:
    """Runs; columns not given are the same in every row."""
    num = len(next(iter(columns.values())))
    usual: dict[str, object] = {
        "world_size": 2,
        "num_tables": 4,
        "run_pass": 0,
        "extrapolated": False,
        "oversubscribed": False,
    }
    return pd.DataFrame({**{name: [value] * num for name, value in usual.items()}, **columns})


def evaluation_rows(objectives: dict[str, list[float | None]], **values: object) -> pd.DataFrame:
    """Rows of one training seed; None is infeasible; the bound of every problem is 1 ms."""
    rows = [
        {
            "task": f"task-{index}",
            "setting": "4x2",
            "num_tables": 4,
            "world_size": 2,
            "sharder": sharder,
            "training_seed": -1,
            "objective_ms": objective,
            "infeasible": objective is None,
            "lower_bound_ms": None if objective is None else 1.0,
            "planning_time_s": 0.1,
            "extrapolated": None if objective is None else False,
            "source": "predicted",
            **values,
        }
        for sharder, column in objectives.items()
        for index, objective in enumerate(column)
    ]
    frame = pd.DataFrame(rows).astype({"objective_ms": float, "lower_bound_ms": float})
    frame["best_known_ms"] = frame.groupby("task")["objective_ms"].transform("min")
    return frame


def transfer_rows(ratios: dict[tuple[str, str], list[float | None]]) -> pd.DataFrame:
    """Rows by (trained on, evaluated on); None is infeasible."""
    return pd.DataFrame(
        [
            {
                "setting_train": train,
                "setting_eval": evaluated,
                "sharder": "ppo",
                "task": f"{evaluated}-{index}",
                "training_seed": -1,
                "infeasible": ratio is None,
                "ratio_to_cost_greedy": ratio,
            }
            for (train, evaluated), column in ratios.items()
            for index, ratio in enumerate(column)
        ]
    ).astype({"ratio_to_cost_greedy": float})


def learning_lines(ratios: list[float]) -> str:
    """Metrics of a training run, validated at every update, the first one untrained."""
    lines = [
        {
            "update": update,
            "num_placements": 100 * update,
            "seconds": float(update),
            "validation": {
                "objective_ratio": ratio,
                "share_better": 0.25,
                "num_compared": 8,
                "num_failed": 0,
                "num_rescued": 1,
            },
        }
        for update, ratio in enumerate(ratios)
    ]
    return "".join(json.dumps(line) + "\n" for line in lines)


def scores(total: float) -> dict[str, dict[str, float | None]]:
    """Error scores whose median is `total` in every phase."""
    one: dict[str, float | None] = {"median": total, "mean": total, "p90": total, "tau": None}
    return {"fwd": one, "bwd": one, "total": one}


def error_report(network: float, baseline: float, floor: float | None) -> dict[str, object]:
    """`errors.json` with one baseline."""
    return {
        "network": "network (additive)",
        "splits": {
            "test": {
                "num_sets": 7,
                "models": {"network (additive)": scores(network), "linear": scores(baseline)},
            }
        },
        "noise_floor": None if floor is None else {"num_pairs": 3, **scores(floor)},
        "collectives": {"num": 5, "median": 0.2, "mean": 0.3},
    }


def write_measurements(path: Path, kind: RowKind, num: int) -> None:
    """A measurement file whose rows are all alike but for their number."""
    usual = {
        "device": "cpu",
        "threads": 1,
        "hardware_fingerprint": "hw",
        "software_fingerprint": "sw",
        "measured_at": "2026-01-02T03:04:05+00:00",
        "iterations": 9,
        "warmup_iterations": 3,
        "cache": "warm",
        "collective": "all_to_all",
        "backend": "gloo",
        "num_slices": 2,
        "fwd_ms": 1.0,
        "bwd_ms": 2.0,
        "transfer_ms": 0.5,
        "fwd_relative_error": 0.03,
        "bwd_relative_error": 0.05,
        "transfer_relative_error": 0.07,
        "oversubscribed": True,
        "repeat": 0,
        "pass": 0,
        **dict.fromkeys(TRAFFIC_FEATURES, 64.0),
    }
    schema = arrow_schema(kind)
    rows = [
        {name: usual.get(name) for name in schema.names} | {"index": index, "key": str(index)}
        for index in range(num)
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_rows(
        path,
        kind,
        pa.Table.from_pylist(rows, schema=schema),
        {
            "environments": {
                "hw": {"cpu": "Testchip", "cores": 4, "memory_gib": 8, "gpus": []},
                "sw": {"torch": "2.13.0"},
            }
        },
    )


def write_full_run(root: Path, name: str = "fast") -> None:
    """A run folder in which every section has data; `name` is used wherever names are free."""
    for folder in ("measurements", "cost_net", "agent", "plans", "runs", "evaluation", "transfer"):
        (root / folder).mkdir(parents=True)
    write_measurements(root / "measurements/kernels.parquet", RowKind.KERNELS, 6)
    write_measurements(root / "measurements/collectives.parquet", RowKind.COLLECTIVES, 4)
    (root / "cost_net/errors.json").write_text(json.dumps(error_report(0.1, 0.2, 0.05)))
    pd.DataFrame(
        {
            "kind": ["fwd", "bwd", "fwd", "bwd", "collective"],
            "split": ["test"] * 4 + ["train"],
            "num_shards": [1, 1, 2, 2, 2],
            "measured_ms": [1.0, 2.0, 3.0, 4.0, 5.0],
            "predicted_ms": [1.1, 2.2, 2.7, 4.0, 5.5],
        }
    ).to_parquet(root / "cost_net/predictions.parquet")
    (root / "agent/metrics.jsonl").write_text(learning_lines([1.5, 1.1, 0.9, 0.95]))
    plan_with(name, (9.0, 8.0)).save(root / "plans/first.json")
    plan_with("slow", (17.0, 1.0)).save(root / "plans/slow.json")
    records = [
        {"step": 0, "sharder": name, "infeasible": False, "planning_time_s": 0.5},
        {"step": 1, "sharder": "slow", "infeasible": False, "planning_time_s": 0.25},
        {"step": 2, "sharder": "stuck", "infeasible": True, "planning_time_s": 0.125},
    ]
    (root / "plans/metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in records))
    validation_rows(
        plan=["plans/first.json", "plans/slow.json", f"{name}/third"],
        sharder=[name, "slow", "other"],
        predicted_ms=[12.0, 20.0, 30.0],
        measured_ms=[15.0, 16.0, 33.0],
    ).to_parquet(root / "runs/validation.parquet")
    evaluation_rows({"cost_greedy": [2.0, 2.0, 4.0], name: [1.0, 1.0, None]}).to_parquet(
        root / "evaluation/evaluation.parquet"
    )
    transfer_rows({(name, "20 tables"): [0.5, 0.5], (name, "4 ranks"): [2.0, None]}).to_parquet(
        root / "transfer/transfer.parquet"
    )
