"""Networks learn a simulated machine that no linear model can describe, within their limits."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest
import torch

from autoshard.errors import InputError
from autoshard.features import WORK_FEATURES, WORK_OF_PHASE
from cost_net.baselines import linear
from cost_net.collective_training import (
    physical_weights,
    predict_collective_ms,
    train_collective,
)
from cost_net.dataset import SPLITS
from cost_net.networks import AdditiveNet, CollectiveNet, make_network
from cost_net.pipeline import ERRORS_FILE, PREDICTIONS_FILE
from cost_net.training import (
    CostNetConfig,
    inverse_softplus,
    predict_ms,
    relative_loss,
    train_compute,
)
from tests.cost_cases import (
    NOISE,
    kernels,
    measurements,
    model_folder,
    quick_config,
    trained,
    transfer_ms,
)


def medians(split: str = "test") -> dict[str, float]:
    models = trained().errors["splits"][split]["models"]
    return {name: scores["total"]["median"] for name, scores in models.items()}


def test_it_learns_what_a_linear_model_cannot():
    errors = medians()
    network = errors.pop("network (additive)")
    assert network < 0.5 * min(errors.values())
    # Its own error and the noise of the measurement it is compared with.
    assert network < 2 * NOISE
    assert trained().errors["splits"]["test"]["models"]["network (additive)"]["total"]["tau"] > 0.93


def test_it_holds_on_tables_it_never_saw():
    assert medians("test")["network (additive)"] < 2 * medians("train")["network (additive)"]


def test_all_to_alls_are_learned_and_judged_on_those_held_out():
    facts = trained().errors["collectives"]
    assert facts["num"] + facts["test"]["num"] == 150
    assert facts["test"]["median"] < 2.5 * NOISE
    left_out = facts["left_out_world_sizes"]
    assert list(left_out) == ["2", "4", "8"]
    assert all(scores["without"]["median"] < 0.3 for scores in left_out.values())
    assert facts["other_kinds"] == {}
    weights = trained().collective.bound_facts()
    assert weights["latency_ms"] == pytest.approx(0.1, rel=0.2)
    # Every rank has a processor here: R·(R − 1)/R messages, and no turns to take.
    assert weights["message_ms"] == pytest.approx(0.05, rel=0.3)
    assert weights["busiest_ms_per_byte"] == pytest.approx(1 / 2e6, rel=0.1)
    assert weights["total_ms_per_byte"] == pytest.approx(1 / 4e6, rel=0.3)
    # A world size between those measured, and more bytes than any.
    unseen = np.array([[6.0, 4e7, 3e7, 9e7]])
    with torch.inference_mode():
        found = float(trained().collective(torch.tensor(unseen, dtype=torch.float32)))
    assert found == pytest.approx(transfer_ms(6, 4e7, 9e7), rel=0.15)


def test_disturbed_exchanges_do_not_move_the_physical_fit():
    rng = np.random.default_rng(0)
    terms = np.column_stack([np.ones(200), rng.uniform(0, 50, 200)])
    times = terms @ [0.2, 0.03]
    times[::5] *= rng.uniform(3, 10, 40)  # somebody else used the machine
    np.testing.assert_allclose(physical_weights(terms, times), [0.2, 0.03], rtol=0.02)


def test_the_same_seed_gives_the_same_network_whatever_came_before():
    config = quick_config(num_epochs=2, seed=5)
    torch.manual_seed(1)
    first = train_compute(kernels(), config)
    before = torch.random.get_rng_state()
    threads = torch.get_num_threads()
    second = train_compute(kernels(), config)
    assert torch.equal(before, torch.random.get_rng_state())
    assert torch.get_num_threads() == threads
    for name, value in first.state_dict().items():
        assert torch.equal(value, second.state_dict()[name]), name
    other = train_compute(kernels(), quick_config(num_epochs=2, seed=6))
    assert not torch.equal(first.embed[0].weight, other.embed[0].weight)


def test_before_training_it_is_the_linear_model():
    """One epoch at learning rate 0 keeps the start: the linear fit times factors near 1."""
    network = train_compute(kernels(), quick_config(num_epochs=1, learning_rate=0.0))
    test = kernels().split("test")
    ratio = predict_ms(network, test) / linear(kernels().split("train"))(test)
    assert np.all(np.abs(ratio - 1) < 0.2)


def test_factors_stay_within_their_limits():
    network = trained().network
    assert isinstance(network, AdditiveNet)
    low, high = network.phi_limits
    assert torch.all(low <= high)
    assert torch.all(low >= 0.6)
    assert torch.all(high <= 1.6)
    wild = torch.randn(1000, network.interaction + 7) * 100
    factor = network.phi(wild)
    assert torch.all((factor >= low) & (factor <= high))
    # A shard's own cost stays within a factor 3 of its physical part, whatever the features.
    features = torch.rand(500, len(network.normalise.mean) + len(WORK_FEATURES)) * 1e4
    own = network.encode(features)[:, :6].reshape(500, 2, 3).sum(dim=2)
    work = features[:, : len(WORK_FEATURES)] / network.work_scale
    weighted = work * torch.nn.functional.softplus(network.raw_work_K)
    of_phase = torch.tensor(WORK_OF_PHASE, dtype=torch.float32)
    physical = weighted @ of_phase + torch.nn.functional.softplus(network.raw_shard_P)
    assert torch.all((own <= physical * 3.0001) & (own >= physical / 3.0001))
    exchange = trained().collective
    factors = exchange.factor_of(torch.rand(1000, 4) * 1e9)
    assert torch.all((factors >= exchange.limits[0]) & (factors <= exchange.limits[1]))


def test_more_of_the_same_costs_more():
    """Twice the shards cost at least 2·φ_min/φ_max of the sum's part of the cost."""
    network = trained().network
    shard = network.encode(torch.tensor(kernels().features_SF[:1], dtype=torch.float32))
    counts = torch.tensor([[float(2**k)] for k in range(1, 8)])
    cost = network.compute(shard * counts, counts)
    assert torch.all(cost[1:] > cost[:-1] * 1.15)


