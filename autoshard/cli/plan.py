"""`autoshard plan`: from a table list to plan.json."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from autoshard.cli.console import note, say, show_json, show_table, waiting
from autoshard.cli.options import (
    DEFAULT_POLICY,
    CostModelOption,
    EvaluationsOption,
    JsonOption,
    PolicyOption,
    SeedOption,
    SharderOption,
    TablesArgument,
    TimeLimitOption,
    check_output,
    check_policy,
    check_sharder,
    integer_option,
    load_model,
    load_tables,
    parse_gib,
    parse_hbm_gib,
)

if TYPE_CHECKING:
    from autoshard.plan import ShardingPlan
    from autoshard.planning import SharderResult
    from autoshard.problem import ShardingProblem


def plan_command(
    tables: TablesArgument,
    world_size: Annotated[int, integer_option("Ranks to place tables on.", low=1)],
    hbm_gib: Annotated[
        str,
        typer.Option(
            metavar="GIB[,GIB…]",
            help="Memory of a rank in GiB, decimals allowed: one value for all, "
            "or one per rank separated by commas.",
        ),
    ],
    out: Annotated[
        str | None,
        typer.Option(
            metavar="PLAN.JSON",
            help="Where the plan goes, in a folder that exists; an older file is replaced in "
            "one step. Without it, nothing is written.",
        ),
    ] = None,
    sharder: SharderOption = "autoshard",
    batch_size: Annotated[int, integer_option("Samples per rank and step.", low=1)] = 512,
    local_world_size: Annotated[
        int,
        integer_option("Ranks per node; divides the world size. 0: all on one node.", low=0),
    ] = 0,
    optimizer: Annotated[
        str,
        typer.Option(help="The fused optimizer: sgd, adagrad, rowwise_adagrad or adam."),
    ] = "rowwise_adagrad",
    dense_gib: Annotated[
        str, typer.Option(metavar="GIB", help="What dense layers take on every rank.")
    ] = "0",
    reserve_gib: Annotated[
        str, typer.Option(metavar="GIB", help="What no plan may use on any rank.")
    ] = "0",
    batches_in_flight: Annotated[
        int, integer_option("Batches held at once: 1 in a plain loop, 3 in a pipeline.", low=1)
    ] = 1,
    cost_model: CostModelOption = "default",
    policy: PolicyOption = DEFAULT_POLICY,
    seed: SeedOption = 0,
    time_limit: TimeLimitOption = None,
    evaluations: EvaluationsOption = 100_000,
    compare: Annotated[
        bool, typer.Option("--compare", help="Plan with every sharder and print one line for each.")
    ] = False,
    json_output: JsonOption = False,
) -> None:
    """Decide which rank holds which table, or which slice of it.

    For example:

      autoshard plan tables.csv --world-size 8 --hbm-gib 16 --out plan.json
      autoshard plan tables.parquet --world-size 2 --hbm-gib 16,24.5 --out plan.json
      autoshard plan 'workload:mlperf_dcnv2?scale=0.1' --world-size 4 --hbm-gib 16 --compare
      autoshard plan 'workload:production?num_tables=80&seed=0' --world-size 8 --hbm-gib 32

    Equal arguments give equal plans. A time limit may cut the search short; the plan then says so.
    """
    check_output(out, tables)
    check_sharder(sharder)
    check_policy(policy)
    problem = _problem(
        tables=tables,
        world_size=world_size,
        hbm_gib=hbm_gib,
        local_world_size=local_world_size,
        reserve_gib=reserve_gib,
        batch_size=batch_size,
        optimizer=optimizer,
        dense_gib=dense_gib,
        batches_in_flight=batches_in_flight,
    )
    _warn_if_not_runnable(problem)
    from autoshard.protocols import SearchBudget

    model = load_model(cost_model)
    search: dict[str, Any] = {
        "cost_model": model,
        "seed": seed,
        "budget": SearchBudget(num_evaluations=evaluations, time_limit_s=time_limit),
        "policy": policy,
    }
    results: list[SharderResult] = []
    if compare:
        plan, results = _compare(problem, sharder, search, quiet=json_output)
    else:
        from autoshard.planning import make_plan

        with waiting(f"planning {len(problem.tables)} tables with {sharder}"):
            plan = make_plan(problem, sharder=sharder, **search)
    if out is not None:
        plan.save(out)
    if plan.provenance["cut_short"]:
        note("note: the time limit ended the search before its evaluations were used")
    if json_output:
        _show_json(plan, out, results)
    else:
        _show(plan)
    if out is not None:
        note(f"wrote {out}")


def _problem(
    *,
    tables: str,
    world_size: int,
    hbm_gib: str,
    local_world_size: int,
    reserve_gib: str,
    batch_size: int,
    optimizer: str,
    dense_gib: str,
    batches_in_flight: int,
) -> ShardingProblem:
    from autoshard.errors import InputError
    from autoshard.problem import ShardingProblem, TrainingConfig, parse_optimizer
    from autoshard.topology import MAX_WORLD_SIZE, Topology

    if world_size > MAX_WORLD_SIZE:  # before a list of that length is made
        raise InputError(
            "--world-size is out of range", got=world_size, allowed=f"1..{MAX_WORLD_SIZE}"
        )
    topology = Topology(
        world_size=world_size,
        hbm_bytes=parse_hbm_gib(hbm_gib, world_size),
        local_world_size=local_world_size,
        reserved_bytes=parse_gib(reserve_gib, "--reserve-gib"),
    )
    training = TrainingConfig(
        batch_size=batch_size,
        optimizer=parse_optimizer(optimizer),
        dense_bytes=parse_gib(dense_gib, "--dense-gib"),
        batches_in_flight=batches_in_flight,
    )
    return ShardingProblem(tables=load_tables(tables), topology=topology, training=training)


def _warn_if_not_runnable(problem: ShardingProblem) -> None:
    """A plan may be for somebody else's runtime, so this does not refuse."""
    from autoshard.errors import UnsupportedError
    from autoshard.runtime.capabilities import check_problem

    try:
        check_problem(problem)
    except UnsupportedError as error:
        note(f"warning: 'autoshard run' will not run this plan: {error}")


