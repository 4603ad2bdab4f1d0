"""Time the runtime beside TorchRec, plain PyTorch and the floor; measure its memory.

    make torchrec-env                        # once: TorchRec in an environment of its own
    python -m benchmarks.runtime_speed       # everything, more than half an hour
    python -m benchmarks.runtime_speed --only floor --models uniform --rounds 40
    python -m benchmarks.runtime_speed --quick --only ddp,memory

Two ranks, one core each. Contenders take turns within a round; every step starts from a
barrier and ends with its slower rank. Before anything is timed, all contenders train the
same three steps and must agree. Printed are medians over all steps of all rounds, and
ratios of medians with 95% bootstrap intervals over rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from rich.console import Console
from rich.progress import Progress, TimeElapsedColumn
from rich.table import Table as TextTable

from autoshard.errors import AutoshardError, InputError
from autoshard.files import write_atomically
from autoshard.problem import Optimizer
from autoshard.shards import ShardingType
from benchmarks.runtime_speed.cases import (
    SHARDING_TYPES,
    WAITING,
    Model,
    make_plan,
    mlperf_model,
    uniform_model,
    write_case,
)
from benchmarks.runtime_speed.memory import RankMemory, measure_memory
from benchmarks.runtime_speed.sides import ROOT, Side
from benchmarks.runtime_speed.statistics import (
    Interval,
    median_ms,
    percentile_ms,
    ratio_of_medians,
)

SECTIONS = ("torchrec", "floor", "ddp", "pipeline", "memory")
MODELS: dict[str, Callable[[bool], Model]] = {
    "uniform": lambda quick: uniform_model(scale=0.02 if quick else 1.0),
    "mlperf": lambda quick: mlperf_model(batch_size=32) if quick else mlperf_model(),
}
_WORLD_SIZE = 2
_SEED = 1
_CHECK_STEPS = 3
#: Contenders whose steps take longer do fewer of them.
_SLOW_MS = 100.0
#: Of the outputs' scale; fp32 sums in another order.
_TOLERANCE = 1e-4
#: What may be expected of the ratio to TorchRec, per sharding type.
TORCHREC_BARS = {kind: 0.2 if kind is ShardingType.DATA_PARALLEL else 0.75 for kind in ShardingType}
FLOOR_BAR = 1.25
MEMORY_BAR = 0.10
#: Columns of text where the output goes to a file.
_FILE_WIDTH = 112


@dataclass(frozen=True, kw_only=True)
class Budget:
    """How long to measure."""

    rounds: int
    steps: int
    """Of a contender in a round."""
    slow_steps: int
    """The same for contenders whose steps take very long, and in the first round."""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One case: what every contender took, and our ratio to the others."""

    section: str
    model: str
    kind: ShardingType
    ours: str
    """The contender that is compared with the others."""
    rounds_ms: dict[str, list[list[float]]] = field(repr=False)
    largest_difference: dict[str, float]
    """From ours, of the outputs or losses, relative to their scale."""

    def ratio(self, other: str) -> Interval:
        """Our median step time over another contender's."""
        return ratio_of_medians(self.rounds_ms[self.ours], self.rounds_ms[other])

    def to_json(self) -> dict[str, Any]:
        """Medians, tenth percentiles and ratios."""
        return {
            "section": self.section,
            "model": self.model,
            "sharding_type": self.kind.value,
            "ours": self.ours,
            "contenders": {
                name: {
                    "median_ms": median_ms(rounds),
                    "p10_ms": percentile_ms(rounds, 10),
                    "p90_ms": percentile_ms(rounds, 90),
                    "num_steps": sum(map(len, rounds)),
                    **(
                        {}
                        if name == self.ours
                        else {
                            "ratio": self.ratio(name).to_json(),
                            "largest_relative_difference": self.largest_difference[name],
                        }
                    ),
                }
                for name, rounds in self.rounds_ms.items()
            },
        }


