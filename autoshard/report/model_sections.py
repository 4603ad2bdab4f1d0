"""The report's sections about what was learned: the cost model and the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from autoshard.measure.config import SimulatedDevice
from autoshard.objective import CostSource
from autoshard.report.data import ReportData
from autoshard.report.learning_figures import (
    error_bars,
    learning_curves,
    prediction_scatter,
    top_of_later_part,
)
from autoshard.report.sections import (
    MISSING,
    Column,
    HtmlTable,
    Section,
    count,
    listed,
    missing_section,
    module_command,
    percent,
    ratio,
)
from autoshard.report.statistics import mean_and_std

_FLOOR = "a second measurement"


def cost_model_section(data: ReportData) -> Section:
    """How wrong the cost model is, beside plain baselines and beside the measurements' noise."""
    anchor, title = "cost-model", "Cost model"
    folder = data.folder
    command = module_command(
        "experiments.train_cost_net",
        f"measurements=[{folder}/measurements]",
        f"out={folder}/cost_net",
    )
    if data.errors is None:
        return missing_section(anchor, title, "No cost model was trained here yet.", command)
    splits: Mapping[str, Any] = data.errors["splits"]
    split = next((name for name in ("test", "validation", *splits) if name in splits), None)
    if split is None:
        return missing_section(anchor, title, "The error report has no split.", command)
    models = dict(splits[split]["models"])
    network = str(data.errors["network"])
    timed = _how_timed(data.errors)
    floor = data.errors.get("noise_floor")
    order = sorted(models, key=lambda name: float(models[name]["total"]["median"]))
    scores = {name: models[name] for name in order} | ({_FLOOR: floor} if floor else {})
    pictures = [
        error_bars(
            {
                name: {phase: float(s[phase]["median"]) for phase in ("fwd", "bwd", "total")}
                for name, s in scores.items()
            }
        )
    ]
    if data.predictions is not None:
        for phase in ("fwd", "bwd"):
            some = data.predictions
            some = some[(some["kind"] == phase) & (some["split"] == split)]
            some = some[(some["measured_ms"] > 0) & (some["predicted_ms"] > 0)]
            if len(some):
                pictures.append(prediction_scatter(some, phase, split, timed))
    return Section(
        anchor=anchor,
        title=title,
        takeaway=_cost_model_takeaway(models, network, floor, split),
        command=command,
        pictures=tuple(pictures),
        tables=(_error_table(scores, splits[split]["num_sets"], split, timed),),
        notes=_collective_notes(data.errors.get("collectives")),
    )


def _cost_model_takeaway(
    models: Mapping[str, Any], network: str, floor: Mapping[str, Any] | None, split: str
) -> str:
    own = float(models[network]["total"]["median"])
    text = (
        f"On {split} tables, the {network} predicts compute time with a median relative error "
        f"of {percent(own)}"
    )
    baselines = {name: s for name, s in models.items() if name != network}
    if baselines:
        best = min(baselines, key=lambda name: float(baselines[name]["total"]["median"]))
        value = float(baselines[best]["total"]["median"])
        relation = "better than" if own < value else "no better than"
        text += f", {relation} the best baseline ({best}, {percent(value)})"
    if floor:
        text += (
            "; a second measurement differs from the first by "
            f"{percent(float(floor['total']['median']))}"
        )
    return text + "."


def _how_timed(errors: Mapping[str, Any]) -> str:
    """Whether the model learned from measured or from simulated times."""
    device = errors.get("measurements", {}).get("device")
    simulated = device == SimulatedDevice.SIMULATED.value
    return (CostSource.SIMULATED if simulated else CostSource.MEASURED).value


def _error_table(scores: Mapping[str, Any], num_sets: int, split: str, timed: str) -> HtmlTable:
    rows = []
    for name, score in scores.items():
        total = score["total"]
        tau = total.get("tau")
        rows.append(
            (
                name,
                *(percent(float(score[phase]["median"])) for phase in ("fwd", "bwd", "total")),
                percent(float(total["mean"])),
                percent(float(total["p90"])),
                MISSING if tau is None else ratio(float(tau), 3),
            )
        )
    columns = [Column(title="predictor", numeric=False)]
    columns += [Column(title=f"{phase}, median") for phase in ("forward", "backward", "total")]
    columns += [Column(title=t) for t in ("total, mean", "total, 90th percentile", "Kendall's tau")]
    return HtmlTable(
        columns=tuple(columns),
        rows=tuple(rows),
        caption=f"Relative error against {timed} time, {count(num_sets, 'shard set')} of the "
        f"{split} split",
    )


