"""Time the runtime beside TorchRec, plain PyTorch and the floor; measure its memory.

    make torchrec-env                        # once: TorchRec in an environment of its own
    python -m benchmarks.runtime_speed       # everything, more than half an hour
    python -m benchmarks.runtime_speed --only floor --models uniform --rounds 40
    python -m benchmarks.runtime_speed --quick --only ddp,memory

Two ranks, one core each. Contenders take turns within a round; every step starts from a
barrier and ends with its slower rank. Before anything is timed, all contenders train the
same three steps and must agree. `+calm` after a name: with autoshard's setting of gloo's
threads (autoshard/runtime/gloo_threads.py). Printed are medians over all steps of all rounds, and
ratios of medians with 95% bootstrap intervals over rounds. Where a contender fails, the
run goes on without it and ends with exit code 1. `--out` is written after every case.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, TimeElapsedColumn

from autoshard.errors import AutoshardError, InputError
from autoshard.shards import ShardingType
from benchmarks.runtime_speed.bench import Bench, Budget, Note
from benchmarks.runtime_speed.cases import SHARDING_TYPES, Model, mlperf_model, uniform_model
from benchmarks.runtime_speed.comparisons import Failure, one_line
from benchmarks.runtime_speed.memory import measure_memory
from benchmarks.runtime_speed.results import Results
from benchmarks.runtime_speed.sections import (
    SECTIONS,
    TITLES,
    WITH_TORCHREC,
    cases_of,
    profile_cases,
)
from benchmarks.runtime_speed.sides import ROOT
from benchmarks.runtime_speed.tables import comparison_table, memory_table

MODELS: dict[str, Callable[[bool], Model]] = {
    "uniform": lambda quick: uniform_model(scale=0.02 if quick else 1.0),
    "mlperf": lambda quick: mlperf_model(batch_size=32) if quick else mlperf_model(),
}
#: Columns of text where the output goes to a file.
_FILE_WIDTH = 112


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
    """Run the benchmark; the exit code: 1 if a contender failed, 2 for bad input."""
    options = parse_arguments(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=_FILE_WIDTH)
    try:
        failures = _run(options, console)
    except AutoshardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 1 if failures else 0


def _run(options: argparse.Namespace, console: Console) -> list[Failure]:
    """Measure, show and write what was asked for; who failed."""
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
    torchrec_python = _torchrec_python(options, sections, console)
    budget = Budget(
        rounds=2 if options.quick else options.rounds,
        steps=3 if options.quick else options.steps,
        slow_steps=3 if options.quick else 4,
    )
    results = Results(budget=budget, models=models, path=options.out)
    with Progress(
        *Progress.get_default_columns()[:1], TimeElapsedColumn(), console=console, transient=True
    ) as bar:
        task = bar.add_task("starting", total=None)

        def note(text: str, lasting: bool = False) -> None:
            bar.update(task, description=escape(text))
            if lasting and not console.is_terminal:
                console.print(text, markup=False, highlight=False)

        try:
            if set(sections) != {"memory"}:
                with Bench(budget, torchrec_python, note) as bench:
                    _compare(bench, results, sections, kinds, profiled=options.profile)
            if "memory" in sections:
                _measure_memory(results, kinds, scale=0.01 if options.quick else 1.0, note=note)
            results.save(finished=True)
        finally:  # whatever ends the run, what was measured is shown
            bar.stop()
            _show(results, console)
    if options.out is not None:
        console.print(f"wrote {options.out}", markup=False)
    return results.failures


def _torchrec_python(
    options: argparse.Namespace, sections: list[str], console: Console
) -> Path | None:
    """The interpreter of TorchRec's environment; None to leave TorchRec out."""
    if not WITH_TORCHREC & set(sections):
        return None
    python: Path = options.torchrec_python
    if python.exists():
        return python
    if sections == ["torchrec"]:
        raise InputError(
            "TorchRec's environment is missing",
            got=str(python),
            remedy="make torchrec-env, or give --torchrec-python",
        )
    console.print("TorchRec is left out: its environment is missing (make torchrec-env)")
    return None


def _compare(
    bench: Bench,
    results: Results,
    sections: list[str],
    kinds: list[ShardingType],
    *,
    profiled: bool,
) -> None:
    results.versions = bench.describe()
    has_torchrec = "torchrec" in results.versions
    for case in cases_of(sections, results.models, kinds, has_torchrec=has_torchrec):
        comparison, failures = bench.run(case)
        if comparison is not None:
            results.comparisons.append(comparison)
        results.failures += failures
        results.save()
    if not profiled:
        return
    for case in profile_cases(results.models, kinds, has_torchrec=has_torchrec):
        profiles, failures = bench.profile(case)
        results.profiles[f"{case.model.name}/{case.kind.value}"] = profiles
        results.failures += failures
        results.save()


def _measure_memory(
    results: Results, kinds: list[ShardingType], *, scale: float, note: Note
) -> None:
    for kind in kinds:
        note(f"memory {kind.value}")
        try:
            results.memory += measure_memory(kind, scale=scale)
        except AutoshardError as error:
            failure = Failure(
                section="memory",
                model="memory",
                kind=kind,
                contender="autoshard",
                reason=one_line(error),
            )
            note(f"memory: {failure}", True)
            results.failures.append(failure)
        results.save()


def _show(results: Results, console: Console) -> None:
    for section, title in TITLES.items():
        rows = [c for c in results.comparisons if c.section == section]
        failures = [f for f in results.failures if f.section == section]
        if rows or failures:
            console.print(comparison_table(title, rows, failures))
    for failure in results.failures:
        if failure.section == "profile":  # profiles themselves are only written
            console.print(f"profile: {failure}", markup=False, highlight=False)
    failures = [f for f in results.failures if f.section == "memory"]
    if results.memory or failures:
        console.print(memory_table(results.memory, failures))


if __name__ == "__main__":
    sys.exit(main())