class Note(Protocol):
    """Tells the user."""

    def __call__(self, text: str, lasting: bool = False) -> None:
        """Say what is going on; lasting lines are kept where there is no progress bar."""


class Bench:
    """The sides, and how a case is run on them."""

    def __init__(self, budget: Budget, torchrec_python: Path | None, note: Note) -> None:
        """Start the ranks of every side.

        Args:
            budget: of each case.
            torchrec_python: interpreter of TorchRec's environment; None to leave it out.
            note: told what is being done, and with True what has been done.
        """
        self._budget = budget
        self._note = note
        self._ours = Side("autoshard", world_size=_WORLD_SIZE)
        self.torchrec: Side | None = None
        try:
            if torchrec_python is not None:
                self.torchrec = Side(
                    "torchrec", world_size=_WORLD_SIZE, python=str(torchrec_python)
                )
        except BaseException:
            self._ours.close()
            raise

    def __enter__(self) -> Bench:
        return self

    def __exit__(self, *exc: object) -> None:
        self._ours.close()
        if self.torchrec is not None:
            self.torchrec.close()

    def describe(self) -> dict[str, Any]:
        """What runs on each side."""
        sides = {"autoshard": self._ours, "torchrec": self.torchrec}
        return {name: side.ask("describe")[0] for name, side in sides.items() if side is not None}

    def compare(
        self,
        section: str,
        model: Model,
        kind: ShardingType,
        contenders: list[str],
        *,
        optimizer: Optimizer = Optimizer.ROWWISE_ADAGRAD,
        overlapped: bool = False,
    ) -> Comparison:
        """Check that contenders agree, then time them in turns.

        Args:
            section: for the result.
            model: tables and batch.
            kind: how all tables are sharded.
            contenders: names as the workers know them; the first is ours.
            optimizer: of the tables.
            overlapped: time whole runs of steps, without a barrier between them.
        """
        plan = make_plan(model, kind, _WORLD_SIZE, optimizer)
        with tempfile.TemporaryDirectory(prefix="runtime-speed-") as name:
            folder = Path(name)
            write_case(folder, model, plan, seed=_SEED)
            for contender in contenders:
                self._note(f"{model.name} {kind.value}: building {contender}")
                self._side(contender).ask("load", name=contender, key=contender, folder=str(folder))
            try:
                differences = self._check(contenders, folder)
                rounds = self._rounds(f"{model.name} {kind.value}", contenders, overlapped)
            finally:
                for contender in contenders:
                    if (side := self._side(contender)).is_open:
                        side.ask("drop", key=contender)
        self._note(f"{section} {model.name} {kind.value}: done", True)
        return Comparison(
            section=section,
            model=model.name,
            kind=kind,
            ours=contenders[0],
            rounds_ms=rounds,
            largest_difference=differences,
        )

    def profile(self, model: Model, kind: ShardingType, contenders: list[str]) -> dict[str, Any]:
        """Where each contender's time goes on rank 0."""
        plan = make_plan(model, kind, _WORLD_SIZE)
        profiles = {}
        with tempfile.TemporaryDirectory(prefix="runtime-speed-") as name:
            folder = Path(name)
            write_case(folder, model, plan, seed=_SEED)
            for contender in contenders:
                side = self._side(contender)
                side.ask("load", name=contender, key=contender, folder=str(folder))
                side.ask("steps", key=contender, num_steps=5, num_warmup=5)
                profiles[contender] = side.ask("profile", key=contender, num_steps=30)[0]
                side.ask("drop", key=contender)
        return profiles

    def _side(self, contender: str) -> Side:
        if not contender.startswith("torchrec/"):
            return self._ours
        assert self.torchrec is not None  # contenders are chosen by what there is
        return self.torchrec

    def _check(self, contenders: list[str], folder: Path) -> dict[str, float]:
        """Train the same steps everywhere; how far others are from the first."""
        outputs: dict[str, list[torch.Tensor]] = {}
        for contender in contenders:
            paths = [folder / f"{contender.replace('/', '-')}-{r}" for r in range(_WORLD_SIZE)]
            self._side(contender).ask(
                "check",
                [{"path": str(path)} for path in paths],
                key=contender,
                num_steps=_CHECK_STEPS,
            )
            outputs[contender] = [
                step for path in paths for step in torch.load(path, weights_only=True)
            ]
        ours = outputs[contenders[0]]
        scale = max(float(step.abs().max()) for step in ours)
        differences = {}
        for contender in contenders[1:]:
            pairs = zip(ours, outputs[contender], strict=True)
            # A tensor's maximum is NaN where there is one; Python's is not.
            worst = float(torch.stack([(a - b).abs().max() for a, b in pairs]).max()) / scale
            if not worst <= _TOLERANCE:
                raise InputError(
                    f"{contender} computes other numbers than {contenders[0]}",
                    got=f"a difference of {worst:.2g} of the outputs' scale",
                    allowed=f"at most {_TOLERANCE:g}",
                )
            differences[contender] = worst
        return differences

    def _rounds(
        self, where: str, contenders: list[str], overlapped: bool
    ) -> dict[str, list[list[float]]]:
        spent: dict[str, list[list[float]]] = {contender: [] for contender in contenders}
        for number in range(self._budget.rounds):
            self._note(f"{where}: round {number + 1} of {self._budget.rounds}")
            # Whoever follows a slow contender finds other caches than whoever follows a
            # fast one: the order turns.
            turn = number % len(contenders)
            for contender in contenders[turn:] + contenders[:turn]:
                # The first round is short: it shows which contenders are slow.
                num_steps = self._budget.slow_steps
                if number and median_ms(spent[contender]) <= _SLOW_MS:
                    num_steps = self._budget.steps
                options: dict[str, Any] = {} if overlapped else {"num_warmup": 2}
                answers = self._side(contender).ask(
                    "block" if overlapped else "steps",
                    key=contender,
                    num_steps=num_steps,
                    **options,
                )
                per_rank = [answer["spent_ns"] for answer in answers]
                spent[contender].append([max(step) / 1e6 for step in zip(*per_rank, strict=True)])
        return spent