def test_the_loss_is_zero_only_for_the_truth_and_symmetric_in_the_logarithm():
    truth = torch.tensor([[1.0, 10.0], [3.0, 3.0]])
    assert relative_loss(truth, truth) == 0
    assert relative_loss(truth * 2, truth) == pytest.approx(float(relative_loss(truth / 2, truth)))


def test_inverse_softplus():
    values = np.array([1e-6, 1e-3, 1.0, 50.0, 1e4])
    back = torch.nn.functional.softplus(inverse_softplus(values))
    np.testing.assert_allclose(back.numpy(), values, rtol=1e-4)


def test_the_record_of_a_training_is_complete():
    out_dir = model_folder().parent
    errors = json.loads((out_dir / ERRORS_FILE).read_text())
    assert errors == json.loads(json.dumps(trained().errors))
    assert set(errors["splits"]) == set(SPLITS)
    frame = pd.read_parquet(out_dir / PREDICTIONS_FILE)
    assert frame.groupby("kind").size().to_dict() == {
        "bwd": kernels().num_sets,
        "collective": 150,
        "fwd": kernels().num_sets,
    }
    assert (frame[["measured_ms", "predicted_ms"]] > 0).all().all()
    exchanges = frame[frame["kind"] == "collective"]
    assert (exchanges["split"] == "test").sum() == measurements().collectives.test_M.sum()
    np.testing.assert_allclose(
        exchanges["predicted_ms"],
        predict_collective_ms(trained().collective, measurements().collectives),
    )


def test_what_cannot_be_trained_is_refused():
    data = kernels()
    for split in ("train", "validation"):
        with pytest.raises(InputError, match=f"belongs to the {split} split"):
            train_compute(data.of(data.split_N != split), quick_config())
    exchanges = measurements().collectives
    with pytest.raises(InputError, match="no measurements of all-to-alls"):
        train_collective(exchanges.of(np.zeros(150, dtype=bool)), quick_config())
    with pytest.raises(InputError, match=r"unknown option 'hiden'.*did you mean 'hidden'"):
        make_network("additive", {"hiden": 3})
    with pytest.raises(InputError, match="option hidden"):
        make_network("neuroshard", {"hidden": 0})
    for changes in ({"num_epochs": 0}, {"batch_size": 1.5}, {"learning_rate": -1.0}, {"seed": -1}):
        with pytest.raises(InputError, match=f"{next(iter(changes))} is not usable"):
            CostNetConfig(**changes)


def test_sum_networks_stay_finite_and_have_no_bound():
    for kind in ("autoshard", "neuroshard"):
        network = make_network(kind, {})
        assert network.bound_facts() is None
        cost = network.compute(torch.full((2, network.encoding_width), 1e30), torch.ones(2, 1))
        assert torch.all(torch.isfinite(cost) & (cost > 0))
    assert make_network("autoshard", {}).encoding_width == 32
    assert make_network("neuroshard", {}).encoding_width == 64  # a network for each phase
    with pytest.raises(InputError, match="option trunks"):
        make_network("neuroshard", {"trunks": 3})


def test_ranks_beyond_the_processors_take_turns():
    network = CollectiveNet(num_processors=2)
    mib = float(2**20)
    rows = torch.tensor([[2.0, mib, mib, 2 * mib], [8.0, 7 * mib, 7 * mib, 56 * mib]])
    # 1, turns beyond the first, messages, busiest rank, bytes in all: of two at once.
    expected = torch.tensor([[1.0, 0.0, 1.0, 1.0, 1.0], [1.0, 3.0, 28.0, 7.0, 28.0]])
    torch.testing.assert_close(network.terms(rows), expected)
    alone = CollectiveNet().terms(rows)
    torch.testing.assert_close(alone[:, 1], torch.zeros(2))
    torch.testing.assert_close(alone[:, 2], torch.tensor([1.0, 7.0]))


def test_a_collective_of_equal_traffic_costs_more_bytes_more_time():
    network: CollectiveNet = trained().collective
    sizes = torch.logspace(3, 9, 13)
    rows = torch.stack([torch.full_like(sizes, 4.0), sizes, sizes, 4 * sizes], dim=1)
    cost = network(rows)
    assert torch.all(cost[1:] > cost[:-1] * 0.97)
    assert cost[-1] > 100 * cost[0]
