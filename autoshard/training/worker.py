"""What one rank of a training run does: build the model, resume, train, report.

The same code runs under autoshard's own launcher and under torchrun.
"""

from __future__ import annotations

import gc
from pathlib import Path

from autoshard.clicks.sources import open_clicks
from autoshard.errors import InputError
from autoshard.plan import ShardingPlan
from autoshard.runtime.clocks import clock_offsets_ns
from autoshard.runtime.timing import StepRecord, StepTimings, combine_records
from autoshard.runtime.together import each
from autoshard.runtime.worker import RankProcess, make_loop
from autoshard.training.checkpoint import check_writable
from autoshard.training.manifest import Manifest, latest_checkpoint, read_manifest
from autoshard.training.model import build_model
from autoshard.training.options import TrainingOptions
from autoshard.training.results import TrainingResult
from autoshard.training.trainer import Trainer, TrainerParts


def train_plan(
    process: RankProcess, plan: ShardingPlan, options: TrainingOptions
) -> TrainingResult:
    """Train under one plan; every rank of the group must call it.

    Returns:
        The result of all ranks together, on every rank.

    Raises:
        AutoshardError: the data, the plan, a checkpoint or a rank is at fault.
    """
    collectives, patient = process.collectives, process.patient_collectives()
    tables = [entry.table for entry in plan.tables]
    process.report("reading the data set")
    data = each(
        patient,
        "opening the data set",
        lambda: open_clicks(options.data, tables, seed=options.run.seed),
    )
    manifest = each(patient, "looking for checkpoints", lambda: find_checkpoint(options))
    steps = patient.gather_objects("checkpoint", None if manifest is None else manifest.step)
    if len(set(steps)) > 1:
        raise InputError(
            "the ranks do not see the same checkpoints",
            got=f"steps by rank: {steps}",
            remedy="give a checkpoint folder on a file system that all nodes share",
        )
    process.report("building")
    input_collectives = process.input_collectives() if options.run.pipelined else None
    model = each(
        patient,
        "building the model",
        lambda: build_model(plan, options, data.num_numeric, collectives, input_collectives),
    )
    loop = make_loop(
        model.embeddings,
        model.dense,
        model.dense_optimizer,
        collectives,
        pipelined=options.run.pipelined,
    )
    trainer = Trainer(
        TrainerParts(
            plan=plan,
            options=options,
            data=data,
            model=model,
            loop=loop,
            collectives=patient,
            report=process.report,
        )
    )
    if manifest is not None:
        trainer.resume(manifest)
    model.set_learning_rates(options.learning_rate, options.dense_learning_rate)
    trainer.train()
    malformed = sum(
        patient.gather_objects("malformed lines", getattr(data.train, "num_malformed", 0))
    )
    if malformed:
        trainer.notes.append(f"{malformed} malformed lines of the training data were left out")
    result = TrainingResult(
        data=data.description,
        num_steps=trainer.position.step,
        num_samples=trainer.position.samples,
        losses=tuple(trainer.losses),
        curve=tuple(trainer.position.curve),
        timings=_timings(process, trainer.records),
        checkpoint=None if trainer.checkpoint is None else str(trainer.checkpoint),
        notes=tuple(trainer.notes),
        num_out_of_range=tuple(
            patient.gather_objects("ids out of range", model.embeddings.num_out_of_range)
        ),
        allocated_bytes=tuple(patient.gather_objects("bytes", model.embeddings.allocated_bytes())),
    )
    # Tables are large: the next run must not find this one's still there.
    del trainer, loop, model
    gc.collect()
    return result


def find_checkpoint(options: TrainingOptions) -> Manifest | None:
    """The checkpoint to resume from; None to start anew.

    Raises:
        InputError: nothing can be written there, or there are checkpoints, but resuming is not
            asked for.
        ArtifactError: the newest one is damaged.
    """
    if options.checkpoint is None:
        return None
    check_writable(Path(options.checkpoint))
    latest = latest_checkpoint(Path(options.checkpoint))
    if latest is None:
        return None
    if not options.resume:
        raise InputError(
            f"folder {options.checkpoint} holds checkpoints of an earlier run",
            got=latest.name,
            remedy="resume, or choose another folder",
        )
    return read_manifest(latest)


def _timings(process: RankProcess, records: list[StepRecord]) -> StepTimings | None:
    gathered = process.collectives.gather_objects("timings", records)
    offsets = clock_offsets_ns(process.collectives)
    if not records:
        return None
    return combine_records(
        gathered, clock_offsets_ns=offsets, oversubscribed=process.oversubscribed
    )