def run_sections(
    bench: Bench, sections: list[str], models: list[Model], kinds: list[ShardingType]
) -> list[Comparison]:
    """Every comparison that was asked for."""
    done = []
    has_torchrec = bench.torchrec is not None
    for model in models if {"torchrec", "floor"} & set(sections) else []:
        for kind in kinds:
            contenders = ["autoshard/plain"]
            if "floor" in sections:
                contenders += floors(kind, model)
            if "torchrec" in sections and has_torchrec:
                contenders.append("torchrec/plain")
            done.append(bench.compare("step", model, kind, contenders))
    for model in models if "pipeline" in sections else []:
        for kind in kinds:
            for variant in ("loop", "pipelined"):
                contenders = [f"autoshard/{variant}"]
                if variant == "pipelined":
                    contenders.append("autoshard/loop")
                if has_torchrec:
                    contenders.append(f"torchrec/{variant}")
                done.append(bench.compare(variant, model, kind, contenders, overlapped=True))
    if "pipeline" in sections and "uniform" in {model.name for model in models}:
        contenders = ["autoshard/pipelined-waiting", "autoshard/loop-waiting"]
        contenders += ["torchrec/pipelined-waiting"] if has_torchrec else []
        uniform = next(model for model in models if model.name == "uniform")
        done += [
            bench.compare("waiting", uniform, kind, contenders, overlapped=True) for kind in kinds
        ]
    for model in models if "ddp" in sections else []:
        for kind in (ShardingType.DATA_PARALLEL, ShardingType.TABLE_WISE):
            contenders = ["autoshard/plain", "pytorch/dense", "pytorch/sparse"]
            done.append(bench.compare("ddp", model, kind, contenders, optimizer=Optimizer.SGD))
    return done


