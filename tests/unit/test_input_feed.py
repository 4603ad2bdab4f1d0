"""Sources of batches: what is counted, what is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from autoshard.errors import InputError
from autoshard.runtime.batch import JaggedBatch
from autoshard.runtime.dense import TrainingBatch
from autoshard.runtime.input_feed import BatchSource

BATCH = TrainingBatch(JaggedBatch.from_bags({"f": [[1]]}), torch.zeros(1))


class Sized:
    """Knows its length; its iterators do not."""

    def __len__(self) -> int:
        return 5

    def __iter__(self) -> Iterator[TrainingBatch]:
        return (BATCH for _ in range(5))


class SizedIterator(Sized):
    """An iterator whose length does not shrink, like a DataLoader's."""

    def __init__(self) -> None:
        self.left = 5

    def __iter__(self) -> Iterator[TrainingBatch]:
        return self

    def __next__(self) -> TrainingBatch:
        if not self.left:
            raise StopIteration
        self.left -= 1
        return BATCH


def partly_used() -> Iterator[TrainingBatch]:
    iterator = iter([BATCH] * 7)
    next(iterator)
    next(iterator)
    return iterator


@pytest.mark.parametrize(
    ("batches", "unused"),
    [
        ([BATCH] * 5, (3, True)),
        (Sized(), (3, True)),
        (partly_used(), (3, True)),
        ((BATCH for _ in range(5)), (1, False)),  # only the one taken in vain is known
        (SizedIterator(), (1, False)),
    ],
    ids=["list", "sized", "partly used", "generator", "sized iterator"],
)
def test_unused_batches_are_counted(batches: object, unused: tuple[int, bool]) -> None:
    source = BatchSource(batches)  # type: ignore[arg-type]
    source.open()
    # Two steps ran; a third batch was taken before another rank's end was known.
    assert [source.take() for _ in range(3)] == [BATCH] * 3
    assert source.num_unused(2) == unused
    assert not source.is_exhausted
    assert [source.take() for _ in range(3)] == [BATCH, BATCH, None]
    assert source.is_exhausted
    assert source.num_unused(4) == (1, True)


def test_nothing_is_touched_before_it_is_opened() -> None:
    source = BatchSource(3)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="batches are not iterable; got: int"):
        source.open()


@pytest.mark.parametrize("item", [None, "text", BATCH.sparse])
def test_other_things_than_batches_are_refused(item: object) -> None:
    source = BatchSource([BATCH, item])  # type: ignore[list-item]
    source.open()
    source.take()
    with pytest.raises(InputError, match="item 2 of the batches is not a batch"):
        source.take()


def test_a_batch_stays_where_it_is() -> None:
    assert BATCH.to(torch.device("cpu")) is BATCH
