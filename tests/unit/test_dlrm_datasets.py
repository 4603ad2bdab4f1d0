"""The dlrm_datasets reader: a hand-made file, measured by hand, and every way to break it."""

from __future__ import annotations

import gzip

import numpy as np
import pytest
import torch

from autoshard.distributions import IdDistribution, expected_unique_rows, reuse_histogram
from autoshard.errors import InputError
from autoshard.tables import BagLengths, Table
from autoshard.workloads.dlrm_datasets import (
    dlrm_dataset_tables,
    make_dlrm_dataset,
    read_dlrm_dataset,
    write_dlrm_dataset,
)
from autoshard.workloads.registry import make_workload

# Three tables, four samples; the middle one has no lookups at all.
LENGTHS = torch.tensor([[2, 0, 3, 1], [0, 0, 0, 0], [1, 1, 1, 1]])
INDICES = torch.tensor([7, 7, 7, 299, 7, 3, 5, 5, 5, 0])
OFFSETS = torch.tensor([0, 2, 2, 5, 6, 6, 6, 6, 6, 7, 8, 9, 10])


def save(path, *content):
    torch.save(content, path)
    return path


@pytest.mark.parametrize("suffix", [".pt", ".pt.gz"])
def test_hand_made_file(tmp_path, suffix):
    path = save(tmp_path / "d.pt", INDICES, OFFSETS, LENGTHS)
    if suffix == ".pt.gz":
        packed = tmp_path / "d.pt.gz"
        packed.write_bytes(gzip.compress(path.read_bytes()))
        path = packed
    dataset = read_dlrm_dataset(path)
    assert (dataset.num_tables, dataset.num_samples) == (3, 4)
    assert dataset.table_ids(0).tolist() == [7, 7, 7, 299, 7, 3]
    assert dataset.table_ids(1).tolist() == []
    assert dataset.table_ids(2).tolist() == [5, 5, 5, 0]
    tables = dlrm_dataset_tables(dataset, embedding_dims=[4, 8, 16])
    assert [table.num_embeddings for table in tables] == [300, 100, 100]
    assert [table.embedding_dim for table in tables] == [4, 8, 16]
    assert [table.pooling_factor for table in tables] == [1.5, 0.0, 1.0]
    # Table 0: row 7 occurs 4 times, rows 299 and 3 once. Table 2: row 5 thrice, row 0 once.
    assert tables[0].ids == IdDistribution(bucket_rows=(1, 2), bucket_shares=(4 / 6, 2 / 6))
    assert tables[1].ids == IdDistribution()
    assert tables[2].ids == IdDistribution(bucket_rows=(1, 1), bucket_shares=(0.75, 0.25))
    assert [table.bag_lengths for table in tables] == [
        BagLengths.POISSON,
        BagLengths.CONSTANT,
        BagLengths.CONSTANT,
    ]
    assert make_workload("dlrm_dataset", path=path, embedding_dims=[4, 8, 16]) == tables


def test_int32_and_drawn_dims(tmp_path):
    path = save(tmp_path / "d.pt", INDICES.int(), OFFSETS.int(), LENGTHS.int())
    dataset = read_dlrm_dataset(path)
    drawn = [dlrm_dataset_tables(dataset, dims=(16, 32), seed=seed) for seed in (0, 0, 1, 2, 3)]
    assert drawn[0] == drawn[1]
    assert {table.embedding_dim for tables in drawn for table in tables} == {16, 32}


def test_measured_reuse_matches_the_source(tmp_path):
    law = IdDistribution(zipf_exponent=1.05, zipf_shift=10.0)
    source = Table(name="s", num_embeddings=50_000, embedding_dim=8, pooling_factor=12.5, ids=law)
    dataset = make_dlrm_dataset([source, source_named("empty", 0.0)], 8_000, seed=1)
    write_dlrm_dataset(tmp_path / "d.pt.gz", dataset)
    again = read_dlrm_dataset(tmp_path / "d.pt.gz")
    np.testing.assert_array_equal(again.indices, dataset.indices)
    np.testing.assert_array_equal(again.lengths, dataset.lengths)
    measured = dlrm_dataset_tables(again)[0]
    assert measured.pooling_factor == pytest.approx(12.5)
    # The rows are those that occurred, so a redraw of as many lookups misses some of them;
    # but where lookups fall by reuse is what was measured.
    _, expected = reuse_histogram(law, 50_000, 100_000)
    _, got = reuse_histogram(measured.ids, measured.num_embeddings, 100_000)
    np.testing.assert_allclose(np.cumsum(got), np.cumsum(expected), atol=0.08)
    unique = expected_unique_rows(law, 50_000, 100_000)
    assert sum(measured.ids.bucket_rows) == pytest.approx(unique, rel=0.02)


