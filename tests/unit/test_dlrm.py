"""DLRM against the paper's formula written out, and its metrics against scikit-learn's."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss as sklearn_log_loss
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from autoshard.errors import InputError
from autoshard.runtime.batch import JaggedBatch
from autoshard.runtime.dense import TrainingBatch
from autoshard.training.dlrm import DLRM
from autoshard.training.metrics import auc, log_loss


def batch_of(num_samples: int, num_numeric: int = 0) -> TrainingBatch:
    generator = torch.Generator().manual_seed(1)
    numeric = torch.randn(num_samples, num_numeric, generator=generator) if num_numeric else None
    labels = torch.arange(num_samples, dtype=torch.float32) % 2
    sparse = JaggedBatch(
        ("f",), torch.zeros(1, num_samples, dtype=torch.int64), torch.zeros(0, dtype=torch.int64)
    )
    return TrainingBatch(sparse, labels, numeric)


def pooled_of(dims: dict[str, int], num_samples: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return {
        name: torch.randn(num_samples, dim, generator=generator, requires_grad=True)
        for name, dim in dims.items()
    }


def written_out(model: DLRM, pooled: dict[str, Tensor], batch: TrainingBatch) -> list[float]:
    """Sample by sample, pair by pair."""
    logits = []
    for sample in range(batch.sparse.batch_size):
        if batch.dense_BN is None:
            assert model.bottom_vector_D is not None
            bottom = model.bottom_vector_D
        else:
            assert model.bottom is not None
            bottom = model.bottom(batch.dense_BN[sample])
        vectors = [bottom]
        for name, projection in zip(sorted(pooled), model.projections, strict=True):
            row = pooled[name][sample]
            vectors.append(row if isinstance(projection, nn.Identity) else projection.weight @ row)
        pairs = [vectors[i] @ vectors[j] for i in range(len(vectors)) for j in range(i)]
        logits.append(model.top(torch.cat([bottom, torch.stack(pairs)]))[0].item())
    return logits


@pytest.mark.parametrize("num_numeric", [0, 3])
@pytest.mark.parametrize(
    "dims", [{"a": 4}, {"b": 4, "a": 4, "c": 4}, {"c": 8, "a": 4, "b": 4, "d": 6}]
)
def test_logits_are_those_of_the_formula(dims: dict[str, int], num_numeric: int) -> None:
    model = DLRM(dims, num_numeric=num_numeric, bottom=(5,), top=(7, 6), seed=3)
    assert model.interaction_dim == 4
    batch, pooled = batch_of(9, num_numeric), pooled_of(dims, 9)
    output = model(pooled, batch)
    expected = written_out(model, pooled, batch)
    assert output.logits_B.tolist() == pytest.approx(expected, rel=1e-4, abs=1e-5)
    probabilities = 1 / (1 + np.exp(-np.array(expected)))
    assert output.loss.item() == pytest.approx(
        sklearn_log_loss(batch.labels_B.numpy(), probabilities), rel=1e-5
    )
    output.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    assert all(value.grad is not None for value in pooled.values())


def test_only_outputs_of_another_dimension_are_projected() -> None:
    model = DLRM({"a": 4, "b": 8, "c": 8, "d": 16})
    assert model.interaction_dim == 8  # most outputs have it
    kinds = [type(projection) for projection in model.projections]
    assert kinds == [nn.Linear, nn.Identity, nn.Identity, nn.Linear]
    assert all(p.bias is None for p in model.projections if isinstance(p, nn.Linear))
    assert DLRM({"a": 4, "b": 8}).interaction_dim == 8  # the largest of several
    assert DLRM({"a": 4, "b": 8}, interaction_dim=5).interaction_dim == 5


def test_the_order_of_tables_changes_nothing() -> None:
    dims = {"a": 4, "b": 8, "c": 4}
    reordered = {name: dims[name] for name in "cba"}
    batch, pooled = batch_of(5), pooled_of(dims, 5)
    logits = [DLRM(d, seed=1)(pooled, batch).logits_B for d in (dims, reordered)]
    assert torch.equal(*logits)


def test_weights_start_equal_for_a_seed_and_as_published() -> None:
    dims = {"a": 64, "b": 32}
    first, again, other = (DLRM(dims, num_numeric=13, top=(512,), seed=s) for s in (0, 0, 1))
    for one, same in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, same)
    assert not torch.equal(next(first.top.parameters()), next(other.top.parameters()))
    layer = first.top[0]
    assert float(layer.weight.std()) == pytest.approx(
        math.sqrt(2 / (layer.in_features + layer.out_features)), rel=0.05
    )
    assert float(layer.bias.std()) == pytest.approx(512**-0.5, rel=0.2)


def test_an_empty_batch_has_no_loss_and_still_a_gradient() -> None:
    model = DLRM({"a": 4}, num_numeric=3)
    for batch in (batch_of(0, 3), batch_of(0)):
        output = model(pooled_of({"a": 4}, 0), batch)
        assert float(output.loss) == 0
        assert output.logits_B.shape == (0,)
        output.loss.backward()
        assert all(p.grad is not None and not p.grad.any() for p in model.parameters())


def test_what_does_not_fit_is_refused() -> None:
    with pytest.raises(InputError, match="got: 2; allowed: 3"):
        DLRM({"a": 4}, num_numeric=3)(pooled_of({"a": 4}, 2), batch_of(2, 2))
    with pytest.raises(InputError, match="got: 0; allowed: 3"):
        DLRM({"a": 4}, num_numeric=3)(pooled_of({"a": 4}, 2), batch_of(2))
    with pytest.raises(InputError, match="at least one"):
        DLRM({})
    with pytest.raises(InputError, match="sizes of DLRM"):
        DLRM({"a": 4}, top=(0,))
    with pytest.raises(InputError, match="sizes of DLRM"):
        DLRM({"a": 4}, interaction_dim=-1)


@pytest.mark.parametrize("num_values", [3, 1000])
def test_auc_and_log_loss_are_those_of_scikit_learn(num_values: int) -> None:
    generator = np.random.default_rng(num_values)
    for _ in range(20):
        labels = (generator.random(200) < 0.3).astype(np.float32)
        logits = generator.integers(0, num_values, 200) / num_values * 6 - 3  # with ties
        assert auc(labels, logits) == pytest.approx(roc_auc_score(labels, logits), abs=1e-12)
        expected = sklearn_log_loss(labels, 1 / (1 + np.exp(-logits)))
        assert log_loss(labels, logits) == pytest.approx(expected, rel=1e-9)


def test_metrics_at_their_edges() -> None:
    assert auc([1, 0, 0], [3.0, 2.0, 1.0]) == 1
    assert auc([0, 1, 1], [3.0, 2.0, 1.0]) == 0
    assert auc([0, 1], [1.0, 1.0]) == 0.5
    assert auc([1, 1], [0.0, 1.0]) is None
    assert auc([], []) is None
    assert log_loss([], []) is None
    assert log_loss([1, 0], [1000.0, -1000.0]) == 0
    assert log_loss([0], [1000.0]) == 1000
    for metric in (auc, log_loss):
        with pytest.raises(InputError, match="neither 0 nor 1"):
            metric([0.5], [1.0])
        with pytest.raises(InputError, match="do not match"):
            metric([0, 1], [1.0])
        with pytest.raises(InputError, match="not finite"):
            metric([0, 1], [1.0, float("nan")])