def floors(kind: ShardingType, model: Model) -> list[str]:
    """The bare ways of doing a step; the fastest is the floor."""
    if kind is not ShardingType.DATA_PARALLEL:
        return ["floor/sliced"]
    dims = {table.embedding_dim for table in model.tables}
    return ["floor/rows", "floor/bags"] if len(dims) == 1 else ["floor/bags"]


def comparison_table(title: str, comparisons: list[Comparison]) -> TextTable:
    """One row per contender that ours is compared with."""
    text = TextTable(title=title, title_justify="left")
    for column in ("model", "sharding_type", "against"):
        text.add_column(column)
    for column in ("theirs, ms", "ours, ms", "ours / theirs [95%]", "bar"):
        text.add_column(column, justify="right", no_wrap=True)
    for comparison in comparisons:
        others = [name for name in comparison.rounds_ms if name != comparison.ours]
        for other in best_of_floors(comparison, others):
            ratio, bar = comparison.ratio(other), bar_of(comparison, other)
            held = "" if bar is None else f"{'≤' if ratio.value <= bar else '>'} {bar:g}"
            text.add_row(
                comparison.model,
                comparison.kind.value,
                other,
                f"{median_ms(comparison.rounds_ms[other]):.2f}",
                f"{median_ms(comparison.rounds_ms[comparison.ours]):.2f}",
                str(ratio),
                held,
            )
    return text


def best_of_floors(comparison: Comparison, others: list[str]) -> list[str]:
    """`others` with only the fastest of the floors among them."""
    slower = sorted(
        (name for name in others if name.startswith("floor/")),
        key=lambda name: median_ms(comparison.rounds_ms[name]),
    )[1:]
    return [name for name in others if name not in slower]


def bar_of(comparison: Comparison, other: str) -> float | None:
    """What our ratio to a contender should not exceed; None where nothing was set."""
    if other.startswith("floor/"):
        return FLOOR_BAR
    if other.startswith("torchrec/") and not other.endswith(WAITING):
        return TORCHREC_BARS[comparison.kind]
    return None


def memory_table(ranks: list[RankMemory]) -> TextTable:
    """One row per plan and rank."""
    text = TextTable(title="Peak memory above an idle rank", title_justify="left")
    for column in ("sharding_type", "rank", "ledger, MiB", "peak, MiB", "peak / ledger", "bar"):
        text.add_column(column, justify="left" if column == "sharding_type" else "right")
    for rank in ranks:
        within = abs(rank.ratio - 1) <= MEMORY_BAR
        text.add_row(
            rank.kind.value,
            str(rank.rank),
            f"{rank.ledger_bytes / 2**20:,.0f}",
            f"{rank.peak_bytes / 2**20:,.0f}",
            f"{rank.ratio:.3f}",
            f"{'within' if within else 'beyond'} {MEMORY_BAR:.0%}",
        )
    return text


def parse_arguments(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only", default=",".join(SECTIONS), help=f"sections, of {','.join(SECTIONS)}"
    )
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {','.join(MODELS)}")
    kinds = ",".join(kind.value for kind in SHARDING_TYPES)
    parser.add_argument("--types", default=kinds, help=f"sharding types, of {kinds}")
    parser.add_argument("--rounds", type=int, default=15, help="of every case (default: 15)")
    parser.add_argument("--steps", type=int, default=20, help="per contender and round")
    parser.add_argument("--quick", action="store_true", help="small tables, two short rounds")
    parser.add_argument(
        "--torchrec-python",
        type=Path,
        default=ROOT / ".venv-torchrec" / "bin" / "python",
        help="interpreter of TorchRec's environment (default: what `make torchrec-env` makes)",
    )
    parser.add_argument("--profile", action="store_true", help="where the time goes, per operator")
    parser.add_argument("--out", type=Path, help="also write the results there, as JSON")
    return parser.parse_args(arguments)