def source_named(name: str, pooling_factor: float) -> Table:
    return Table(name=name, num_embeddings=10, embedding_dim=4, pooling_factor=pooling_factor)


class Harmful:
    def __reduce__(self):
        return (print, ("run",))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ((INDICES, OFFSETS), "does not hold three tensors"),
        (({"a": 1},), "does not hold three tensors"),
        ((INDICES.float(), OFFSETS, LENGTHS), "indices is not a tensor of integers"),
        ((INDICES, [0, 1], LENGTHS), "offsets is not a tensor of integers"),
        ((INDICES, OFFSETS, LENGTHS.flatten()), "lengths has 1 dimensions"),
        ((INDICES[None], OFFSETS, LENGTHS), "indices has 2 dimensions"),
        ((INDICES, OFFSETS, LENGTHS[:0]), "lengths is empty"),
        ((INDICES, OFFSETS[:-1], LENGTHS), "13"),
        ((INDICES, OFFSETS + 1, LENGTHS), "table 0, sample 0"),
        ((INDICES, OFFSETS[[0, 1, 2, 4, 3, 5, 6, 7, 8, 9, 10, 11, 12]], LENGTHS), "sample 2"),
        ((INDICES[:-1], OFFSETS, LENGTHS), "9 indices"),
        ((torch.where(INDICES == 0, -5, INDICES), OFFSETS, LENGTHS), "table 2 has a negative id"),
        ((INDICES, OFFSETS, torch.where(LENGTHS == 3, -3, LENGTHS)), "table 0, sample 2 has a neg"),
        ((Harmful(),), "something else than tensors"),
    ],
)
def test_broken_content(tmp_path, content, words, capsys):
    path = save(tmp_path / "d.pt", *content)
    with pytest.raises(InputError, match=r"d\.pt") as caught:
        read_dlrm_dataset(path)
    assert words in str(caught.value)
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize(
    ("name", "raw", "words"),
    [
        ("d.pt", b"", "cannot be read"),
        ("d.pt", b"hello", ""),
        ("d.pt.gz", b"hello", "cannot be read"),
        ("d.pt.gz", gzip.compress(b"hello" * 100, mtime=0)[:20], "cannot be read"),
        ("d.pt.gz", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS"),
        ("d.bin", b"", "is not known"),
        ("d.gz", b"", "is not known"),
    ],
)
def test_broken_files(tmp_path, name, raw, words):
    (tmp_path / name).write_bytes(raw)
    with pytest.raises(InputError) as caught:
        read_dlrm_dataset(tmp_path / name)
    assert words in str(caught.value)
    assert name in str(caught.value)


def test_truncated_file(tmp_path):
    path = save(tmp_path / "d.pt", INDICES, OFFSETS, LENGTHS)
    path.write_bytes(path.read_bytes()[:-200])
    with pytest.raises(InputError, match="cannot be read"):
        read_dlrm_dataset(path)
    with pytest.raises(InputError, match="does not exist"):
        read_dlrm_dataset(tmp_path / "none.pt")
    (tmp_path / "folder.pt").mkdir()
    with pytest.raises(InputError, match="cannot be read"):
        read_dlrm_dataset(tmp_path / "folder.pt")


def test_bad_options():
    dataset = make_dlrm_dataset([source_named("a", 1.0)], 5, seed=0)
    with pytest.raises(InputError, match="embedding_dims does not fit"):
        dlrm_dataset_tables(dataset, embedding_dims=[4, 4])
    with pytest.raises(InputError, match="embedding_dim"):
        dlrm_dataset_tables(dataset, embedding_dims=[0])
    with pytest.raises(InputError, match="num_samples"):
        make_dlrm_dataset([source_named("a", 1.0)], 0, seed=0)
    with pytest.raises(InputError, match="2 features"):
        make_dlrm_dataset(
            [Table(name="a", num_embeddings=1, embedding_dim=1, pooling_factor=1,
                   feature_names=("x", "y"))], 5, seed=0)  # fmt: skip
