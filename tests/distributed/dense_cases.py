"""What ranks do with dense layers: equal starts, averaged gradients, evaluation, misuse."""

from __future__ import annotations

import gc
import time
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from autoshard.runtime.batch import JaggedBatch
from autoshard.runtime.collectives import Collectives
from autoshard.runtime.dense import DenseHead, DenseOutput, TrainingBatch
from autoshard.runtime.dense_replicas import DenseReplicas
from autoshard.runtime.embeddings import StepInput
from autoshard.runtime.loop import EvaluationResult
from autoshard.runtime.worker import RankProcess
from tests.distributed import pipeline_cases
from tests.distributed.runtime_cases import Case, message_of


def batch_of(size: int) -> TrainingBatch:
    return TrainingBatch(JaggedBatch.from_bags({"f": [[0]] * size}), torch.zeros(size))


class Scale(nn.Module):
    """Its loss is parameter × factor × mean over samples, hence the gradient is the factor."""

    def __init__(self, start: float, factor: float) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor([start]))
        self.frozen = nn.Parameter(torch.tensor(start, dtype=torch.float64), requires_grad=False)
        self.register_buffer("steps", torch.tensor(int(start)))
        self.register_buffer("flags", torch.tensor([start > 0, True, False]))
        self.factor = factor

    def forward(self, pooled: dict[str, Tensor], batch: TrainingBatch) -> DenseOutput:
        self.steps += int(self.factor)
        size = len(batch.labels_B)
        logits_B = self.scale * self.factor * torch.ones(size)
        return DenseOutput(logits_B.mean() if size else logits_B.sum(), logits_B)


def average(
    process: RankProcess, factors: Sequence[float], sizes: Sequence[int]
) -> tuple[list[dict[str, Tensor]], list[float]]:
    """Ranks start apart and have gradients of their own.

    Returns:
        The state after the start, after two steps at learning rate 1, and after sharing
        buffers; the gradients of both steps.
    """
    module = Scale(float(process.rank + 5), factors[process.rank])
    replicas = DenseReplicas(module, process.collectives)

    def state() -> dict[str, Tensor]:
        return {name: value.clone() for name, value in module.state_dict().items()}

    states, gradients = [state()], []
    for _ in range(2):
        replicas.backward(replicas.forward({}, batch_of(sizes[process.rank])).loss)
        assert module.scale.grad is not None
        gradients.append(float(module.scale.grad))
        with torch.no_grad():
            module.scale -= module.scale.grad
    states.append(state())
    replicas.share_buffers()
    return [*states, state()], gradients


class TwoBuckets(nn.Module):
    """More gradients than fit into one message; every rank's is its number plus one."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.parts = nn.ParameterList(torch.zeros(3_000_000) for _ in range(3))
        self.rank = rank

    def forward(self, pooled: dict[str, Tensor], batch: TrainingBatch) -> DenseOutput:
        total = torch.stack([part.sum() for part in self.parts]).sum() * (self.rank + 1)
        return DenseOutput(total, torch.zeros(len(batch.labels_B)))


def average_in_buckets(process: RankProcess) -> list[list[float]]:
    """Distinct gradients of every parameter, over three steps."""
    module = TwoBuckets(process.rank)
    replicas = DenseReplicas(module, process.collectives)
    for _ in range(3):
        replicas.backward(replicas.forward({}, batch_of(1)).loss)
    return [part.grad.unique().tolist() for part in module.parts if part.grad is not None]


class Odd(nn.Module):
    """Dense layers with a fault."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))
        self.spare = nn.Parameter(torch.ones(1)) if fault == "unused" else None
        self.fault = fault

    def forward(self, pooled: dict[str, Tensor], batch: TrainingBatch) -> object:
        logits_B = (pooled["f"] * self.weight).sum(1)
        if self.fault == "bare":
            return logits_B.sum()
        if self.fault == "vector":
            return DenseOutput(logits_B, logits_B)
        if self.fault == "logits":
            return DenseOutput(logits_B.sum(), logits_B[:, None])
        if self.fault == "detached":
            return DenseOutput(logits_B.sum().detach(), logits_B)
        if self.fault == "inside":
            return torch.ones(2) @ torch.ones(3)
        return DenseOutput(logits_B.sum(), logits_B)


def odd_layers(process: RankProcess, case: Case, fault: str) -> str:
    """Every rank's layers have the same fault: this rank's error."""
    embeddings = pipeline_cases.build(process, case)
    loop = pipeline_cases.make_loop("plain", process, embeddings, Odd(fault))
    batches = [pipeline_cases.numbered(1)] * 2
    return message_of(lambda: loop.train_steps(batches, num_steps=2))


def different_layers(process: RankProcess) -> str:
    layers = nn.Linear(4, 2 + process.rank)
    return message_of(lambda: DenseReplicas(layers, process.collectives))


