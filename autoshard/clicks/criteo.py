"""Criteo click logs: tab-separated lines, plain or gzipped, read as a stream.

A line is a label (0 or 1), 13 integer features and 26 categorical ones in hexadecimal, any
feature may be missing (Criteo Kaggle 2014 and Criteo Terabyte share the format). Features
are prepared as in facebookresearch/dlrm: a number x becomes log(1 + max(x, 0)), a missing
one 0; a category becomes the id "its value modulo the table's rows", a missing one counts
as value 0.

Every rank reads all lines and parses only those of its own share. A malformed line keeps
its place in the sequence, so that ranks agree on who reads what without parsing for each
other.

Shapes: B=samples of one rank.
"""

from __future__ import annotations

import gzip
import itertools
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np

from autoshard.clicks.batches import ClickBatch, ClickData, Share, check_features
from autoshard.errors import InputError
from autoshard.tables import Table

NAME = "criteo"
NUM_NUMERIC, NUM_CATEGORICAL = 13, 26
FEATURE_NAMES = tuple(f"cat_{index}" for index in range(NUM_CATEGORICAL))
MALFORMED = ("refuse", "skip")

#: A sample takes 120 to 350 bytes; a longer line is some other file.
_MAX_LINE_BYTES = 4096
_LINE = re.compile(rb"[01](?:\t(?:-?[0-9]{1,18})?){13}(?:\t(?:[0-9a-fA-F]{1,15})?){26}")
#: A line and its number, from 1.
_NumberedLine = tuple[int, bytes]


def criteo(
    path: str | Path,
    *,
    tables: Sequence[Table],
    evaluation_path: str | Path | None = None,
    holdout: int = 10,
    malformed: str = "refuse",
    shuffle: int = 0,
    seed: int = 0,
) -> ClickData:
    """Read click logs for the tables of a plan.

    Args:
        path: the log to train on; gzipped if it ends in .gz.
        tables: whose features are among `cat_0` … `cat_25`; ids are hashed into their rows.
        evaluation_path: the log to evaluate on. Without it, every `holdout`-th line of
            `path` is left out of training and evaluated on instead.
        holdout: >= 2.
        malformed: `refuse` stops at a line that is not a sample, with file and number;
            `skip` leaves it out of its batch and counts it.
        shuffle: shuffle the samples of every `shuffle` consecutive ones, in each epoch
            anew; 0 keeps the log's order.
        seed: of that.

    Raises:
        InputError: a file is missing or does not begin with a sample, or an option is not
            usable.
        PlanError: a table needs a feature that the format does not have.
    """
    if malformed not in MALFORMED:
        raise InputError("malformed is not known", got=malformed, allowed=", ".join(MALFORMED))
    if holdout < 2 or shuffle < 0:
        raise InputError(
            "the options of a click log are not usable",
            got=f"holdout {holdout}, shuffle {shuffle}",
            allowed="holdout >= 2 and shuffle >= 0",
        )
    check_features(tables, dict.fromkeys(FEATURE_NAMES, 1), NAME)
    modulus: dict[str, int] = {}
    for table in tables:
        for feature in table.feature_names:
            # What several tables look up has to exist in the smallest of them.
            rows = modulus.get(feature, table.num_embeddings)
            modulus[feature] = min(rows, table.num_embeddings)
    path = Path(path)
    separate = None if evaluation_path is None else Path(evaluation_path)
    for log in (path, separate):
        if log is not None:
            _check_first_line(log)
    skip = malformed == "skip"
    train = CriteoSplit(
        path, modulus, skip_malformed=skip, block_size=shuffle, seed=seed,
        every=None if separate else holdout, held_out=False,
    )  # fmt: skip
    evaluation = CriteoSplit(
        separate or path, modulus, skip_malformed=skip,
        every=None if separate else holdout, held_out=True,
    )  # fmt: skip
    held_out = f"evaluated on {separate}" if separate else f"one line in {holdout} held out"
    return ClickData(
        name=NAME,
        feature_names=tuple(modulus),
        num_numeric=NUM_NUMERIC,
        train=train,
        evaluation=evaluation,
        description=f"Criteo click log {path}, {held_out}",
    )


