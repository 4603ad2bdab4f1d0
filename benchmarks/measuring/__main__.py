"""Measure the same shard sets in three ways, by turns, each set twice in every way.

    python -m benchmarks.measuring                       # everything
    python -m benchmarks.measuring --sets 20 --ways naive,fast
    python -m benchmarks.measuring --quick

`naive` makes everything anew for every set, with plain FBGEMM. `fast` and `precise` are
autoshard's with the presets of those names in conf/measure_preset. Every pass runs in fresh
processes, one per core, all busy; all passes of the first measurement are over before the second
begins. Printed are the spread between the two, |a − b| / mean(a, b) of forward and backward
together, as a median over sets, and how many sets a minute are measured with the start of the
processes left out; with 95% bootstrap intervals over sets. For `precise` all passes of one
measurement count together. Sets hold no replicas, which plain FBGEMM has none of.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import numpy as np
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from rich.console import Console

from autoshard.errors import AutoshardError, InputError
from autoshard.files import write_atomically
from autoshard.measure.config import MeasureConfig, SamplingConfig, to_plain
from autoshard.measure.environment import available_cores, describe_environment
from autoshard.measure.sampling import ShardSet, ShardSetSampler
from autoshard.workloads.registry import make_workload
from benchmarks.measuring.naive import TIMED_ITERATIONS, WARMUP_ITERATIONS
from benchmarks.measuring.passes import PassResult, SetTask, Way, run_pass
from benchmarks.measuring.report import RATE_BAR, SPREAD_BAR, bars, summarise, summary_table
from benchmarks.measuring.results import NUM_MEASUREMENTS, WayResults, totals_ms
from experiments.common import CONF_DIR, to_dataclass
from experiments.progress import progress_bar

NUM_SETS = 80
_ORDER_STREAM, _BATCH_STREAM = 7, 8
_FILE_WIDTH = 112


def load_preset(way: Way) -> MeasureConfig:
    """What `python -m experiments.measure measure_preset=…` would measure with."""
    GlobalHydra.instance().clear()
    with hydra.initialize_config_dir(config_dir=str(CONF_DIR), version_base="1.3"):
        composed = hydra.compose("measure", overrides=[f"measure_preset={way.value}"])
    values: Any = OmegaConf.to_container(composed, resolve=True)
    del values["out"], values["logger"]
    return to_dataclass(MeasureConfig, values)


def tiny(config: MeasureConfig) -> MeasureConfig:
    """The same with sets of a moment, to see that everything runs."""
    kernels = dataclasses.replace(
        config.kernels,
        arena_bytes=2**22,
        timing=dataclasses.replace(config.kernels.timing, time_budget_s=0.005),
    )
    sampling = SamplingConfig(
        max_shards=3, num_samples=(64,), max_iteration_ms=2.0, max_weight_bytes=2**22
    )
    return dataclasses.replace(
        config,
        workload={"name": "laptop", "num_tables": 40, "seed": 0},
        num_passes=min(config.num_passes, 2),
        kernels=kernels,
        sampling=sampling,
    )


def draw_sets(config: MeasureConfig, num_sets: int, seed: int) -> list[ShardSet]:
    """Shard sets without replicas."""
    sampling = dataclasses.replace(config.sampling, replica_sets_share=0.0)
    sampler = ShardSetSampler(make_workload(**config.workload), sampling, seed=seed)
    return [sampler.draw(index) for index in range(num_sets)]


def measure(
    presets: Mapping[Way, MeasureConfig | None],
    shard_sets: Sequence[ShardSet],
    *,
    num_workers: int,
    seed: int,
) -> dict[Way, WayResults]:
    """All passes of all ways, by turns."""
    num_passes = {way: preset.num_passes if preset else 1 for way, preset in presets.items()}
    total = NUM_MEASUREMENTS * sum(num_passes.values()) * len(shard_sets)
    collected: dict[Way, list[tuple[PassResult, ...]]] = {way: [] for way in presets}
    done = 0
    with progress_bar("measuring") as report:
        for repeat in range(NUM_MEASUREMENTS):
            for way, preset in presets.items():
                kernels = preset.kernels if preset else None
                passes = []
                for pass_ in range(num_passes[way]):
                    tasks = _tasks(shard_sets, seed, way, repeat, pass_)
                    title = f"{way.value}, measurement {repeat + 1}, pass {pass_ + 1}"

                    def told(task: SetTask, title: str = title) -> None:
                        nonlocal done
                        done += 1
                        report(done, total, title)

                    passes.append(run_pass(kernels, tasks, num_workers, told))
                collected[way].append(tuple(passes))
    return {way: WayResults(way, tuple(passes)) for way, passes in collected.items()}


def _tasks(
    shard_sets: Sequence[ShardSet], seed: int, way: Way, repeat: int, pass_: int
) -> list[SetTask]:
    """The sets in a new random order, each with a seed of its own."""
    place = [list(Way).index(way), repeat, pass_]
    order = np.random.default_rng([_ORDER_STREAM, seed, *place]).permutation(len(shard_sets))
    seeds = np.random.SeedSequence([_BATCH_STREAM, seed, *place]).generate_state(len(shard_sets))
    return [SetTask(shard_sets[index], int(seeds[index])) for index in order]


def main(arguments: Sequence[str] | None = None) -> int:
    """Measure and print. 0 whatever comes of it, 2 for bad input, 1 if a process failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", type=int, default=None, help=f"shard sets; {NUM_SETS} by default")
    parser.add_argument("--ways", default=",".join(way.value for way in Way))
    parser.add_argument("--passes", type=int, default=None, help="of precise, instead of its own")
    parser.add_argument("--workers", type=int, default=0, help="processes; 0 takes every core")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--quick", action="store_true", help="few tiny sets: does it run at all")
    parser.add_argument("--out", type=Path, default=None, help="a JSON file for the figures")
    options = parser.parse_args(arguments)
    try:
        return _run(options)
    except AutoshardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


