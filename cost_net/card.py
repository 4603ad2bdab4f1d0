"""The card of a cost model: what it learned from, how, how wrong it is, and where it ends."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from autoshard.cost_models.exported import SOURCE_KEY
from autoshard.objective import CostSource
from cost_net.dataset import SPLITS


def write_card(path: Path, described: Mapping[str, Any]) -> None:
    """Write the card.

    Args:
        path: of the file.
        described: the model's configuration, see `cost_net.export`.
    """
    lines = [*_origin(described), *_errors(described), *_limits(described)]
    path.write_text("\n".join(lines), encoding="utf-8")


def _origin(described: Mapping[str, Any]) -> list[str]:
    facts, ranges = described["measurements"], described["measured_range"]
    simulated = described[SOURCE_KEY] == CostSource.SIMULATED.value
    made = "simulated" if simulated else "measured"
    environments = facts.get("environments", {})
    hardware = environments.get(facts["hardware_fingerprint"], {})
    software = environments.get(facts["software_fingerprint"], {})
    return [
        "# Cost model",
        "",
        "Predicts the forward and backward time of a set of embedding shards on one rank, and the",
        "transfer time of an all-to-all. "
        + (
            "It learned from a simulated device, not from measurements:\nits costs, in "
            "milliseconds, are marked `simulated`."
            if simulated
            else "Costs are predictions, in milliseconds."
        ),
        "",
        "## Data and hardware",
        "",
        f"- {facts['num_kernel_rows']:,} {made} shard sets and {facts['num_collective_rows']:,} "
        "all-to-alls,",
        f"  {made} from {_time(facts['measured_from'])} to {_time(facts['measured_to'])}",
        f"- device `{facts['device']}`: {_hardware(hardware)}"
        f" (fingerprint `{facts['hardware_fingerprint']}`)",
        f"- software: {_software(software)} (fingerprint `{facts['software_fingerprint']}`)",
        f"- optimizer(s): {', '.join(ranges['optimizers'])}; world sizes of all-to-alls:"
        f" {', '.join(map(str, ranges['world_sizes']))}",
        "",
        "## Protocol",
        "",
        *(_simulated_protocol() if simulated else _measured_protocol(facts)),
        "",
    ]


def _simulated_protocol() -> list[str]:
    return [
        "A formula of rooflines, cache levels, launches and links, without noise. Its constants",
        "and their sources are those of `docs/simulated_device.md`. Nothing was calibrated against",
        "a real device.",
    ]


def _measured_protocol(facts: Mapping[str, Any]) -> list[str]:
    lines = [
        f"- {facts['concurrent_workers']} process(es) at once, {facts['threads']} thread(s) each; "
        f"caches {facts['cache']}",
        f"- {facts['num_passes']} pass(es) over all sets in random order and fresh processes;"
        f" {facts['num_repeated_sets']:,} sets measured twice",
        "- times taken to the machine's usual speed by reference kernels timed in between",
    ]
    if shared := facts["num_oversubscribed_rows"]:
        lines.append(f"- {shared:,} all-to-alls had more ranks than cores")
    return lines


def _hardware(described: Mapping[str, Any]) -> str:
    if name := described.get("simulated_device"):
        return f"`{name}`, simulated"
    parts = [*described.get("gpus", []), described.get("cpu")]
    if cores := described.get("cores"):
        parts.append(f"{cores} cores")
    if memory_gib := described.get("memory_gib"):
        parts.append(f"{memory_gib} GiB")
    return ", ".join(str(part) for part in parts if part) or "not described"


def _software(described: Mapping[str, Any]) -> str:
    parts = [f"{name} {version}" for name, version in described.items() if name != "threads"]
    return ", ".join(parts) or "not described"


def _time(text: str) -> str:
    """Without fractions of seconds."""
    return text.split(".")[0].replace("T", " ") + " UTC"


def _errors(described: Mapping[str, Any]) -> list[str]:
    errors = described["errors"]
    split = next(name for name in reversed(SPLITS) if name in errors["splits"])
    lines = [
        f"## Errors on {split} tables"
        + (", which occur in no training row" if split != "train" else ""),
        "",
        "| predictor | fwd median | bwd median | total median | total mean | tau |",
        "|---|---|---|---|---|---|",
    ]
    rows = dict(errors["splits"][split]["models"])
    if errors.get("noise_floor"):
        rows["a second measurement"] = errors["noise_floor"]
    for name, scores in rows.items():
        tau = scores["total"]["tau"]
        lines.append(
            f"| {name} | {scores['fwd']['median']:.1%} | {scores['bwd']['median']:.1%} "
            f"| {scores['total']['median']:.1%} | {scores['total']['mean']:.1%} "
            f"| {'–' if tau is None else f'{tau:.3f}'} |"
        )
    exchanges = errors["collectives"]
    held_out = exchanges["test"]
    return [
        *lines,
        "",
        f"All-to-alls: median relative error {exchanges['median']:.1%} on the {exchanges['num']} "
        "trained on, "
        + (
            f"{held_out['median']:.1%} on {held_out['num']} held out."
            if held_out
            else "none held out."
        ),
        *_unseen_world_sizes(exchanges.get("left_out_world_sizes") or {}),
        "",
    ]


def _unseen_world_sizes(rows: Mapping[str, Any]) -> list[str]:
    """What the card says of world sizes that the model had not seen."""
    if not rows:
        return []
    told = "; ".join(
        f"{scores['without']['median']:.1%} instead of {scores['with']['median']:.1%}"
        f" at {world_size} ranks"
        for world_size, scores in rows.items()
    )
    return ["", f"Median error on a world size that is left out of training: {told}."]


def _limits(described: Mapping[str, Any]) -> list[str]:
    return [
        "## Limits",
        "",
        "It holds for the hardware, optimizer, data type and thread count that it learned from.",
        "Outside the known range of its features a prediction is marked `extrapolated`.",
        "",
        "| feature | from | to |",
        "|---|---|---|",
        *(
            f"| {name} | {low:.4g} | {high:.4g} |"
            for name, (low, high) in described["measured_range"]["features"].items()
            if not name.startswith("lookup_share_reuse")
        ),
        "",
    ]
