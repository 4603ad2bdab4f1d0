"""The runtime's parts that need no processes: batches, ids, layout, capabilities, timings."""

from __future__ import annotations

import json
import subprocess
import sys
from math import inf, nan
from typing import Any

import numpy as np
import pytest
import torch

from autoshard.errors import InputError, PlanError, UnsupportedError
from autoshard.plan import ShardingPlan, plan_from_slices
from autoshard.problem import Optimizer, ShardingProblem, TrainingConfig
from autoshard.runtime.batch import JaggedBatch
from autoshard.runtime.capabilities import (
    CAPABILITIES,
    Device,
    check_plan_supported,
    find_capability,
    parse_device,
)
from autoshard.runtime.collectives import Collectives, Parcel
from autoshard.runtime.data import SyntheticBatches, draw_batch
from autoshard.runtime.dense import TrainingBatch
from autoshard.runtime.embeddings import ShardedEmbeddings
from autoshard.runtime.ids import EntryGather, IdsMode, parse_ids_mode
from autoshard.runtime.initialization import initialize_rows
from autoshard.runtime.layout import layout_of
from autoshard.runtime.results import RunOptions
from autoshard.runtime.timing import Phase, StepRecord, combine_records
from autoshard.shards import ShardingType, ShardSlice
from autoshard.tables import DataType, Table
from autoshard.topology import GIB, Topology

CPU = torch.device("cpu")


def table(name: str, rows: int = 10, dim: int = 4, **more: object) -> Table:
    return Table(
        name=name,
        num_embeddings=rows,
        embedding_dim=dim,
        pooling_factor=2,
        **more,  # type: ignore[arg-type]
    )


def plan_of(
    tables: list[Table],
    kind: ShardingType = ShardingType.TABLE_WISE,
    optimizer: Optimizer = Optimizer.SGD,
) -> ShardingPlan:
    problem = ShardingProblem(
        tables=tuple(tables),
        topology=Topology.uniform(1, GIB),
        training=TrainingConfig(batch_size=4, optimizer=optimizer),
    )
    return plan_from_slices(problem, [(ShardSlice.whole(t, kind), 0) for t in tables])


