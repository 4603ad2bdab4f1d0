"""Training: the same losses under any plan, something learned, and no step lost by a stop."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from autoshard.clicks.sources import open_clicks
from autoshard.errors import ArtifactError, InputError
from autoshard.plan import ShardingPlan
from autoshard.problem import Optimizer
from autoshard.runtime.group import WorkerGroup
from autoshard.runtime.results import RunOptions
from autoshard.shards import ShardingType
from autoshard.tables import PoolingType, Table
from autoshard.training.launch import check_training
from autoshard.training.options import DenseOptimizer, TrainingOptions
from autoshard.training.results import TrainingResult
from autoshard.training.worker import find_checkpoint, train_plan
from tests.distributed.model_cases import Kind, make_plan
from tests.distributed.runtime_cases import run_ranks

Groups = dict[int, WorkerGroup]

TABLES = tuple(
    Table(
        name=f"t{index}",
        feature_names=("shared",) if index in (1, 2) else (f"f{index}",),
        num_embeddings=20 + 7 * index,
        embedding_dim=dim,
        pooling_factor=1.0 + index % 3,
        weighted=index == 3,
        pooling=PoolingType.MEAN if index % 2 else PoolingType.SUM,
    )
    for index, dim in enumerate((8, 8, 4, 8, 12, 8))
)
ALL_TYPES: list[Kind] = list(ShardingType)
OPTIONS = TrainingOptions(
    data="clicks?samples=400&evaluation_samples=90&numeric=3",
    eval_every=5,
    max_steps=12,
    epochs=3,
    dense_optimizer=DenseOptimizer.SGD,
    dense_learning_rate=0.05,
    top=(16,),
    bottom=(8,),
)


def plan_of(
    kinds: list[Kind], world_size: int, optimizer: Optimizer = Optimizer.SGD, batch: int = 48
) -> ShardingPlan:
    plan = make_plan(list(TABLES), kinds, world_size, optimizer, batch_size=batch // world_size)
    return replace(plan, training=replace(plan.training, learning_rate=0.1))


def train(groups: Groups, plan: ShardingPlan, options: TrainingOptions = OPTIONS) -> TrainingResult:
    results = run_ranks(groups, plan.topology.world_size, train_plan, plan, options)
    assert all(result.curve == results[0].curve for result in results)
    return results[0]


@pytest.mark.parametrize("optimizer", [Optimizer.SGD, Optimizer.ADAGRAD])
def test_losses_are_those_of_one_process_under_any_plan(
    groups: Groups, optimizer: Optimizer
) -> None:
    """All six sharding types at once, the plain and the pipelined loop, 1 and 2 ranks.

    8 steps fill an epoch of 400 samples, so that the 12 steps end within the second one.
    """
    alone = train(groups, plan_of(["0"] * 6, 1, optimizer))
    assert len(alone.losses) == 12
    assert [row.step for row in alone.curve] == [5, 10, 12]
    assert [row.samples for row in alone.curve] == [240, 480, 576]
    pipelined = replace(OPTIONS, run=RunOptions(pipelined=True))
    for plan, options in (
        (plan_of(ALL_TYPES, 2, optimizer), OPTIONS),
        (plan_of(ALL_TYPES, 2, optimizer), pipelined),
        (plan_of(["0", "dp", "1", "1", "dp", "0"], 2, optimizer), OPTIONS),
    ):
        result = train(groups, plan, options)
        assert result.losses == pytest.approx(alone.losses, rel=1e-4)
        for row, expected in zip(result.curve, alone.curve, strict=True):
            assert row.log_loss == pytest.approx(expected.log_loss, rel=1e-4)
            assert row.auc == pytest.approx(expected.auc, abs=2e-3)  # ranks may swap
            assert row.train_loss == pytest.approx(expected.train_loss, rel=1e-4)


def test_evaluations_come_when_they_are_due(groups: Groups) -> None:
    """8 steps are an epoch: some fall due at its end, some within."""
    plan = plan_of(["0"] * 6, 1)
    for every, epochs, steps in (
        (4, 2, [4, 8, 12, 16]),
        (8, 2, [8, 16]),
        (5, 1, [5, 8]),
        (None, 2, [8, 16]),
        (100, 1, [8]),
    ):
        options = replace(OPTIONS, eval_every=every, epochs=epochs, max_steps=None)
        curve = train(groups, plan, options).curve
        assert [row.step for row in curve] == steps
        assert [row.epoch for row in curve] == [round(step / 8, 6) for step in steps]


def test_an_evaluation_sees_every_sample_once(groups: Groups) -> None:
    """90 samples over 2 ranks with 24 each: the last step is uneven, one rank's is empty."""
    frozen = replace(OPTIONS, max_steps=1, learning_rate=0.0, dense_learning_rate=0.0)
    once = train(groups, plan_of(["0"] * 6, 1, batch=90), frozen)
    twice = train(groups, plan_of(ALL_TYPES, 2), frozen)
    assert once.curve[0].log_loss == pytest.approx(twice.curve[0].log_loss, rel=1e-6)
    few = train(groups, plan_of(ALL_TYPES, 2), replace(frozen, eval_samples=48))
    assert few.curve[0].log_loss != pytest.approx(twice.curve[0].log_loss, rel=1e-6)


