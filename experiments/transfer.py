"""Does a policy carry over? `python -m experiments.transfer 'policies=[path/to/policy]'`.

Each policy, trained in one setting, plans problems of others: a growing share of tables that
it never saw, fewer and more tables, fewer and more ranks. Every objective is divided by that
of `cost_greedy` on the same problem. Writes `transfer.parquet`; a killed run goes on.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table as RichTable

from autoshard.cost_models.exported import load_cost_model
from autoshard.errors import InfeasibleError, InputError
from autoshard.objective import StepCost
from autoshard.planning import make_plan
from autoshard.policies import Policy, load_policy
from autoshard.problem import ShardingProblem
from autoshard.protocols import CostModel
from autoshard.tables import Table
from autoshard.tasks import TaskDistribution, draw_problem
from experiments.common import run_experiment
from experiments.metrics import MetricsLog
from experiments.pool import PoolConfig, Split, pool_tables
from experiments.progress import progress_bar
from experiments.rows import RowFile


@dataclass(frozen=True, kw_only=True)
class TransferConfig:
    """Which policies, and how far from home."""

    pool: PoolConfig
    policies: tuple[str, ...]
    """Folders or names of policies. A run's folder names its policy in the results."""
    unseen_shares: tuple[float, ...]
    """Shares of tables from the test split, at the home counts."""
    num_tables: tuple[int, ...]
    """Table counts, all tables unseen, at the home rank count."""
    world_sizes: tuple[int, ...]
    """Rank counts, all tables unseen, at the home table count."""
    home_num_tables: int
    home_world_size: int
    num_tasks: int
    """Problems per setting."""
    batch_size: int
    memory_slack: tuple[float, float]
    cost_model: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class _Target:
    name: str
    num_tables: int
    world_size: int
    unseen_share: float


def targets(config: TransferConfig) -> Iterator[_Target]:
    """Every setting that policies are evaluated in."""
    home_tables, home_ranks = config.home_num_tables, config.home_world_size
    for share in config.unseen_shares:
        yield _Target(
            name=f"{share:.0%} unseen",
            num_tables=home_tables,
            world_size=home_ranks,
            unseen_share=share,
        )
    for count in config.num_tables:
        yield _Target(
            name=f"{count} tables", num_tables=count, world_size=home_ranks, unseen_share=1.0
        )
    for ranks in config.world_sizes:
        yield _Target(
            name=f"{ranks} ranks", num_tables=home_tables, world_size=ranks, unseen_share=1.0
        )


def target_problem(
    config: TransferConfig,
    target: _Target,
    index: int,
    seen: tuple[Table, ...],
    unseen: tuple[Table, ...],
) -> ShardingProblem:
    """The `index`-th problem of a setting, whatever was drawn before.

    Raises:
        InputError: the pool has too few tables.
    """
    generator = np.random.default_rng(
        [
            config.seed,
            target.num_tables,
            target.world_size,
            round(target.unseen_share * 1000),
            index,
        ]
    )
    num_unseen = round(target.num_tables * target.unseen_share)
    picked = [
        pool[i]
        for pool, count in ((unseen, num_unseen), (seen, target.num_tables - num_unseen))
        for i in generator.choice(len(pool), size=min(count, len(pool)), replace=False)
    ]
    return draw_problem(
        picked,
        TaskDistribution(
            num_tables=(target.num_tables, target.num_tables),
            world_sizes=(target.world_size,),
            memory_slack=config.memory_slack,
            batch_sizes=(config.batch_size,),
        ),
        generator,
    )


def run(config: TransferConfig, out_dir: Path, metrics: MetricsLog) -> None:
    """Evaluate every policy in every setting.

    Raises:
        AutoshardError: an artifact or option is not usable.
    """
    cost_model = load_cost_model(config.cost_model)
    policies = _load_policies(config.policies)
    splits = pool_tables(config.pool)
    settings = list(targets(config))
    identity = {
        **{k: v for k, v in asdict(config).items() if k not in ("policies", "cost_model")},
        "cost_model": cost_model.fingerprint,
    }
    rows = RowFile(out_dir / "transfer.jsonl", identity)
    total, done = len(settings) * config.num_tasks, 0
    with progress_bar("transfer") as report:
        for target in settings:
            for index in range(config.num_tasks):
                report(done, total, f"{target.name}, problem {index}")
                problem = target_problem(
                    config, target, index, splits[Split.TRAIN], splits[Split.TEST]
                )
                _evaluate(rows, problem, target, index, policies, cost_model, config.seed)
                done += 1
        report(done, total, "done")
    path = rows.write_parquet()
    frame = rows.frame()
    frame["log_ratio"] = np.log(frame["ratio_to_cost_greedy"].astype(float))
    log_means = frame.groupby(["setting_train", "setting_eval"])["log_ratio"].mean()
    table = RichTable(
        title="Policy over cost_greedy, geometric mean (below 1: the policy is better)"
    )
    table.add_column("evaluated on", no_wrap=True)
    for label in policies:
        table.add_column(f"trained on\n{label}", justify="right")
    for step, target in enumerate(settings):
        ratios = {
            label: float(np.exp(log_means.get((label, target.name), np.nan))) for label in policies
        }
        table.add_row(target.name, *(f"{ratio:.4f}" for ratio in ratios.values()))
        metrics.log(step, setting_eval=target.name, **ratios)
    Console().print(table)
    Console().print(f"rows: {path}")


def _load_policies(paths: Sequence[str]) -> dict[str, Policy]:
    """Policies by label: `runs/agent-40x4/policy` is called `agent-40x4`."""
    policies: dict[str, Policy] = {}
    for path in paths:
        label = Path(path).parent.name if Path(path).name == "policy" else Path(path).name
        if label in policies:
            raise InputError(
                f"two policies are called {label!r}", remedy="rename the folder of one of them"
            )
        policies[label] = load_policy(path)
    if not policies:
        raise InputError("no policy is given", remedy="policies=[path/to/policy]")
    return policies


def _evaluate(
    rows: RowFile,
    problem: ShardingProblem,
    target: _Target,
    index: int,
    policies: dict[str, Policy],
    cost_model: CostModel,
    seed: int,
) -> None:
    base: StepCost | None = None
    for label, policy in policies.items():
        key = f"{label}/{policy.fingerprint}/{target.name}/{index}"
        if key in rows:
            continue
        if base is None:
            base = _step(problem, "cost_greedy", cost_model, None, seed)
        own = _step(problem, "ppo", cost_model, policy, seed)
        rows.add(
            key,
            {
                "setting_train": label,
                "setting_eval": target.name,
                "sharder": "ppo",
                "task": f"{target.name}-{index}",
                "training_seed": -1,
                "infeasible": own is None,
                "ratio_to_cost_greedy": (
                    None if own is None or base is None else own.step_ms / base.step_ms
                ),
                "extrapolated": any(cost.extrapolated for cost in (own, base) if cost),
                "source": cost_model.source.value,
            },
        )


def _step(
    problem: ShardingProblem, sharder: str, cost_model: CostModel, policy: Policy | None, seed: int
) -> StepCost | None:
    try:
        plan = make_plan(
            problem,
            sharder=sharder,
            cost_model=cost_model,
            seed=seed,
            policy=policy if policy is not None else "default",
        )
    except InfeasibleError:
        return None
    assert plan.cost is not None
    return plan.cost.step


if __name__ == "__main__":
    run_experiment("transfer", TransferConfig, run)