def chosen(option: str, given: str, allowed: list[str]) -> list[str]:
    """The names of a comma-separated option.

    Raises:
        InputError: one is not known.
    """
    names = [name for name in given.split(",") if name]
    if not names or (unknown := [name for name in names if name not in allowed]):
        raise InputError(
            f"{option} is not usable",
            got=given if not names else ",".join(unknown),
            allowed=",".join(allowed),
        )
    return names


def main(arguments: list[str] | None = None) -> int:
    """Run the benchmark; the exit code."""
    options = parse_arguments(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    try:
        _run(options, console)
    except AutoshardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _run(options: argparse.Namespace, console: Console) -> None:
    sections = chosen("--only", options.only, list(SECTIONS))
    models = [MODELS[m](options.quick) for m in chosen("--models", options.models, list(MODELS))]
    types = {kind.value: kind for kind in SHARDING_TYPES}
    kinds = [types[name] for name in chosen("--types", options.types, list(types))]
    if options.rounds < 1 or options.steps < 1:
        raise InputError(
            "--rounds and --steps are not usable",
            got=f"{options.rounds}, {options.steps}",
            allowed=">= 1",
        )
    torchrec_python: Path | None = None
    if {"torchrec", "pipeline"} & set(sections):
        if options.torchrec_python.exists():
            torchrec_python = options.torchrec_python
        elif sections == ["torchrec"]:
            raise InputError(
                "TorchRec's environment is missing",
                got=str(options.torchrec_python),
                remedy="make torchrec-env, or give --torchrec-python",
            )
        else:
            console.print("TorchRec is left out: its environment is missing (make torchrec-env)")
    budget = Budget(
        rounds=2 if options.quick else options.rounds,
        steps=3 if options.quick else options.steps,
        slow_steps=3 if options.quick else 4,
    )
    results: dict[str, Any] = {
        "machine": {"platform": platform.platform(), "num_cores": os.cpu_count()},
        "budget": vars(budget),
        "models": {model.name: model.description for model in models},
    }
    with Progress(
        *Progress.get_default_columns()[:1], TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("starting", total=None)

        def note(text: str, lasting: bool = False) -> None:
            bar.update(task, description=text)
            if lasting and not console.is_terminal:
                console.print(text)

        comparisons: list[Comparison] = []
        if set(sections) != {"memory"}:
            with Bench(budget, torchrec_python, note) as bench:
                results["versions"] = bench.describe()
                comparisons = run_sections(bench, sections, models, kinds)
                if options.profile:
                    contenders = ["autoshard/plain"]
                    contenders += ["torchrec/plain"] if torchrec_python else []
                    results["profiles"] = {
                        f"{model.name}/{kind.value}": bench.profile(
                            model, kind, [*contenders, floors(kind, model)[-1]]
                        )
                        for model in models
                        for kind in kinds
                    }
        ranks: list[RankMemory] = []
        if "memory" in sections:
            ranks = measure_memory(
                kinds,
                scale=0.01 if options.quick else 1.0,
                progress=lambda kind: note(f"memory {kind}"),
            )
    results["comparisons"] = [comparison.to_json() for comparison in comparisons]
    results["memory"] = [rank.to_json() for rank in ranks]
    titles = {
        "step": "Forward, backward and update of the tables",
        "loop": "Plain training loop with dense layers",
        "pipelined": "Pipelined training loop with dense layers",
        "waiting": "The same with a source that takes 10 ms per batch",
        "ddp": "Beside nn.EmbeddingBag + DDP, SGD",
    }
    for section, title in titles.items():
        if rows := [c for c in comparisons if c.section == section]:
            console.print(comparison_table(title, rows))
    if ranks:
        console.print(memory_table(ranks))
    if options.out is not None:
        text = json.dumps(results, indent=2) + "\n"
        write_atomically(options.out, lambda path: _write(path, text))
        console.print(f"wrote {options.out}")


def _write(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