def test_a_model_learns_what_there_is_to_learn(groups: Groups) -> None:
    """From chance to near the best possible AUC, which the hidden model gives."""
    options = TrainingOptions(
        data="clicks?samples=20000&evaluation_samples=4000",
        epochs=2,
        eval_every=10_000,
        dense_learning_rate=0.005,
    )
    plan = plan_of(["0"] * 6, 1, Optimizer.ROWWISE_ADAGRAD, batch=200)
    tables = [entry.table for entry in plan.tables]
    evaluation = open_clicks(options.data, tables).evaluation
    probabilities, labels = evaluation.best(4000)  # type: ignore[attr-defined]
    best = roc_auc_score(labels, probabilities)
    result = train(groups, plan, options)
    auc = result.curve[-1].auc
    assert auc is not None
    assert best > 0.85
    assert 0.8 < auc < best + 0.01
    assert np.mean(result.losses[-20:]) < np.mean(result.losses[:5]) - 0.1


@pytest.mark.parametrize("pipelined", [False, True])
@pytest.mark.parametrize("at", [5, 8])
def test_a_resumed_run_repeats_the_uninterrupted_one_bit_by_bit(
    groups: Groups, tmp_path: Path, at: int, pipelined: bool
) -> None:
    """After 5 steps, within an epoch and right after an evaluation; after 8, at its end."""
    plan = plan_of(ALL_TYPES, 2, Optimizer.ROWWISE_ADAGRAD)
    whole_dir, resumed_dir = tmp_path / "whole", tmp_path / "resumed"
    options = replace(
        OPTIONS,
        run=RunOptions(pipelined=pipelined),
        dense_optimizer=DenseOptimizer.ADAM,
        learning_rate=0.07,  # not the plan's: a checkpoint has to keep it
        dense_learning_rate=0.02,
        checkpoint=str(whole_dir),
        checkpoint_every=at,
        keep_checkpoints=9,
    )
    whole = train(groups, plan, options)
    resumed_dir.mkdir()
    shutil.copytree(whole_dir / f"step-{at:08d}", resumed_dir / f"step-{at:08d}")
    rest = train(
        groups,
        plan,
        replace(
            options,
            checkpoint=str(resumed_dir),
            resume=True,
            learning_rate=None,
            dense_learning_rate=None,
        ),
    )
    assert rest.losses == whole.losses[at:]
    fields = ("step", "epoch", "samples", "train_loss", "auc", "log_loss")
    for row, expected in zip(rest.curve, whole.curve, strict=True):
        assert [getattr(row, f) for f in fields] == [getattr(expected, f) for f in fields]
    ends = [
        json.loads((folder / "step-00000012" / "manifest.json").read_text())["files"]
        for folder in (whole_dir, resumed_dir)
    ]
    for rank in range(2):
        name = f"rank-{rank:05d}.safetensors"
        assert ends[0][name]["sha256"] == ends[1][name]["sha256"]


def test_a_run_goes_on_under_another_plan_and_world_size(groups: Groups, tmp_path: Path) -> None:
    whole = train(groups, plan_of(["0"] * 6, 1, Optimizer.ADAGRAD))
    options = replace(OPTIONS, checkpoint=str(tmp_path), resume=True)
    plans = [(plan_of(["0", "1"] * 3, 2, Optimizer.ADAGRAD), 4),
             (plan_of([ShardingType.ROW_WISE] * 6, 3, Optimizer.ADAGRAD), 9),
             (plan_of(["dp"] * 6, 1, Optimizer.ADAGRAD), 12)]  # fmt: skip
    losses: list[float] = []
    for plan, until in plans:
        # The curve's last row stands at the stop, so evaluations are not compared.
        result = train(groups, plan, replace(options, max_steps=until))
        losses += result.losses
        assert result.num_steps == until
    assert losses == pytest.approx(whole.losses, rel=1e-4)