def _collective_notes(facts: Mapping[str, Any] | None) -> tuple[str, ...]:
    """Held out first: what was trained on says little about what will be predicted."""
    if not facts:
        return ()
    held_out = facts.get("test")
    parts = [
        f"{percent(float(scores['median']))} on the {int(scores['num']):,} measurements that "
        f"were {what}"
        for what, scores in (("held out", held_out), ("trained on", facts))
        if scores and "median" in scores
    ]
    if not parts:
        return ()
    note = f"All-to-alls, median relative error: {listed(parts)}."
    if not held_out:
        note = f"{note} None were held out."
    unseen = [
        f"{percent(float(scores['without']['median']))} instead of "
        f"{percent(float(scores['with']['median']))} at {world_size} ranks"
        for world_size, scores in (facts.get("left_out_world_sizes") or {}).items()
    ]
    if not unseen:
        return (note,)
    return (
        note,
        "A world size that is left out of training is predicted with a median relative error of "
        f"{listed(unseen)}.",
    )


def learning_section(data: ReportData) -> Section:
    """How the policy got better, relative to the cost-aware greedy."""
    anchor, title = "learning", "Learning"
    folder = data.folder
    command = module_command(
        "experiments.train_agent", *data.option("cost_model"), f"out={folder}/agent"
    )
    runs = {
        name: [record for record in records if "validation" in record]
        for name, records in data.learning.items()
    }
    if not runs:
        return missing_section(anchor, title, "No policy was trained here yet.", command)
    curves = {
        name: [
            (float(r["num_placements"]), float(r["validation"]["objective_ratio"])) for r in records
        ]
        for name, records in runs.items()
    }
    pictures = [learning_curves(curves)]
    if (top := top_of_later_part(curves)) is not None:
        pictures.append(learning_curves(curves, top=top))
    rows = []
    for name, records in runs.items():
        best = _best(records)
        first = records[0]
        seconds = [r["seconds"] for r in data.learning[name] if r.get("seconds") is not None]
        value = best["validation"]
        rows.append(
            (
                name,
                _ratio_of(first) if first["update"] == 0 else MISSING,
                _ratio_of(best),
                f"{best['update']:,}",
                _ratio_of(records[-1]),
                f"{records[-1]['update']:,}",
                f"{value['num_compared']:,}",
                percent(value.get("share_better"), 0),
                f"{value['num_failed']:,}",
                f"{value.get('num_rescued', 0):,}",
                f"{float(seconds[-1]):,.0f}" if seconds else MISSING,
            )
        )
    columns = [Column(title="run", numeric=False)]
    columns += [
        Column(title=t)
        for t in (
            "untrained",
            "best",
            "at update",
            "last",
            "updates",
            "tasks compared",
            "better on",
            "only greedy solves",
            "only policy solves",
            "training, s",
        )
    ]
    return Section(
        anchor=anchor,
        title=title,
        takeaway=_learning_takeaway(runs),
        command=command,
        pictures=tuple(pictures),
        tables=(
            HtmlTable(
                columns=tuple(columns),
                rows=tuple(rows),
                caption="Step time under the cost model over cost_greedy's, geometric mean over "
                "the validation tasks that both solve (below 1: better)",
            ),
        ),
        notes=(
            "The best validation is chosen on the very tasks that it is told of, so it flatters; "
            "problems of unseen tables (below) judge a policy.",
        ),
    )


def _best(records: Sequence[Mapping[str, Any]]) -> Mapping[str, Any]:
    return min(records, key=lambda record: float(record["validation"]["objective_ratio"]))


def _ratio_of(record: Mapping[str, Any]) -> str:
    return ratio(float(record["validation"]["objective_ratio"]))


def _learning_takeaway(runs: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    name = min(runs, key=lambda n: float(_best(runs[n])["validation"]["objective_ratio"]))
    best, first = _best(runs[name]), runs[name][0]
    value = float(best["validation"]["objective_ratio"])
    whose = "the policy" if len(runs) == 1 else f"the best of them ({name})"
    text = ""
    if len(runs) > 1:
        ratios = [
            float(_best(records)["validation"]["objective_ratio"]) for records in runs.values()
        ]
        mean, std = mean_and_std(ratios)
        text = (
            f"At their best validation, {len(runs)} policies plan for {ratio(mean)} ± {std:.4f} "
            "times cost_greedy's step time (mean and standard deviation). "
        )
    text += f"After {count(best['update'], 'update')}, {whose} plans for {ratio(value)} times "
    text += f"cost_greedy's step time on {count(best['validation']['num_compared'], 'task')}"
    better = best["validation"].get("share_better")
    text += ", which is lower" if value < 1 else ", which is no lower"
    if better is not None:
        text += f", and better on {percent(float(better), 0)} of them"
    if first["update"] == 0 and best is not first:
        text += f"; untrained it was {_ratio_of(first)}"
    failed = int(best["validation"]["num_failed"])
    if failed:
        text += f", and it fails on {count(failed, 'task')} that cost_greedy solves"
    return text + "."
