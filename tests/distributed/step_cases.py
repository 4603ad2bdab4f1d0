"""What ranks do with single steps: evaluation between them, ids ahead of them, misuse."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autoshard.runtime.worker import RankProcess
from tests.distributed.runtime_cases import (
    Case,
    CoefficientLoss,
    Outcome,
    build,
    message_of,
    outcome_of,
    to_batch,
)


def train_and_evaluate(
    process: RankProcess, cases: Sequence[Case]
) -> list[tuple[Outcome, list[dict[str, Tensor]], bool]]:
    """Every batch is looked up without gradients before it is trained on.

    Returns:
        Per case, what training gave, the outputs without gradients, and whether any
        of those wanted a gradient.
    """
    results = []
    recorder = process.collectives.recorder
    for case in cases:
        embeddings = build(process, case)
        trained = CoefficientLoss(case.plan, case.coefficients)
        evaluated = CoefficientLoss(case.plan, case.coefficients)
        wants_gradient = False
        losses = []
        for step, given in enumerate(case.batches[process.rank]):
            batch = to_batch(given, case)
            recorder.start_step(2 * step)
            with torch.no_grad():
                pooled = embeddings(batch.sparse)
                evaluated(pooled, batch)
                wants_gradient |= any(value.requires_grad for value in pooled.values())
            recorder.start_step(2 * step + 1)
            loss = trained(embeddings(batch.sparse), batch).loss
            loss.backward()
            losses.append(float(loss.detach()))
        outcome = outcome_of(embeddings, losses, trained.outputs, recorder)
        results.append((outcome, evaluated.outputs, wants_gradient))
    return results


def train_with_ids_ahead(process: RankProcess, cases: Sequence[Case]) -> list[Outcome]:
    """The ids of all steps are sent before the first lookup, as a pipelined loop may."""
    outcomes = []
    recorder = process.collectives.recorder
    for case in cases:
        embeddings = build(process, case)
        dense = CoefficientLoss(case.plan, case.coefficients)
        batches = [to_batch(batch, case) for batch in case.batches[process.rank]]
        steps = []
        for number, batch in enumerate(batches):
            recorder.start_step(number)
            steps.append(embeddings.input_dist(batch.sparse))
        losses = []
        for step, batch in zip(steps, batches, strict=True):
            assert step is not None
            loss = dense(embeddings.lookup(step), batch).loss
            loss.backward()
            losses.append(float(loss.detach()))
        outcomes.append(outcome_of(embeddings, losses, dense.outputs, recorder))
    return outcomes


def train_on_one_output(process: RankProcess, cases: Sequence[Case], used: str) -> list[Outcome]:
    """Only the output called `used` enters the loss; the others get no gradient."""
    outcomes = []
    recorder = process.collectives.recorder
    for case in cases:
        embeddings = build(process, case)
        losses = []
        for step, given in enumerate(case.batches[process.rank]):
            recorder.start_step(step)
            pooled = embeddings(to_batch(given, case).sparse)
            loss = pooled[used].sum() / max(1, given.num_samples)
            loss.backward()
            losses.append(float(loss.detach()))
        outcomes.append(outcome_of(embeddings, losses, [], recorder))
    return outcomes


def total_of(pooled: dict[str, Tensor]) -> Tensor:
    return torch.stack([value.sum() for value in pooled.values()]).sum()


def end_of_data(process: RankProcess, cases: Sequence[Case]) -> list[list[bool]]:
    """Per case, whether each `input_dist` gave a step; this rank's last one says `None`."""
    ran = []
    for case in cases:
        embeddings = build(process, case)
        steps: list[bool] = []
        batches = [to_batch(batch, case).sparse for batch in case.batches[process.rank]]
        for number, batch in enumerate([*batches, None]):
            process.collectives.recorder.start_step(number)
            step = embeddings.input_dist(batch)
            steps.append(step is not None)
            if step is None:
                break
            total_of(embeddings.lookup(step)).backward()
        ran.append(steps)
    return ran


def misuse(process: RankProcess, cases: Sequence[Case]) -> list[list[str]]:
    """Per case, the errors of a second lookup and of a second backward of one step."""
    messages = []
    for case in cases:
        embeddings = build(process, case)
        step = embeddings.input_dist(to_batch(case.batches[process.rank][0], case).sparse)
        assert step is not None
        total = total_of(embeddings.lookup(step))
        total.backward(retain_graph=True)
        again = [lambda: embeddings.lookup(step), lambda: total.backward()]  # noqa: B023
        messages.append([message_of(function) for function in again])
    return messages


def one_rank_without_gradients(process: RankProcess, case: Case) -> str:
    """Rank 0 looks its batch up for evaluation while the others train."""
    embeddings = build(process, case)
    batch = to_batch(case.batches[process.rank][0], case).sparse
    with torch.set_grad_enabled(process.rank != 0):
        return message_of(lambda: embeddings(batch))


def train_at_other_rates(
    process: RankProcess, cases: Sequence[Case], rates: Sequence[float]
) -> list[Outcome]:
    """Each step uses the learning rate of its position."""
    outcomes = []
    recorder = process.collectives.recorder
    for case in cases:
        embeddings = build(process, case)
        dense = CoefficientLoss(case.plan, case.coefficients)
        for step, (given, rate) in enumerate(zip(case.batches[process.rank], rates, strict=True)):
            recorder.start_step(step)
            embeddings.set_learning_rate(rate)
            batch = to_batch(given, case)
            dense(embeddings(batch.sparse), batch).loss.backward()
        outcomes.append(outcome_of(embeddings, [], dense.outputs, recorder))
    return outcomes


def infer_and_train(process: RankProcess, cases: Sequence[Case]) -> list[Outcome]:
    """The first batch is looked up in inference mode, then all are trained on."""
    outcomes = []
    recorder = process.collectives.recorder
    for case in cases:
        embeddings = build(process, case)
        dense = CoefficientLoss(case.plan, case.coefficients)
        batches = [to_batch(batch, case) for batch in case.batches[process.rank]]
        recorder.start_step(0)
        with torch.inference_mode():
            inferred = {n: v.clone() for n, v in embeddings(batches[0].sparse).items()}
        losses = []
        for step, batch in enumerate(batches):
            recorder.start_step(step)
            pooled = embeddings(batch.sparse)
            if step == 0:
                assert all(torch.equal(v, inferred[n]) for n, v in pooled.items())
            loss = dense(pooled, batch).loss
            loss.backward()
            losses.append(float(loss.detach()))
        outcomes.append(outcome_of(embeddings, losses, dense.outputs, recorder))
    return outcomes


def train_on_doubled_outputs(process: RankProcess, cases: Sequence[Case]) -> list[Outcome]:
    """Outputs are doubled in place before the loss."""
    outcomes = []
    recorder = process.collectives.recorder
    for case in cases:
        embeddings = build(process, case)
        dense = CoefficientLoss(case.plan, case.coefficients)
        for step, given in enumerate(case.batches[process.rank]):
            recorder.start_step(step)
            batch = to_batch(given, case)
            pooled = {name: value.mul_(2) for name, value in embeddings(batch.sparse).items()}
            dense(pooled, batch).loss.backward()
        outcomes.append(outcome_of(embeddings, [], dense.outputs, recorder))
    return outcomes