class TestJaggedBatch:
    def test_integer_types_become_int64(self) -> None:
        batch = JaggedBatch(
            ("a",),
            torch.tensor([[1, 2]], dtype=torch.int32),
            torch.tensor([4, 5, 6], dtype=torch.int32),
        )
        assert batch.lengths_FB.dtype == batch.values_L.dtype == torch.int64
        assert (batch.batch_size, batch.num_ids) == (2, 3)

    @pytest.mark.parametrize(
        ("names", "lengths", "values", "weights", "message"),
        [
            (("a", "a"), [[1], [0]], [1], None, "names a feature twice; got: a"),
            (("a", "b"), [[1]], [1], None, "one row per feature"),
            (("a", "b"), [[1], [-1]], [], None, "feature 'b': the length of bag 0 is negative"),
            (("a", "b"), [[1], [2]], [1, 2], None, "3 from lengths \\(a: 1, b: 2\\), 2 ids"),
            (("a",), [[1.0]], [1], None, "lengths are not whole numbers"),
            (("a",), [[1]], [1.5], None, "ids are not whole numbers"),
            (("a",), [[1]], [[1]], None, "ids are not a flat list"),
            (("a",), [[2]], [1, 2], [1.0], "weights do not match the ids"),
            (("a",), [[1]], [1], [True], "weights are not real numbers; got: torch.bool"),
            (("a",), [[1]], [1], [1j], "weights are not real numbers; got: torch.complex64"),
            (("a", "b"), [[2], [2]], [5, 6, 7, 8], [1, 1, inf, 1], "'b': .* finite; got: inf .* 7"),
            (("a", "b"), [[1], [0]], [5], [nan], "'a': a weight is not finite; got: nan for id 5"),
        ],
    )
    def test_malformed_input_is_named(
        self, names: tuple[str, ...], lengths: list, values: list, weights: list, message: str
    ) -> None:
        def tensor(given: list) -> torch.Tensor:
            return torch.tensor(given) if given else torch.zeros(0, dtype=torch.int64)

        with pytest.raises(InputError, match=message):
            JaggedBatch(
                names,
                tensor(lengths),
                tensor(values),
                None if weights is None else torch.tensor(weights),
            )

    @pytest.mark.parametrize(
        "lengths_FB",
        [
            [[2**63 - 1, 2**63 - 1, 5]],
            [[2**62], [2**62], [2**62], [2**62 + 3]],
            [[2**63 - 1, 1], [2**63 - 1, 4]],
        ],
        ids=("in one feature", "over features", "in both"),
    )
    def test_lengths_whose_sum_wraps_to_the_number_of_ids_are_refused(
        self, lengths_FB: list[list[int]]
    ) -> None:
        """A kernel would read as far beyond the ids as these lengths say."""
        lengths = torch.tensor(lengths_FB)
        assert int(lengths.sum()) == 3
        with pytest.raises(InputError, match="lengths do not sum to the number of ids"):
            JaggedBatch(tuple("abcd"[: len(lengths_FB)]), lengths, torch.arange(3))

    @pytest.mark.parametrize(
        ("lengths", "values", "weights", "message"),
        [
            ([[1]], torch.tensor([1]), None, "lengths are not a tensor; got: list"),
            (torch.tensor([[1]]), [1], None, "ids are not a tensor; got: list"),
            (torch.tensor([[1]]), torch.tensor([1]), [0.5], "weights are not a tensor; got: list"),
            (
                torch.tensor([[1]]),
                torch.tensor([1]),
                torch.ones(1, device="meta"),
                "a batch lies on several devices; got: cpu, meta",
            ),
        ],
    )
    def test_what_is_no_tensor_or_elsewhere_is_refused(
        self, lengths: object, values: object, weights: object, message: str
    ) -> None:
        with pytest.raises(InputError, match=message):
            JaggedBatch(("a",), lengths, values, weights)  # type: ignore[arg-type]

    @pytest.mark.parametrize(
        ("bags", "weights", "message"),
        [
            ({"a": ["12", "3"]}, None, "feature 'a': samples are not lists"),
            ({"a": "12"}, None, "feature 'a': samples are not lists"),
            ({"a": [1, 2]}, None, "feature 'a': samples are not lists"),
            ({"a": 5}, None, "feature 'a': samples are not lists; got: 5"),
            ({"a": [["x"]]}, None, "feature 'a': an id is not a whole number"),
            ({"a": [[1.7]]}, None, "feature 'a': an id is not a whole number.*; got: 1.7"),
            ({"a": [[True]]}, None, "feature 'a': an id is not a whole number.*; got: True"),
            ({"a": [[2**70]]}, None, "feature 'a': an id is not a whole number of 64 bits"),
            ({"a": [[1]]}, {"b": [[1.0]]}, "not in the batch; got: b; allowed: a"),
            ({"a": [[1]]}, {"a": [1.0]}, "weights of feature 'a': samples are not lists"),
            ({"a": [[1]]}, {"a": [["1"]]}, "weights of feature 'a' are not numbers; got: '1'"),
            ({"a": [[1]]}, {"a": [[1j]]}, "weights of feature 'a' are not numbers; got: 1j"),
            ({"a": [[1]]}, {"a": [[1.0, 2.0]]}, "feature 'a': weights do not match the ids"),
            ({"a": [[1]]}, {"a": [[nan]]}, "feature 'a': a weight is not finite"),
            ({"a": [[1]]}, {"a": [[1e39]]}, "feature 'a': a weight is not finite"),
        ],
    )
    def test_malformed_bags_are_named(self, bags: Any, weights: Any, message: str) -> None:
        with pytest.raises(InputError, match=message):
            JaggedBatch.from_bags(bags, weights)

    def test_bags_may_be_tensors_and_arrays(self) -> None:
        bags = {"a": torch.tensor([[1, 2], [3, 4]]), "b": np.array([[5], [6]])}
        batch = JaggedBatch.from_bags(bags)  # type: ignore[arg-type]
        assert batch.lengths_FB.tolist() == [[2, 2], [1, 1]]
        assert batch.values_L.tolist() == [1, 2, 3, 4, 5, 6]

    def test_bags_are_laid_feature_major(self) -> None:
        batch = JaggedBatch.from_bags({"a": [[1], []], "b": [[2, 3], [4]]}, {"b": [[0.5, 2], [3]]})
        assert batch.lengths_FB.tolist() == [[1, 0], [2, 1]]
        assert batch.values_L.tolist() == [1, 2, 3, 4]
        assert batch.weights_L is not None
        assert batch.weights_L.tolist() == [1, 0.5, 2, 3]
        with pytest.raises(InputError, match="differ in their number of samples"):
            JaggedBatch.from_bags({"a": [[1]], "b": []})


