"""Which cases each section of the benchmark compares."""

from __future__ import annotations

from collections.abc import Iterator

from autoshard.problem import Optimizer
from autoshard.shards import ShardingType
from benchmarks.runtime_speed.cases import WAITING, Model
from benchmarks.runtime_speed.comparisons import Case
from benchmarks.runtime_speed.worker import CALM

#: What `--only` knows; the last is measured by `memory`.
SECTIONS = ("torchrec", "floor", "ddp", "pipeline", "memory")
#: Sections in which TorchRec takes part.
WITH_TORCHREC = frozenset({"torchrec", "pipeline"})
#: Of `Case.section`: several belong to one section of the command line, or one to several.
TITLES = {
    "step": "Forward, backward and update of the tables",
    "loop": "Plain training loop with dense layers",
    "pipelined": "Pipelined training loop with dense layers",
    "waiting": "The same with a source that takes 10 ms per batch",
    "ddp": "Beside nn.EmbeddingBag + DDP, SGD",
}


def cases_of(
    sections: list[str], models: list[Model], kinds: list[ShardingType], *, has_torchrec: bool
) -> Iterator[Case]:
    """Every case that was asked for.

    Args:
        sections: of `SECTIONS`.
        models: to run.
        kinds: sharding types to run.
        has_torchrec: whether TorchRec can be asked.
    """
    if {"torchrec", "floor"} & set(sections):
        for model in models:
            for kind in kinds:
                contenders = ["autoshard/plain"]
                if "floor" in sections:
                    contenders += floors(kind, model)
                if "torchrec" in sections and has_torchrec:
                    contenders.append("torchrec/plain")
                # What of our time is gloo's threads, and what is the runtime.
                contenders += [name + CALM for name in contenders[1:]]
                yield Case(section="step", model=model, kind=kind, contenders=tuple(contenders))
    if "pipeline" in sections:
        yield from _pipeline(models, kinds, has_torchrec)
    if "ddp" in sections:
        for model in models:
            for kind in (ShardingType.DATA_PARALLEL, ShardingType.TABLE_WISE):
                yield Case(
                    section="ddp",
                    model=model,
                    kind=kind,
                    contenders=("autoshard/plain", "pytorch/dense", "pytorch/sparse"),
                    optimizer=Optimizer.SGD,
                )


def _pipeline(models: list[Model], kinds: list[ShardingType], has_torchrec: bool) -> Iterator[Case]:
    for model in models:
        for kind in kinds:
            for variant in ("loop", "pipelined"):
                contenders = [f"autoshard/{variant}"]
                if variant == "pipelined":
                    contenders.append("autoshard/loop")
                if has_torchrec:
                    contenders += [f"torchrec/{variant}", f"torchrec/{variant}{CALM}"]
                yield Case(
                    section=variant,
                    model=model,
                    kind=kind,
                    contenders=tuple(contenders),
                    overlapped=True,
                )
    for model in models:
        if model.name != "uniform":  # one model shows what a slow source costs
            continue
        contenders = [f"autoshard/pipelined{WAITING}", f"autoshard/loop{WAITING}"]
        if has_torchrec:
            contenders.append(f"torchrec/pipelined{WAITING}")
        for kind in kinds:
            yield Case(
                section="waiting",
                model=model,
                kind=kind,
                contenders=tuple(contenders),
                overlapped=True,
            )


def profile_cases(
    models: list[Model], kinds: list[ShardingType], *, has_torchrec: bool
) -> Iterator[Case]:
    """What `--profile` looks into: the steps of the tables alone."""
    for model in models:
        for kind in kinds:
            contenders = ["autoshard/plain"]
            if has_torchrec:
                contenders.append("torchrec/plain")
            contenders.append(floors(kind, model)[-1])
            yield Case(section="profile", model=model, kind=kind, contenders=tuple(contenders))


def floors(kind: ShardingType, model: Model) -> list[str]:
    """The bare ways of doing a step; the fastest is the floor."""
    if kind is not ShardingType.DATA_PARALLEL:
        return ["floor/sliced"]
    dims = {table.embedding_dim for table in model.tables}
    return ["floor/rows", "floor/bags"] if len(dims) == 1 else ["floor/bags"]