def stall(process: RankProcess, timeout_s: float) -> list[str]:
    """Rank 1 does not come to a backward, and not to a second forward: rank 0's errors.

    With the second forward, ranks agree anew on how to group their gradients.
    """
    messages = []
    for steps_before in (0, 1):
        rank, world_size = process.rank, process.collectives.world_size
        brief = Collectives(rank, world_size, device=torch.device("cpu"), timeout_s=timeout_s)
        replicas = DenseReplicas(Scale(1.0, 1.0), brief)
        output = replicas.forward({}, batch_of(1))
        for _ in range(steps_before):
            replicas.backward(output.loss)
        brief.recorder.start_step(7)
        if rank == 1:
            time.sleep(2 * timeout_s)
        elif steps_before:
            messages.append(message_of(lambda: replicas.forward({}, batch_of(1))))  # noqa: B023
        else:
            messages.append(message_of(lambda: replicas.backward(output.loss)))  # noqa: B023
        process.collectives.gather_objects("meeting after a failure", None)
    return messages


def is_freed(process: RankProcess, case: Case) -> list[bool]:
    """Whether tables and layers go once nobody uses them, after both loops trained them."""
    embeddings = pipeline_cases.build(process, case)
    dense = DenseHead(embeddings.output_dims, seed=0)
    for kind in ("plain", "pipelined", "plain"):
        loop = pipeline_cases.make_loop(kind, process, embeddings, dense)
        loop.train_steps([pipeline_cases.numbered(1)] * 2, num_steps=2)
    watched = [weakref.ref(embeddings), weakref.ref(dense), weakref.ref(dense.layers[0].weight)]
    del embeddings, dense, loop
    gc.collect()
    return [reference() is None for reference in watched]


def switch_loops(process: RankProcess, case: Case, kinds: Sequence[str]) -> list[Tensor]:
    """Each kind of loop in turn trains the same layers for a step."""
    embeddings = pipeline_cases.build(process, case)
    dense = DenseHead(embeddings.output_dims, seed=0)
    loops = {
        kind: pipeline_cases.make_loop(kind, process, embeddings, dense) for kind in set(kinds)
    }
    for index, kind in enumerate(kinds):
        loops[kind].train_steps([pipeline_cases.numbered(index + 5 * process.rank)], num_steps=1)
    return [p.detach().clone() for p in dense.parameters()]


# ---- evaluation ----------------------------------------------------------------------------


class Sums(nn.Module):
    """A sample's logit is the sum of its pooled values, and its loss too."""

    def __init__(self) -> None:
        super().__init__()
        self.moving, self.resting = nn.Dropout(), nn.Dropout()
        self.resting.eval()
        self.modes: list[tuple[bool, ...]] = []
        self.keeps_inputs = False

    def forward(self, pooled: dict[str, Tensor], batch: TrainingBatch) -> DenseOutput:
        modes = (self.training, self.moving.training, self.resting.training)
        self.modes.append((*modes, torch.is_grad_enabled(), self.keeps_inputs))
        logits_B = pooled["f"].sum(1)
        return DenseOutput(logits_B.mean() if len(logits_B) else logits_B.sum(), logits_B)


def evaluate(
    process: RankProcess, kind: str, case: Case, batches: Sequence[Sequence[TrainingBatch]]
) -> tuple[EvaluationResult, list[tuple[bool, ...]], list[int]]:
    """The result, the modes during it and in a training step after it, the progress."""
    dense = Sums()
    progress: list[int] = []
    embeddings = pipeline_cases.build(process, case)
    lookup = embeddings.lookup

    def noting(step: StepInput) -> dict[str, Tensor]:
        dense.keeps_inputs = step.training
        return lookup(step)

    embeddings.lookup = noting  # type: ignore[method-assign]
    loop = pipeline_cases.make_loop(kind, process, embeddings, dense)
    result = loop.evaluate(batches[process.rank], progress=progress.append)
    loop.train_steps(batches[process.rank], num_steps=1)
    return result, dense.modes, progress


def evaluate_only(process: RankProcess, kind: str, case: Case, times: int) -> bool:
    """Whether weights and states are the same after some evaluations."""
    embeddings = pipeline_cases.build(process, case)
    shards = embeddings.local_shards()

    def values() -> list[Tensor]:
        return [t for s in shards for t in (s.weights, *s.optimizer_states.values())]

    before = [value.clone() for value in values()]
    loop = pipeline_cases.make_loop(kind, process, embeddings, Sums())
    for _ in range(times):
        loop.evaluate([pipeline_cases.numbered(3)])
    return all(map(torch.equal, before, values()))


def fail_in_evaluation(process: RankProcess, case: Case) -> tuple[str, bool]:
    """The error of a bad source, and whether the layers are back in training mode."""
    dense = Sums()
    loop = pipeline_cases.make_loop("plain", process, pipeline_cases.build(process, case), dense)
    message = message_of(lambda: loop.evaluate(pipeline_cases.faulty("source", 1)))
    return message, dense.training