class TestTrainingBatch:
    sparse = JaggedBatch.from_bags({"a": [[1], [2]]})

    @pytest.mark.parametrize(
        ("sparse", "labels", "dense", "message"),
        [
            ({"a": [[1], [2]]}, torch.zeros(2), None, "the sparse part .*; got: dict"),
            (sparse, [0.0, 1.0], None, "labels are not a tensor; got: list"),
            (sparse, torch.zeros(2), [[1.0], [2.0]], "numeric features are not a tensor"),
            (sparse, torch.zeros(3), None, "labels do not match the batch"),
        ],
    )
    def test_malformed_input_is_named(
        self, sparse: Any, labels: Any, dense: Any, message: str
    ) -> None:
        with pytest.raises(InputError, match=message):
            TrainingBatch(sparse, labels, dense)


class TestIds:
    tables = (table("a", 5, feature_names=("f",)), table("b", 3, feature_names=("f", "g")))
    batch = JaggedBatch.from_bags({"g": [[2], [7]], "f": [[4, 0], [1]], "extra": [[9], []]})

    def gather(self, mode: IdsMode) -> EntryGather:
        return EntryGather(layout_of(plan_of(list(self.tables))).entries, mode)

    def test_each_table_has_its_own_range(self) -> None:
        gathered = self.gather(IdsMode.WARNING)(self.batch)
        assert [v.tolist() for v in gathered.values] == [[4, 0, 1], [0, 0, 1], [2, 0]]
        assert gathered.lengths_EB.tolist() == [[2, 1], [2, 1], [1, 1]]
        assert gathered.num_out_of_range == 2
        assert self.batch.values_L.tolist() == [2, 7, 4, 0, 1, 9]  # the user's batch is as it was

    def test_the_last_row_is_in_range_and_the_next_is_not(self) -> None:
        batch = JaggedBatch.from_bags({"f": [[2]], "g": [[2, 3]]})
        bad = self.gather(IdsMode.FATAL)(batch).bad_id
        assert bad is not None
        assert (bad.entry, bad.value) == (2, 3)

    def test_negative_ids_are_out_of_range(self) -> None:
        """Alone: every id below the smallest table's rows, none too large."""
        batch = JaggedBatch.from_bags({"f": [[2]], "g": [[1, -1]]})
        gathered = self.gather(IdsMode.FATAL)(batch)
        assert gathered.bad_id is not None
        assert (gathered.bad_id.entry, gathered.bad_id.value) == (2, -1)
        assert gathered.num_out_of_range == 1

    @pytest.mark.parametrize("names", [("f", "g"), ("g", "f")])
    def test_a_loader_may_refill_its_tensors_at_once(self, names: tuple[str, str]) -> None:
        """The backward reads the lengths again; the loader's are another batch's by then."""
        entries = layout_of(plan_of([table("a", 5, feature_names=("f", "g"))])).entries
        lengths = torch.tensor([[2, 1], [1, 1]])
        batch = JaggedBatch(names, lengths, torch.tensor([0, 1, 2, 3, 4]))
        gathered = EntryGather(entries, IdsMode.FATAL)(batch)
        before = gathered.lengths_EB.tolist()
        lengths.fill_(7)
        assert gathered.lengths_EB.tolist() == before

    def test_fatal_mode_tells_the_first(self) -> None:
        bad = self.gather(IdsMode.FATAL)(self.batch).bad_id
        assert bad is not None
        assert (bad.entry, bad.value) == (1, 4)

    def test_ignored_ids_are_not_counted(self) -> None:
        assert self.gather(IdsMode.IGNORE)(self.batch).num_out_of_range == 0

    def test_weights_must_be_there_where_they_are_needed(self) -> None:
        entries = layout_of(plan_of([table("w", feature_names=("f",), weighted=True)])).entries
        with pytest.raises(InputError, match="carries no weights"):
            EntryGather(entries, IdsMode.FATAL)(self.batch)

    @pytest.mark.parametrize("num_samples", [0, 3])
    def test_without_ids_no_weights_are_needed(self, num_samples: int) -> None:
        entries = layout_of(plan_of([table("w", feature_names=("f",), weighted=True)])).entries
        batch = JaggedBatch.from_bags({"f": [[]] * num_samples})
        (weights,) = EntryGather(entries, IdsMode.FATAL)(batch).weights or []
        assert weights.dtype is torch.float32
        assert weights.tolist() == []

    def test_unknown_modes_and_devices_are_refused(self) -> None:
        with pytest.raises(InputError, match="fatal, warning, ignore"):
            parse_ids_mode("quiet")
        with pytest.raises(InputError, match="cpu, cuda"):
            parse_device("tpu")