def test_samples_come_again_where_a_plan_changes_the_step(groups: Groups, tmp_path: Path) -> None:
    options = replace(OPTIONS, checkpoint=str(tmp_path), resume=True)
    train(groups, plan_of(["0"] * 6, 1), replace(options, max_steps=3))
    result = train(groups, plan_of(["0"] * 6, 1, batch=100), replace(options, max_steps=4))
    # 144 samples are one step of 100, and 44 more.
    assert result.notes == (
        "44 samples come again: the checkpoint ends within a step of 100 samples",
    )
    assert result.num_samples == 200


def test_a_finished_run_has_nothing_left_to_do(groups: Groups, tmp_path: Path) -> None:
    options = replace(OPTIONS, max_steps=None, epochs=1, checkpoint=str(tmp_path), resume=True)
    first = train(groups, plan_of(["0"] * 6, 1), options)
    again = train(groups, plan_of(["0"] * 6, 1), options)
    assert again.losses == ()
    assert again.curve == first.curve
    assert again.checkpoint == first.checkpoint
    longer = train(groups, plan_of(["0"] * 6, 1), replace(options, epochs=2))
    assert longer.num_steps == 16
    both = train(groups, plan_of(["0"] * 6, 1), replace(OPTIONS, max_steps=None, epochs=2))
    assert first.losses + longer.losses == both.losses


def test_a_folder_that_cannot_be_written_to_is_refused_before_the_training() -> None:
    # Nobody can make a folder there, root included.
    with pytest.raises(InputError, match="cannot write a checkpoint in /proc/nope"):
        find_checkpoint(replace(OPTIONS, checkpoint="/proc/nope"))


def test_what_does_not_belong_to_a_checkpoint_is_refused(groups: Groups, tmp_path: Path) -> None:
    options = replace(OPTIONS, max_steps=1, checkpoint=str(tmp_path))
    train(groups, plan_of(["0"] * 6, 1), options)
    plan = plan_of(["0"] * 6, 1)
    with pytest.raises(InputError, match="holds checkpoints of an earlier run"):
        check_training(plan, options)
    for changes, told in (
        ({"data": "clicks?samples=401"}, "another data_options"),
        ({"run": RunOptions(seed=1)}, "another seed"),
        ({"top": (17,)}, "another top"),
        ({"model": "mlp"}, "another model"),
        ({"dense_optimizer": "adam"}, "another dense_optimizer"),
    ):
        with pytest.raises(ArtifactError, match=told):
            check_training(plan, replace(options, resume=True, **changes))
    check_training(plan, replace(options, resume=True))


def test_training_that_diverges_ends(groups: Groups) -> None:
    options = replace(OPTIONS, learning_rate=1e30, dense_learning_rate=1e30)
    with pytest.raises(InputError, match=r"diverged: the loss of step \d+ is not finite"):
        train(groups, plan_of(["0"] * 6, 1), options)


def test_data_that_fill_no_step_are_refused() -> None:
    options = replace(OPTIONS, data="clicks?samples=47")
    with pytest.raises(InputError, match="does not fill a single step; got: 47 samples"):
        check_training(plan_of(["0"] * 6, 1), options)


def test_a_log_of_unknown_length_ends_its_epochs_together(groups: Groups, tmp_path: Path) -> None:
    """55 lines, of which 5 are held out: 50 samples are 2 steps of 24 per epoch."""
    tables = [
        Table(name=f"t_cat_{i}", feature_names=(f"cat_{i}",), num_embeddings=11, embedding_dim=4,
              pooling_factor=1)
        for i in range(3)
    ]  # fmt: skip
    lines = [
        "\t".join([str(i % 3 % 2), *(str(i * k % 7) for k in range(13)),
                   *(f"{i * k % 17:x}" for k in range(26))])
        for i in range(55)
    ]  # fmt: skip
    (tmp_path / "log").write_text("\n".join([*lines, "not a sample"]) + "\n")
    results = []
    for world_size, kinds in ((1, ["0"] * 3), (2, ["0", "dp", ShardingType.ROW_WISE])):
        plan = make_plan(tables, kinds, world_size, batch_size=24 // world_size)
        options = TrainingOptions(
            data=f"criteo:{tmp_path / 'log'}?malformed=skip", epochs=2,
            dense_optimizer=DenseOptimizer.SGD,
        )  # fmt: skip
        results.append(train(groups, plan, options))
    assert [row.step for row in results[0].curve] == [2, 4]
    assert [row.epoch for row in results[0].curve] == [1.0, 2.0]
    assert results[1].losses == pytest.approx(results[0].losses, rel=1e-4)
    (tmp_path / "log").write_text("\n".join(lines[:20]))
    with pytest.raises(InputError, match="does not fill a single step"):
        train(groups, make_plan(tables, ["0"] * 3, 1, batch_size=24), options)
