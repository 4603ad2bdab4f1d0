"""The report's section on measurements: what, when, where, and how repeatable."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pandas as pd

from autoshard.objective import CostSource
from autoshard.report.data import Measurements, ReportData
from autoshard.report.learning_figures import (
    MAX_POINTS,
    collective_times,
    how_timed,
    kernel_times,
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
)

SIMULATED = CostSource.SIMULATED.value


def measurement_section(data: ReportData) -> Section:
    """What was measured, when, on which hardware, and how repeatable it is."""
    anchor, title = "measurements", "Measurements"
    command = module_command("experiments.measure", f"out={data.folder}/measurements")
    parts = [part for part in (data.kernels, data.collectives) if part is not None]
    if not parts or all(part.rows.empty for part in parts):
        return missing_section(anchor, title, "No measurements here yet.", command)
    pictures, rows, said, notes, drawn = [], [], [], [], []
    if data.kernels is not None and not data.kernels.rows.empty:
        kernels = data.kernels.rows
        pictures.append(kernel_times(kernels))
        drawn.append(len(kernels))
        sets = kernels.drop_duplicates(["protocol", "hardware_fingerprint", "index", "repeat"])
        repeats = int((sets["repeat"] > 0).sum())
        said.append(f"{count(len(sets) - repeats, 'shard set')}")
        if (passes := int(kernels["pass"].max()) + 1) > 1:
            notes.append(f"Each measurement of a shard set consists of {passes} passes.")
        if repeats:
            notes.append(f"{count(repeats, 'shard set')} measured a second time, to see the noise.")
        error = float(np.nanmedian(kernels[["fwd_relative_error", "bwd_relative_error"]]))
        rows.append(
            _measurement_row("kernels", data.kernels, error, kernels["cache"].unique().tolist())
        )
    if data.collectives is not None and not data.collectives.rows.empty:
        for name, collectives in data.collectives.rows.groupby("collective", sort=False):
            kind = str(name).replace("_", "-")
            pictures.append(collective_times(collectives, kind))
            drawn.append(len(collectives))
            said.append(f"{count(len(collectives), kind)}")
            error = float(np.nanmedian(collectives["transfer_relative_error"]))
            part = replace(data.collectives, rows=collectives)
            settings = collectives["backend"].unique().tolist()
            rows.append(_measurement_row(f"{kind}s", part, error, settings))
            if over := int(collectives["oversubscribed"].sum()):
                notes.append(
                    f"Oversubscribed: {over} of {count(len(collectives), kind)} had more "
                    "ranks than cores (drawn hollow)."
                )
    if any(num > MAX_POINTS for num in drawn):
        notes.append(f"Pictures show {MAX_POINTS} rows, evenly picked.")
    machines = _machines(parts)
    timed = how_timed(pd.concat([part.rows[["device"]] for part in parts]))
    takeaway = f"{listed(said)} were {timed} on {listed(list(machines.values()))}"
    takeaway += f"; the medians' standard error is {rows[0][-1]} for half of the {rows[0][0]}."
    if len(machines) > 1:
        notes.insert(0, f"These rows come from {len(machines)} different machines.")
    if SIMULATED in timed:
        notes.insert(0, "Simulated: worked out from published figures of a device, not timed.")
    columns = [Column(title="kind", numeric=False), Column(title="rows")]
    columns += [
        Column(title=name, numeric=False)
        for name in ("measured (UTC)", "device", "setting", "versions")
    ]
    columns += [Column(title="threads"), Column(title="iterations"), Column(title="std. error")]
    return Section(
        anchor=anchor,
        title=title,
        takeaway=takeaway[0].upper() + takeaway[1:],
        command=command,
        pictures=tuple(pictures),
        tables=(HtmlTable(columns=tuple(columns), rows=tuple(rows)),),
        notes=tuple(notes),
    )


def _measurement_row(
    kind: str, part: Measurements, error: float, settings: Sequence[object]
) -> tuple[str, ...]:
    rows = part.rows
    software = [
        part.environments.get(name, {}) for name in sorted(set(rows["software_fingerprint"]))
    ]
    versions = sorted(
        {
            f"{package} {facts[package]}"
            for facts in software
            for package in ("torch", "fbgemm-gpu", "fbgemm-gpu-cpu")
            if package in facts
        }
    )
    first, last = rows["measured_at"].astype(str).min(), rows["measured_at"].astype(str).max()
    return (
        kind,
        f"{len(rows):,}",
        _time_span(first, last),
        ", ".join(sorted(map(str, rows["device"].unique()))),
        ", ".join(sorted(map(str, settings))),
        ", ".join(versions) or MISSING,
        ", ".join(f"{n:.0f}" for n in sorted(rows["threads"].unique())),
        f"{rows['iterations'].median():.0f}",
        percent(error),
    )


def _time_span(first: str, last: str) -> str:
    """From and to, in minutes; the day once if it is the same."""
    start, end = first[:16].replace("T", " "), last[:16].replace("T", " ")
    return f"{start} – {end[11:] if end[:10] == start[:10] else end}"


def _machines(parts: Sequence[Measurements]) -> dict[str, str]:
    """A description of each machine, by fingerprint."""
    found: dict[str, str] = {}
    for part in parts:
        for name in sorted(set(part.rows["hardware_fingerprint"].astype(str))):
            facts = part.environments.get(name, {})
            if "simulated_device" in facts:
                found[name] = str(facts["simulated_device"])
                continue
            gpus = [str(gpu) for gpu in facts.get("gpus", ())]
            words = [*gpus, str(facts.get("cpu", "a machine that is not described"))]
            if "cores" in facts:
                words.append(f"{facts['cores']} cores")
            if facts.get("memory_gib"):
                words.append(f"{facts['memory_gib']} GiB")
            found[name] = f"{words[0]} ({', '.join(words[1:])})" if words[1:] else words[0]
    return found
