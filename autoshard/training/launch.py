"""Trains under a plan on this machine: checks first, then one process per rank."""

from __future__ import annotations

from autoshard.clicks.batches import Share, num_steps
from autoshard.clicks.sources import open_clicks
from autoshard.errors import InputError
from autoshard.plan import ShardingPlan
from autoshard.runtime.group import Progress
from autoshard.runtime.launch import check_plan_here, group_for
from autoshard.training.checkpoint import check_can_save, check_folder
from autoshard.training.options import TrainingOptions
from autoshard.training.position import check_identity
from autoshard.training.results import TrainingResult
from autoshard.training.worker import find_checkpoint, train_plan


def check_training(plan: ShardingPlan, options: TrainingOptions) -> None:
    """Refuse what cannot be trained, before anything is allocated.

    Raises:
        PlanError: the plan's tables do not match the data set.
        InputError: an option, a file or a folder is not usable.
        ArtifactError: the checkpoint to resume from is damaged, or of another run.
        DependencyError: a package that carries the data is missing.
    """
    data = open_clicks(options.data, [entry.table for entry in plan.tables], seed=options.run.seed)
    share = Share(batch_size=plan.training.batch_size, world_size=plan.topology.world_size)
    samples = data.train.num_samples
    if samples is not None and not num_steps(samples, share, whole_steps=True):
        raise InputError(
            f"data set {data.name} does not fill a single step",
            got=f"{samples} samples",
            allowed=f"at least {share.global_batch_size}: the batch size of all ranks together",
            remedy="plan for a smaller batch size",
        )
    if options.out_dir is not None:
        check_folder(options.out_dir, "results")
    if options.checkpoint is not None:
        check_can_save(plan)
        check_folder(options.checkpoint, "checkpoints")
        manifest = find_checkpoint(options)
        if manifest is not None:
            check_identity(manifest, options)
            manifest.check_plan(plan)


def train(
    plan: ShardingPlan,
    options: TrainingOptions,
    *,
    pin_cores: bool = True,
    progress: Progress | None = None,
) -> TrainingResult:
    """Train on local processes.

    Args:
        plan: any plan of supported sharding types, for the data set's tables.
        options: what to train on what, how long, and what to write.
        pin_cores: give each rank a core of its own, if there are enough.
        progress: called with a rank and a line of progress.

    Raises:
        AutoshardError: the plan cannot be trained, or a rank failed; see `WorkerGroup.run`.
    """
    check_plan_here(plan, options.run)
    check_training(plan, options)
    with group_for(plan, options.run, pin_cores) as group:
        results: list[TrainingResult] = group.run(train_plan, plan, options, progress=progress)
    return results[0]