def _compare(
    problem: ShardingProblem, sharder: str, search: dict[str, Any], *, quiet: bool
) -> tuple[ShardingPlan, list[SharderResult]]:
    from autoshard.planning import compare_sharders

    with waiting(f"planning {len(problem.tables)} tables with every sharder"):
        results = compare_sharders(
            problem, on_progress=lambda name: note(f"planning with {name}"), **search
        )
    if not quiet:
        _show_comparison(results)
    chosen = next(result for result in results if result.sharder == sharder)
    if chosen.error is not None:
        raise chosen.error
    assert chosen.plan is not None  # a result has a plan or an error
    return chosen.plan, results


def _show_comparison(results: list[SharderResult]) -> None:
    from autoshard.cli.views import source_label

    rows, labels = [], set()
    for result in results:
        seconds = f"{result.planning_time_s:.2f}"
        if result.plan is None or result.plan.cost is None:
            rows.append([result.sharder, "infeasible", "-", "-", seconds])
            continue
        cost = result.plan.cost
        labels.add(source_label(cost.step))
        rows.append(
            [
                result.sharder,
                f"{cost.step.step_ms:.3f}",
                _ratio(cost.step.step_ms, cost.lower_bound_ms),
                _ratio(cost.step.step_ms, cost.best_known_ms),
                seconds,
            ]
        )
    show_table(
        f"Sharders ({'; '.join(sorted(labels)) or 'none found a plan'})",
        [
            ("sharder", False),
            ("step ms", True),
            ("/ lower bound", True),
            ("/ best", True),
            ("planning s", True),
        ],
        rows,
        caption="Bounds hold for the shards of that row under the same cost model.",
    )


def _ratio(value: float, base: float | None) -> str:
    return f"{value / base:.3f}" if base else "-"


def _show(plan: ShardingPlan) -> None:
    from collections import Counter

    from autoshard.cli.views import say_how_good, show_ledger, show_ranks, show_terms
    from autoshard.validate import validate_plan

    assert plan.cost is not None  # make_plan costs every plan
    ledgers = validate_plan(plan)
    show_ranks(plan, ledgers, plan.cost.step)
    show_terms(("this plan", plan.cost.step))
    show_ledger(ledgers)
    kinds = Counter(entry.sharding_type.value for entry in plan.tables)
    shards = sum(len(entry.shards) for entry in plan.tables)
    say(
        f"{len(plan.tables)} tables in {shards} shards on {plan.topology.world_size} ranks: "
        + ", ".join(f"{count} {kind}" for kind, count in sorted(kinds.items()))
    )
    say_how_good(plan.cost)


def _show_json(plan: ShardingPlan, out: str | None, results: list[SharderResult]) -> None:
    from autoshard.cli.views import cost_json, ledger_json
    from autoshard.validate import validate_plan

    assert plan.cost is not None  # make_plan costs every plan
    value: dict[str, Any] = {
        "out": out,
        "cost": cost_json(plan.cost),
        "ledger": ledger_json(validate_plan(plan)),
        "plan": plan.to_json(),
    }
    if results:
        value["comparison"] = [
            {
                "sharder": result.sharder,
                "cost": cost_json(result.plan.cost) if result.plan and result.plan.cost else None,
                "infeasible": None if result.error is None else str(result.error),
                "planning_time_s": result.planning_time_s,
            }
            for result in results
        ]
    show_json(value)
