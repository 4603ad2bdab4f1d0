"""Writes a calibrated model as an artifact that planning loads like any other."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from autoshard.artifact_files import write_artifact
from autoshard.calibration.adapting import AdaptedKernels, CalibrationConfig, adapt_kernels
from autoshard.calibration.data import CalibrationData
from autoshard.calibration.errors import QUANTITIES
from autoshard.calibration.exchanges import (
    CalibratedExchanges,
    calibrate_exchanges,
    tuned_bound,
)
from autoshard.calibration.scaling import OVERHEAD
from autoshard.calibration.tunable import TunableModel, softplus
from autoshard.cost_models.exported import (
    CARD_FILE,
    COLLECTIVE_FILE,
    COMPUTE_FILE,
    COST_MODEL_KIND,
    COST_MODEL_VERSION,
    ENCODE_FILE,
    WEIGHTS_FILE,
)
from autoshard.cost_models.ranges import MeasuredRange
from autoshard.programs import save_program

CALIBRATED_FROM = "calibrated_from"
_CONFIG_MARKS = ("kind", "version", "files", "identity", "fingerprint", "checksum")


def calibrate(
    model: TunableModel, data: CalibrationData, out: str | Path, config: CalibrationConfig
) -> dict[str, Any]:
    """Calibrate a model and write what comes out.

    Args:
        model: the base.
        data: of the new machine.
        out: where the artifact goes; see `autoshard.artifact_files.write_artifact`.
        config: how.

    Returns:
        The report: `kernels`, `collectives` (None if none were given), `fingerprint`.

    Raises:
        InputError: simulated and measured do not go together, or the place is not usable.
    """
    model.check_source(data.source)
    kernels = adapt_kernels(model, data.sets, config)
    exchanges = None
    if data.exchanges is not None:
        exchanges = calibrate_exchanges(model, data.exchanges, config.num_folds, config.seed)
    errors = {
        "protocol": f"{config.num_folds}-fold cross-validation over shard sets",
        "kernels": kernels.report,
        "collectives": None if exchanges is None else exchanges.report,
    }
    return {**errors, "fingerprint": _write(model, data, out, config, kernels, exchanges, errors)}


def _write(
    model: TunableModel,
    data: CalibrationData,
    out: str | Path,
    config: CalibrationConfig,
    kernels: AdaptedKernels,
    exchanges: CalibratedExchanges | None,
    errors: Mapping[str, Any],
) -> str:
    base = model.config
    exchange_state = model.exchange_state if exchanges is None else exchanges.state
    compute_bound = base["compute_bound"]
    if compute_bound is not None:
        overhead_ms = softplus(kernels.state[OVERHEAD]).tolist()
        compute_bound = {**compute_bound, "overhead_ms": overhead_ms}
    described = {key: value for key, value in base.items() if key not in _CONFIG_MARKS} | {
        "compute_bound": compute_bound,
        "collective_bound": tuned_bound(model, exchange_state),
        "measured_range": calibrated_range(model.model.measured_range, data).to_json(),
        "measurements": dict(data.facts),
        "errors": dict(errors),
        CALIBRATED_FROM: {"name": model.model.name, "fingerprint": model.model.fingerprint},
        "training": {"seed": config.seed, "num_folds": config.num_folds},
        "torch": torch.__version__,
    }
    weights = model.tuned_weights(kernels.state, exchange_state)
    states = {
        ENCODE_FILE: kernels.state,
        COMPUTE_FILE: kernels.state,
        COLLECTIVE_FILE: exchange_state,
    }
    return write_artifact(
        out,
        kind=COST_MODEL_KIND,
        version=COST_MODEL_VERSION,
        config=described,
        identity=base["identity"],
        writers={
            WEIGHTS_FILE: lambda path: save_file(weights, path),
            CARD_FILE: lambda path: _write_card(path, described),
            **{
                name: partial(save_program, model.save_program(name, state))
                for name, state in states.items()
            },
        },
    )


def calibrated_range(base: MeasuredRange, data: CalibrationData) -> MeasuredRange:
    """What a calibrated model counts as measured.

    Features take the union of both ranges: the base learned how cost depends on them, and
    calibration only moves its level. The optimizer is the calibration's alone, since another
    one's backward is another kernel; so are world sizes, unless all-to-alls are the base's still.
    """
    own = MeasuredRange.of(data.sets.features_SF, optimizers=(data.optimizer,))
    features = {
        name: (
            min(low, base.features[name][0]),
            max(high, base.features[name][1]),
        )
        for name, (low, high) in own.features.items()
        if name in base.features
    }
    world_sizes = base.world_sizes if data.exchanges is None else data.exchanges.world_sizes
    return MeasuredRange(features=features, world_sizes=world_sizes, optimizers=own.optimizers)


def _write_card(path: Path, described: Mapping[str, Any]) -> None:
    facts, errors = described["measurements"], described["errors"]
    origin, kernels, exchanges = (
        described[CALIBRATED_FROM], errors["kernels"], errors["collectives"]
    )  # fmt: skip
    rows = {"before": kernels["before"], "after": kernels["after"]}
    if kernels["noise_floor"]:
        rows["a second measurement"] = kernels["noise_floor"]
    lines = [
        "# Calibrated cost model",
        "",
        f"The model `{origin['name']}` (`{origin['fingerprint']}`), adapted to other measurements.",
        f"Its costs are marked `{described.get('source', 'predicted')}`.",
        "",
        "## Data and hardware",
        "",
        f"- {facts['num_kernel_rows']} kernel rows of {kernels['num_sets']} shard sets and "
        f"{facts['num_collective_rows']} all-to-alls,",
        f"  measured from {facts['measured_from']} to {facts['measured_to']}",
        f"- device `{facts['device']}`, {facts['threads']} thread(s) per process,"
        f" {facts['concurrent_workers']} processes at once, caches {facts['cache']}",
        f"- hardware fingerprint `{facts['hardware_fingerprint']}`,"
        f" software fingerprint `{facts['software_fingerprint']}`",
        f"- optimizer: {', '.join(described['measured_range']['optimizers'])}",
        "",
        "## Errors",
        "",
        f"{errors['protocol']}: medians of relative errors on held-out sets, with 95% bootstrap",
        f"intervals. Kept: {kernels['kept']}.",
        "",
        "| | " + " | ".join(QUANTITIES) + " |",
        "|---" * (len(QUANTITIES) + 1) + "|",
        *(
            f"| {name} | " + " | ".join(_shown(scores[q]) for q in QUANTITIES) + " |"
            for name, scores in rows.items()
        ),
        "",
        "All-to-alls are the base model's."
        if exchanges is None
        else f"All-to-alls: {_shown(exchanges['before'])} before, {_shown(exchanges['after'])} "
        f"after, on {exchanges['num']}.",
        "",
        "## Limits",
        "",
        "It holds for the hardware, optimizer and thread count it was calibrated with. Tables",
        "occur in several sets, so the errors are those of new sets of tables like these. The",
        "range of features is the union of the base model's and the calibration's.",
        "",
    ]
    path.write_text("\n".join(lines), encoding="utf-8")


def _shown(scores: Mapping[str, Any]) -> str:
    low, high = scores["interval"]
    return f"{scores['median']:.1%} ({low:.1%}–{high:.1%})"