class TestLayout:
    def test_shared_features_get_their_tables_name(self) -> None:
        layout = layout_of(
            plan_of([table("a", feature_names=("f",)), table("b", feature_names=("f", "g"))])
        )
        assert list(layout.output_dims) == ["f@a", "f@b", "g"]
        assert layout.features == ("f", "g")

    def test_two_outputs_of_one_name_are_refused(self) -> None:
        with pytest.raises(PlanError, match="same name"):
            layout_of(
                plan_of(
                    [
                        table("a", feature_names=("f",)),
                        table("b", feature_names=("f",)),
                        table("c", feature_names=("f@a",)),
                    ]
                )
            )

    def test_the_signature_tells_placements_apart(self) -> None:
        tables = [table("a"), table("b")]
        kinds = (ShardingType.TABLE_WISE, ShardingType.DATA_PARALLEL)
        first, second = (layout_of(plan_of(tables, kind)).signature for kind in kinds)
        assert first != second
        assert first == layout_of(plan_of(tables)).signature


class TestCapabilities:
    @pytest.mark.parametrize(
        ("plan", "message"),
        [
            (plan_of([table("a")], optimizer=Optimizer.ADAM), "got: adam; allowed: sgd"),
            (plan_of([table("a", data_type=DataType.BF16)]), "got: bf16: a; allowed: fp32, fp16"),
        ],
    )
    def test_other_combinations_are_refused(self, plan: ShardingPlan, message: str) -> None:
        with pytest.raises(UnsupportedError, match=message):
            check_plan_supported(plan)

    def test_every_row_is_found_and_every_cpu_row_builds(self) -> None:
        for row in CAPABILITIES:
            found = find_capability(
                device=row.device,
                optimizer=row.optimizer,
                data_type=row.data_type,
                sharding_type=row.sharding_type,
                embedding_dim=5,
            )
            assert found is row
            assert row.seen_running is (row.device is Device.CPU)
            if row.device is Device.CPU:
                plan = plan_of(
                    [table("a", data_type=row.data_type)], row.sharding_type, row.optimizer
                )
                pooled = ShardedEmbeddings(plan, Collectives(0, 1, device=CPU))(
                    JaggedBatch.from_bags({"a": [[1, 2], []]})
                )
                pooled["a"].sum().backward()

    def test_wide_tables_run_on_cpu_only(self) -> None:
        def found(device: Device) -> bool:
            return (
                find_capability(
                    device=device,
                    optimizer=Optimizer.SGD,
                    data_type=DataType.FP32,
                    sharding_type=ShardingType.TABLE_WISE,
                    embedding_dim=4096,
                )
                is not None
            )

        assert found(Device.CPU)
        assert not found(Device.CUDA)

    def test_asking_needs_neither_torch_nor_fbgemm(self) -> None:
        code = (
            "import sys, autoshard.runtime.capabilities;"
            "print([m for m in ('torch', 'fbgemm_gpu') if m in sys.modules])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert done.stdout.strip() == "[]"


class TestTimings:
    @staticmethod
    def record(start: int, end: int, compute: tuple[int, int], ids: tuple[int, int]) -> StepRecord:
        return StepRecord(
            start * 10**6,
            end * 10**6,
            {"fwd_compute": compute[0] * 10**6, "bwd_compute": compute[1] * 10**6},
            {
                "ids": (ids[0] * 10**6, ids[1] * 10**6),
                "gradients": (80 * 10**6, (90 + ids[0]) * 10**6),
            },
        )

    def test_transfer_starts_with_the_last_arrival(self) -> None:
        # Rank 0 arrives at 10 ms and waits until 30 ms; the last rank leaves at 34 ms.
        ranks = [[self.record(0, 200, (5, 7), (10, 33))], [self.record(1, 190, (9, 3), (30, 34))]]
        timings = combine_records(ranks, oversubscribed=True)
        assert timings.transfer_ms_S[Phase.IDS].tolist() == [4]
        assert timings.wait_ms_SR[Phase.IDS].tolist() == [[20, 0]]
        cost = timings.cost()
        assert cost.fwd_compute_ms == (5, 9)
        assert cost.bwd_compute_ms == (7, 3)
        assert (cost.fwd_comms_ms, cost.bwd_comms_ms) == (4, 40)
        assert cost.step_ms == 9 + 4 + 40 + 7
        assert cost.oversubscribed
        assert timings.wall_ms == 200
        assert timings.other_ms == 200 - 60
        json.dumps(timings.to_json(), allow_nan=False)

    def test_clock_offsets_are_taken_off(self) -> None:
        ranks = [[self.record(0, 200, (5, 7), (10, 33))], [self.record(1, 190, (9, 3), (30, 34))]]
        timings = combine_records(ranks, clock_offsets_ns=[0, 20 * 10**6])
        assert timings.wait_ms_SR[Phase.IDS].tolist() == [[0, 0]]
        assert timings.transfer_ms_S[Phase.IDS].tolist() == [23]

    def test_terms_are_medians_over_steps(self) -> None:
        steps = [self.record(0, 100, (c, c), (10, 10 + c)) for c in (1, 50, 2)]
        timings = combine_records([steps])
        assert timings.cost().fwd_compute_ms == (2,)
        assert timings.cost().fwd_comms_ms == 2

    def test_no_steps_are_no_timings(self) -> None:
        with pytest.raises(InputError, match="no timings"):
            combine_records([[], []])


class TestData:
    def test_batches_repeat_for_a_seed_and_differ_by_rank(self) -> None:
        plan = plan_of([table("a", weighted=True), table("b", feature_names=("f", "g"))])

        def drawn(rank: int, seed: int) -> list[list[int]]:
            batches = SyntheticBatches(plan, rank=rank, num_batches=3, seed=seed, num_distinct=2)
            assert len(batches) == 3
            values = [batch.sparse.values_L.tolist() for batch in batches]
            assert values[0] == values[2] != values[1]
            return values

        assert drawn(0, 1) == drawn(0, 1)
        assert drawn(0, 1) != drawn(1, 1)
        assert drawn(0, 1) != drawn(0, 2)

    def test_shared_features_fit_the_smallest_table(self) -> None:
        tables = [
            table("large", 1000, feature_names=("f", "h")),
            table("small", 3, feature_names=("g", "f"), weighted=True),
        ]
        batch = draw_batch(tables, 64, np.random.default_rng(0)).sparse
        assert batch.feature_names == ("f", "h", "g")
        first = int(batch.lengths_FB[0].sum())
        assert int(batch.values_L[:first].max()) < 3
        assert int(batch.values_L[first:].max()) > 3
        assert batch.lengths_FB.sum().item() == 3 * 128


class TestSmallParts:
    def test_a_shard_draws_the_rows_that_it_holds(self) -> None:
        wide = table("a", 3000, 1024)  # three blocks
        whole = torch.empty(3000, 1024)
        initialize_rows(whole, wide, seed=1)
        part = torch.empty(1500, 7)
        initialize_rows(part, wide, seed=1, row_offset=900, col_offset=11)
        assert torch.equal(part, whole[900:2400, 11:18])
        assert whole.abs().max() <= 3000**-0.5
        assert not torch.equal(whole[:1024], whole[1024:2048])

    def test_a_world_of_one_talks_to_itself(self) -> None:
        alone = Collectives(0, 1, device=CPU)
        sent = torch.tensor([1, 2])
        (received,) = alone.exchange(Phase.IDS, torch.int64, [Parcel(sent, [2], [2])])
        assert received.joined() is sent
        assert alone.gather_objects("x", 3) == [3]

    def test_a_step_trains_once(self) -> None:
        embeddings = ShardedEmbeddings(plan_of([table("a")]), Collectives(0, 1, device=CPU))
        batch = JaggedBatch.from_bags({"a": [[1]]})
        step = embeddings.input_dist(batch)
        assert step is not None
        loss = embeddings.lookup(step)["a"].sum()
        with pytest.raises(InputError, match="only once"):
            embeddings.lookup(step)
        loss.backward(retain_graph=True)
        with pytest.raises(InputError, match="only once per step"):
            loss.backward()
        assert embeddings.input_dist(None) is None

    @pytest.mark.parametrize(
        "bad",
        [
            {"num_steps": 0},
            {"warmup_steps": -1},
            {"seed": -1},
            {"timeout_s": 0},
            {"timeout_s": float("nan")},
            {"hidden": (0,)},
            {"device": "tpu"},
            {"ids_mode": "x"},
            {"num_steps": True},
        ],
    )
    def test_options_are_checked(self, bad: dict) -> None:
        with pytest.raises(InputError):
            RunOptions(**bad)
