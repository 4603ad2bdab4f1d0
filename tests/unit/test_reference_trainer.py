"""The reference that the sharded runtime is compared with, against arithmetic done by hand."""

from __future__ import annotations

import pytest
import torch

from tests.reference_trainer import ReferenceBatch, ReferenceTable, ReferenceTrainer


def trainer(optimizer: str, **table: object) -> ReferenceTrainer:
    weights = torch.tensor([[1.0, 2.0], [4.0, 8.0], [16.0, 32.0]])
    return ReferenceTrainer(
        {"t": ReferenceTable(weights, ["f"], **table)},  # type: ignore[arg-type]
        optimizer=optimizer,
        learning_rate=0.5,
        eps=1.0,
    )


BATCH = ReferenceBatch({"f": [[0, 1, 1, 2], [], [1]]}, {"f": [[1.0, 2.0, -1.0, 0.5], [], [3.0]]})


@pytest.mark.parametrize(
    ("mean", "weighted", "want"),
    [
        (False, False, [[25, 50], [0, 0], [4, 8]]),
        (True, False, [[6.25, 12.5], [0, 0], [4, 8]]),
        (False, True, [[1 + 8 - 4 + 8, 2 + 16 - 8 + 16], [0, 0], [12, 24]]),
        (True, True, [[13 / 4, 26 / 4], [0, 0], [12, 24]]),
    ],
)
def test_pooling(mean: bool, weighted: bool, want: list[list[float]]) -> None:
    reference = trainer("sgd", mean=mean, weighted=weighted)
    assert reference.outputs(BATCH)["t/f"].tolist() == want


def test_nothing_to_pool() -> None:
    reference = trainer("sgd")
    assert reference.outputs(ReferenceBatch({"f": []}, {"f": []}))["t/f"].shape == (0, 2)


def one_step(optimizer: str, **table: object) -> ReferenceTable:
    """Two ranks: rank 0 looks row 1 up twice, rank 1 has no sample.

    The loss is (2 · row 1 · (1, 3)) / 1 sample / 2 ranks: the gradient of row 1 is (1, 3).
    """
    reference = trainer(optimizer, **table)
    batches = [ReferenceBatch({"f": [[1, 1]]}, {}), ReferenceBatch({"f": []}, {})]
    loss = reference.step(batches, {"t/f": torch.tensor([1.0, 3.0])})
    assert loss == (2 * 4 * 1 + 2 * 8 * 3) / 2
    table_after = reference.tables["t"]
    assert table_after.weights[[0, 2]].tolist() == [[1, 2], [16, 32]]
    for state in table_after.states.values():
        assert not state[[0, 2]].any()
    return table_after


def test_sgd() -> None:
    assert one_step("sgd").weights[1].tolist() == [4 - 0.5, 8 - 1.5]


def test_adagrad() -> None:
    table = one_step("adagrad")
    assert table.states["sum"][1].tolist() == [1, 9]
    assert table.weights[1].tolist() == [4 - 0.5 * 1 / 2, 8 - 0.5 * 3 / 4]


def test_rowwise_adagrad_of_a_whole_row() -> None:
    table = one_step("rowwise_adagrad")
    assert table.states["sum"][1].tolist() == [5, 5]
    want = torch.tensor([4 - 0.5 * 1 / (5**0.5 + 1), 8 - 0.5 * 3 / (5**0.5 + 1)])
    torch.testing.assert_close(table.weights[1], want)


def test_rowwise_adagrad_of_cut_columns() -> None:
    table = one_step("rowwise_adagrad", column_cuts=(1,))
    assert table.states["sum"][1].tolist() == [1, 9]
    assert table.weights[1].tolist() == [4 - 0.5 * 1 / 2, 8 - 0.5 * 3 / 4]


def test_adam() -> None:
    """After one step, both corrected moments are those of the gradient itself."""
    table = one_step("adam")
    torch.testing.assert_close(table.states["exp_avg"][1], torch.tensor([0.1, 0.3]))
    torch.testing.assert_close(table.states["exp_avg_sq"][1], torch.tensor([0.001, 0.009]))
    torch.testing.assert_close(
        table.weights[1], torch.tensor([4 - 0.5 * 1 / 2, 8 - 0.5 * 3 / 4]), rtol=1e-5, atol=1e-5
    )


def test_state_adds_up_over_steps() -> None:
    reference = trainer("adagrad")
    batch = ReferenceBatch({"f": [[2]]}, {})
    for _ in range(2):
        reference.step([batch], {"t/f": torch.tensor([3.0, 4.0])})
    assert reference.tables["t"].states["sum"][2].tolist() == [18, 32]


def test_the_quadratic_loss_pulls_outputs_to_zero() -> None:
    reference = trainer("sgd")
    batch = ReferenceBatch({"f": [[2]]}, {})
    reference.step([batch], {"t/f": torch.zeros(2), "quadratic": torch.ones(())})
    assert reference.tables["t"].weights[2].tolist() == [8, 16]


def test_half_precision_weights_are_updated_in_single_precision() -> None:
    """2048 + 0.75 is 2048 in fp16, whose spacing is 2 there; 1 - 2^-11 needs 11 bits."""
    weights = torch.tensor([[2048.0, 1.0]], dtype=torch.float16)
    reference = ReferenceTrainer(
        {"t": ReferenceTable(weights, ["f"])}, optimizer="sgd", learning_rate=0.5, eps=0
    )
    reference.step([ReferenceBatch({"f": [[0]]}, {})], {"t/f": torch.tensor([-1.5, 2.0**-10])})
    after = reference.tables["t"].weights
    assert after.dtype is torch.float16
    assert after.tolist() == [[2048, 1 - 2.0**-11]]


def test_steps_may_round_to_half_precision_before_they_are_taken() -> None:
    """A step of 2049 lies between 2048 and 2050, and ties go to the even one: 2048."""
    for rounds_steps, want in ((False, 1.0), (True, 2.0)):
        reference = ReferenceTrainer(
            {"t": ReferenceTable(torch.tensor([[2050.0]], dtype=torch.float16), ["f"])},
            optimizer="sgd",
            learning_rate=1.0,
            eps=0,
            rounds_steps=rounds_steps,
        )
        reference.step([ReferenceBatch({"f": [[0]]}, {})], {"t/f": torch.tensor([2049.0])})
        assert reference.tables["t"].weights.tolist() == [[want]]


def test_dense_layers_learn_from_the_mean_over_ranks() -> None:
    """One weight and one bias; at logit 0 the loss is ln 2 and its slope 1/2 - label."""
    reference = ReferenceTrainer(
        {"t": ReferenceTable(torch.tensor([[2.0]]), ["f"])},
        optimizer="sgd",
        learning_rate=1.0,
        eps=0,
        dense=[(torch.zeros(1, 1), torch.zeros(1))],
    )
    batches = [
        ReferenceBatch({"f": [[0]]}, {}, [1.0]),
        ReferenceBatch({"f": [[0], [0]]}, {}, [0.0, 0.0]),
    ]
    assert reference.step(batches, {}) == pytest.approx(0.6931472)
    # Slopes of bias: -1/2 and +1/2 average to 0; of weight: 2 · (-1/2 + 1/2) / 2 = 0.
    assert [p.item() for p in reference.dense[0]] == [0, 0]
    assert reference.tables["t"].weights.tolist() == [[2.0]]
    assert reference.step(batches[:1], {}) == pytest.approx(0.6931472)
    assert [p.item() for p in reference.dense[0]] == [1.0, 0.5]
