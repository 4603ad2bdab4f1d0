"""From a problem to a finished plan: run a sharder, cost the result, say how good it is."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from autoshard.costing import lower_bound_ms, predict_plan
from autoshard.errors import InfeasibleError
from autoshard.plan import PlanCost, ShardingPlan, plan_from_slices
from autoshard.policies import Policy, load_policy
from autoshard.problem import ShardingProblem
from autoshard.protocols import CostModel, SearchBudget
from autoshard.sharders.registry import make_sharder, sharder_names
from autoshard.tables import tables_fingerprint
from autoshard.validate import validate_plan

#: Sharders that start from a learned policy.
POLICY_SHARDERS = ("ppo", "autoshard")


def package_versions() -> dict[str, str]:
    """Versions of what decides a plan."""
    versions = {"python": platform.python_version()}
    for package in ("autoshard", "numpy", "torch"):
        versions[package] = importlib.metadata.version(package)
    return versions


def make_plan(
    problem: ShardingProblem,
    *,
    sharder: str = "autoshard",
    cost_model: CostModel,
    seed: int = 0,
    budget: SearchBudget | None = None,
    policy: Policy | str = "default",
) -> ShardingPlan:
    """Plan with one sharder; the same arguments give the same plan, byte for byte.

    Args:
        problem: tables, training and topology.
        sharder: a name of `autoshard.sharders.registry.sharder_names`.
        cost_model: predicts what the sharder minimises and what the plan reports.
        seed: decides every random choice.
        budget: evaluations, and a time limit that only cuts them short.
        policy: for `ppo` and `autoshard`: a loaded policy, or the name or path of one.

    Returns:
        A validated plan with its predicted cost, lower bound and provenance.

    Raises:
        InfeasibleError: no placement within memory was found.
    """
    budget = budget or SearchBudget()
    loaded: Policy | None = None
    if sharder in POLICY_SHARDERS:
        loaded = load_policy(policy) if isinstance(policy, str) else policy
    options = {} if loaded is None else {"policy": loaded}
    assignment = make_sharder(sharder, **options).assign(
        problem, cost_model, seed=seed, budget=budget
    )
    provenance = {
        "sharder": sharder,
        "seed": seed,
        "num_evaluations": assignment.num_evaluations,
        "max_evaluations": budget.num_evaluations,
        "cut_short": assignment.cut_short,
        "tables": tables_fingerprint(problem.tables),
        "topology": problem.topology.fingerprint,
        "cost_model": {"name": cost_model.name, "fingerprint": cost_model.fingerprint},
        "policy": None if loaded is None else loaded.fingerprint,
        "versions": package_versions(),
    }
    placed = list(zip(assignment.slices, assignment.ranks, strict=True))
    plan = plan_from_slices(problem, placed, provenance=provenance)
    validate_plan(plan)
    step = predict_plan(plan, cost_model)
    bound = lower_bound_ms(problem, assignment.slices, cost_model)
    best_known = step.step_ms if sharder == "autoshard" else None
    return plan.with_cost(PlanCost(step=step, lower_bound_ms=bound, best_known_ms=best_known))


@dataclass(frozen=True, kw_only=True)
class SharderResult:
    """One sharder's answer to a problem: a plan, or why there is none."""

    sharder: str
    plan: ShardingPlan | None
    error: InfeasibleError | None
    planning_time_s: float


def compare_sharders(
    problem: ShardingProblem,
    *,
    cost_model: CostModel,
    sharders: Sequence[str] | None = None,
    seed: int = 0,
    budget: SearchBudget | None = None,
    policy: Policy | str = "default",
    on_progress: Callable[[str], None] | None = None,
) -> list[SharderResult]:
    """Plan with several sharders; `best_known_ms` of each plan is the best of all.

    Args:
        problem: tables, training and topology.
        cost_model: as in `make_plan`.
        sharders: names; all registered ones by default.
        seed: as in `make_plan`.
        budget: as in `make_plan`, for each sharder.
        policy: as in `make_plan`; loaded once.
        on_progress: told each sharder's name before it starts.
    """
    names = tuple(sharders or sharder_names())
    if isinstance(policy, str) and any(name in POLICY_SHARDERS for name in names):
        policy = load_policy(policy)
    results = []
    for name in names:
        if on_progress is not None:
            on_progress(name)
        started = time.perf_counter()
        plan, error = None, None
        try:
            plan = make_plan(
                problem,
                sharder=name,
                cost_model=cost_model,
                seed=seed,
                budget=budget,
                policy=policy,
            )
        except InfeasibleError as failure:
            error = failure
        elapsed_s = time.perf_counter() - started
        results.append(
            SharderResult(sharder=name, plan=plan, error=error, planning_time_s=elapsed_s)
        )
    best_ms = min(
        (r.plan.cost.step.step_ms for r in results if r.plan is not None and r.plan.cost),
        default=None,
    )
    return [
        result
        if result.plan is None or result.plan.cost is None
        else replace(
            result,
            plan=result.plan.with_cost(replace(result.plan.cost, best_known_ms=best_ms)),
        )
        for result in results
    ]
