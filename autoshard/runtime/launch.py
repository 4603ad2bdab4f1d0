"""Runs plans on this machine: one process per rank, started, watched and ended here."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from autoshard.errors import InputError, PlanError
from autoshard.memory import RankLedger
from autoshard.plan import ShardingPlan
from autoshard.runtime.capabilities import Device, check_plan_supported
from autoshard.runtime.group import Progress, WorkerGroup
from autoshard.runtime.host_memory import check_host_memory
from autoshard.runtime.results import PlanRun, RunOptions, RunResult
from autoshard.runtime.worker import RankProcess, check_devices, execute_plan


def check_plan_here(plan: ShardingPlan, options: RunOptions) -> None:
    """Refuse a plan that cannot be run with all its ranks here, before any process starts.

    Raises:
        UnsupportedError: the runtime does not execute it, or not without more devices.
        PlanError: it is malformed.
        InfeasibleError: it does not fit the ranks' memory, or that of this machine.
    """
    ledgers = check_plan(plan, options)
    check_devices(options.device, plan.topology.world_size)
    if options.device is Device.CPU:
        check_host_memory(ledgers)


def check_plan(plan: ShardingPlan, options: RunOptions) -> tuple[RankLedger, ...]:
    """Refuse a plan that cannot be run anywhere.

    Returns:
        The memory ledger of every rank.

    Raises:
        UnsupportedError: the runtime does not execute it.
        PlanError: it is malformed.
        InfeasibleError: it does not fit the ranks' memory.
    """
    from autoshard.validate import validate_plan

    check_plan_supported(plan, options.device)
    return validate_plan(plan)


def run_plan(
    plan: ShardingPlan,
    *,
    options: RunOptions | None = None,
    pin_cores: bool = True,
    progress: Progress | None = None,
) -> RunResult:
    """Run one plan on local processes.

    Args:
        plan: any plan of supported sharding types.
        options: steps, seed, device, timeout and so on.
        pin_cores: give each rank a core of its own, if there are enough.
        progress: called with a rank and what it does.

    Raises:
        AutoshardError: the plan cannot be run, or a rank failed; see `WorkerGroup.run`.
    """
    options = options or RunOptions()
    check_plan_here(plan, options)
    with group_for(plan, options, pin_cores) as group:
        return _first(group.run(execute_plan, plan, options, progress=progress))


def run_plans(
    plans: Sequence[ShardingPlan],
    *,
    options: RunOptions | None = None,
    passes: int = 1,
    schedule: Sequence[int] | None = None,
    pin_cores: bool = True,
    progress: Progress | None = None,
    finished: Callable[[PlanRun], None] | None = None,
) -> list[PlanRun]:
    """Run many plans on one group of processes that stays up.

    Machines drift while one measures. So every pass runs all plans, in an order of its
    own: a plan's runs lie far apart, and plans are compared within a pass.

    Args:
        plans: all for the same number of ranks.
        options: of every run.
        passes: how often every plan is run.
        schedule: the plans' order in every pass, by index; shuffled by the seed if None.
        pin_cores: give each rank a core of its own, if there are enough.
        progress: called with a rank and what it does.
        finished: called after each run.

    Returns:
        One `PlanRun` per plan and pass, in the order in which they were done.

    Raises:
        AutoshardError: a plan cannot be run, or a rank failed.
    """
    options = options or RunOptions()
    if not plans:
        return []
    if isinstance(passes, bool) or not isinstance(passes, int) or passes < 1:
        raise InputError("passes is not usable", got=repr(passes), allowed="integers >= 1")
    if schedule is not None and sorted(schedule) != list(range(len(plans))):
        raise InputError(
            "the schedule does not name every plan once",
            got=list(schedule),
            allowed=f"an order of 0..{len(plans) - 1}",
        )
    sizes = {plan.topology.world_size for plan in plans}
    if len(sizes) > 1:
        raise PlanError(
            "plans for different numbers of ranks cannot share one group of processes",
            got=sorted(sizes),
            remedy="run them in one call per world size",
        )
    for plan in plans:
        check_plan_here(plan, options)
    runs: list[PlanRun] = []
    with group_for(plans[0], options, pin_cores) as group:
        for pass_index in range(passes):
            for plan_index in _order(len(plans), schedule, options.seed, pass_index):
                result = _first(
                    group.run(execute_plan, plans[plan_index], options, progress=progress)
                )
                run = PlanRun(
                    plan_index=plan_index,
                    pass_index=pass_index,
                    position=len(runs),
                    result=result,
                )
                runs.append(run)
                if finished is not None:
                    finished(run)
    return runs


def _order(num_plans: int, schedule: Sequence[int] | None, seed: int, pass_index: int) -> list[int]:
    if schedule is not None:
        return list(schedule)
    order = list(range(num_plans))
    random.Random(f"{seed}/{pass_index}").shuffle(order)
    return order


def group_for(plan: ShardingPlan, options: RunOptions, pin_cores: bool = True) -> WorkerGroup:
    """The local processes that run a plan, not yet started."""
    return WorkerGroup(
        plan.topology.world_size,
        device=options.device,
        timeout_s=options.timeout_s,
        pin_cores=pin_cores,
    )


def _first(results: list[RunResult]) -> RunResult:
    return results[0]


__all__ = ["RankProcess", "check_plan", "check_plan_here", "group_for", "run_plan", "run_plans"]