def _run(options: argparse.Namespace) -> int:
    num_sets = options.sets if options.sets is not None else 4 if options.quick else NUM_SETS
    passes = 1 if options.passes is None else options.passes
    for name, value, low, high in (
        ("sets", num_sets, 2, 10**5),
        ("passes", passes, 1, 100),
        ("workers", options.workers, 0, len(available_cores())),
        ("seed", options.seed, 0, 2**63 - 1),
    ):
        if not low <= value <= high:
            raise InputError(f"--{name} is not usable", got=value, allowed=f"{low}..{high}")
    num_workers = options.workers or len(available_cores())
    presets = _presets(options)
    sampling_of = presets.get(Way.PRECISE) or load_preset(Way.PRECISE)
    if options.quick:
        sampling_of = tiny(sampling_of)
    shard_sets = draw_sets(sampling_of, num_sets, options.seed)
    results = measure(presets, shard_sets, num_workers=num_workers, seed=options.seed)
    summary = summarise(results)
    console = Console(width=None if sys.stdout.isatty() else _FILE_WIDTH)
    console.print(
        summary_table(summary, f"{num_sets} shard sets, {num_workers} process(es) at once")
    )
    for line in bars(summary):
        console.print(line, highlight=False)
    if options.out is not None:
        text = json.dumps(_described(options, presets, results, summary, num_workers), indent=1)
        write_atomically(options.out, lambda path: _write(path, text))
        console.print(f"wrote {options.out}")
    return 0


def _presets(options: argparse.Namespace) -> dict[Way, MeasureConfig | None]:
    names = options.ways.split(",")
    known = [way.value for way in Way]
    if not set(names) <= set(known) or len(set(names)) != len(names):
        raise InputError(
            "--ways is not usable", got=options.ways, allowed=f"some of {','.join(known)}"
        )
    presets: dict[Way, MeasureConfig | None] = {}
    for way in Way:
        if way.value not in names:
            continue
        config = None if way is Way.NAIVE else load_preset(way)
        if config is not None and options.passes is not None and way is Way.PRECISE:
            config = dataclasses.replace(config, num_passes=options.passes)
        presets[way] = tiny(config) if config is not None and options.quick else config
    return presets


def _described(
    options: argparse.Namespace,
    presets: Mapping[Way, MeasureConfig | None],
    results: Mapping[Way, WayResults],
    summary: Mapping[str, Any],
    num_workers: int,
) -> dict[str, Any]:
    """Everything, with the time of every set."""
    environment = describe_environment(1)
    naive = {"warmup_iterations": WARMUP_ITERATIONS, "timed_iterations": TIMED_ITERATIONS}
    return {
        "seed": options.seed,
        "quick": options.quick,
        "workers": num_workers,
        "hardware": environment.hardware,
        "software": environment.software,
        "commit": environment.commit,
        "bars": {"fast_rate_over_naive": RATE_BAR, "precise_spread": SPREAD_BAR},
        "settings": {
            way.value: to_plain(preset.kernels) if preset else naive
            for way, preset in presets.items()
        },
        "summary": summary,
        "first_total_ms": {way.value: t.tolist() for way, t in totals_ms(results).items()},
        "passes": {
            way.value: [[dataclasses.asdict(one) for one in passes] for passes in of_way.passes]
            for way, of_way in results.items()
        },
    }


def _write(path: Path, text: str) -> None:
    path.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