class CriteoSplit:
    """The lines of one log, or every n-th of them; see `ClickSplit`."""

    def __init__(
        self,
        path: Path,
        modulus: Mapping[str, int],
        *,
        skip_malformed: bool = False,
        block_size: int = 0,
        seed: int = 0,
        every: int | None = None,
        held_out: bool = False,
    ) -> None:
        """Describe the split; `read` opens the file.

        Args:
            path: the log.
            modulus: per feature to read, the rows that its values are hashed into.
            skip_malformed: leave malformed lines out instead of refusing them.
            block_size: lines that are shuffled together; 0 for none.
            seed: of the shuffling.
            every: which lines are held out: those whose number it divides; None for none.
            held_out: read the lines held out instead of the others.
        """
        self.num_samples: int | None = None
        self.num_malformed = 0
        """Lines of this rank that were left out so far."""
        self._path = path
        self._modulus = dict(modulus)
        self._columns = [1 + NUM_NUMERIC + FEATURE_NAMES.index(name) for name in modulus]
        self._skip_malformed = skip_malformed
        self._block_size = block_size
        self._seed = seed
        self._every = every
        self._held_out = held_out

    def read(
        self, share: Share, *, epoch: int = 0, first_step: int = 0, whole_steps: bool = True
    ) -> Iterator[ClickBatch]:
        """This rank's batches of one pass over the file; see `ClickSplit.read`.

        Raises:
            InputError: the file cannot be read, or a line of this rank's is malformed.
        """
        size = share.global_batch_size
        own = slice(share.rank * share.batch_size, (share.rank + 1) * share.batch_size)
        lines = itertools.islice(self._in_order(epoch), first_step * size, None)
        while step_lines := list(itertools.islice(lines, size)):
            if len(step_lines) < size and whole_steps:
                return
            yield self._parse(step_lines[own])

    def _in_order(self, epoch: int) -> Iterator[_NumberedLine]:
        lines = self._selected()
        if not self._block_size:
            yield from lines
            return
        for index in itertools.count():
            block = list(itertools.islice(lines, self._block_size))
            if not block:
                return
            order = np.random.default_rng([self._seed, epoch, index]).permutation(len(block))
            for position in order.tolist():
                yield block[position]

    def _selected(self) -> Iterator[_NumberedLine]:
        numbered = _numbered_lines(self._path)
        if self._every is None:
            return numbered
        every, held_out = self._every, self._held_out
        return (line for line in numbered if (line[0] % every == 0) == held_out)

    def _parse(self, lines: Sequence[_NumberedLine]) -> ClickBatch:
        rows: list[list[bytes]] = []
        for number, line in lines:
            if _LINE.fullmatch(line):
                rows.append(line.split(b"\t"))
            elif self._skip_malformed:
                self.num_malformed += 1
            else:
                raise _malformed(self._path, number, line)
        numeric_BN = np.array(
            [[int(cell or 0) for cell in row[1 : 1 + NUM_NUMERIC]] for row in rows],
            dtype=np.float64,
        ).reshape(len(rows), NUM_NUMERIC)
        values = [
            [int(row[column] or b"0", 16) % rows_of for row in rows]
            for column, rows_of in zip(self._columns, self._modulus.values(), strict=True)
        ]
        return ClickBatch(
            feature_names=tuple(self._modulus),
            lengths_FB=np.ones((len(self._columns), len(rows)), dtype=np.int64),
            values_L=np.array(values, dtype=np.int64).reshape(-1),
            labels_B=np.array([row[0] == b"1" for row in rows], dtype=np.float32),
            numeric_BN=np.log1p(np.maximum(numeric_BN, 0.0)).astype(np.float32),
        )


def _numbered_lines(path: Path) -> Iterator[_NumberedLine]:
    number = 0
    try:
        with _open(path) as stream:
            while line := stream.readline(_MAX_LINE_BYTES):
                number += 1
                yield number, line.rstrip(b"\r\n")
    except (OSError, EOFError, zlib.error) as error:
        raise InputError(
            f"click log {path} cannot be read beyond line {number}",
            got=getattr(error, "strerror", None) or str(error),
            remedy="check that the file is whole, and gzipped exactly if it ends in .gz",
        ) from error


def _open(path: Path) -> BinaryIO:
    if path.suffix == ".gz":
        return cast(BinaryIO, gzip.open(path, "rb"))
    return path.open("rb")


def _check_first_line(path: Path) -> None:
    """Refuse what is no click log before anything is built for it."""
    if path.is_dir():
        raise InputError(f"click log {path} is a folder", allowed="a file")
    lines = _numbered_lines(path)
    first = next(lines, None)
    if first is None:
        raise InputError(f"click log {path} is empty", allowed="at least one sample")
    if not _LINE.fullmatch(first[1]):
        raise _malformed(path, *first)


def _malformed(path: Path, number: int, line: bytes) -> InputError:
    cells = line.split(b"\t")
    if len(cells) != 1 + NUM_NUMERIC + NUM_CATEGORICAL:
        got = f"{len(cells)} cells"
    else:
        wrong = next(i for i, cell in enumerate(cells) if not _cell_fits(i, cell))
        got = f"cell {wrong + 1} is {cells[wrong][:40].decode('ascii', 'backslashreplace')!r}"
    return InputError(
        f"click log {path}, line {number}: not a sample",
        got=got,
        allowed=f"a label 0 or 1, {NUM_NUMERIC} integers and {NUM_CATEGORICAL} hexadecimal "
        "values, separated by tabs, each but the label may be missing",
        remedy="mend the line, or read with malformed=skip",
    )


def _cell_fits(index: int, cell: bytes) -> bool:
    if index == 0:
        pattern = rb"[01]"
    elif index <= NUM_NUMERIC:
        pattern = rb"(-?[0-9]{1,18})?"
    else:
        pattern = rb"([0-9a-fA-F]{1,15})?"
    return re.fullmatch(pattern, cell) is not None
