"""Reads the real embedding lookups of facebookresearch/dlrm_datasets.

A file (`.pt`, or `.pt.gz` as published) is a `torch.save` of `(indices, offsets,
lengths)`: `lengths` is [tables, samples], `offsets` has tables · samples + 1 entries, and
the ids of table t are `indices[offsets[t · samples] : offsets[(t + 1) · samples]]`. The
reader checks all of that, then measures what the planner needs of each table. As in
AutoShard, DreamShard and NeuroShard, a table has as many rows as its largest id + 1, at
least 100, and its dimension is given or drawn at random.
"""

from __future__ import annotations

import gzip
import io
import pickle
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from autoshard.distributions import sample_ids
from autoshard.errors import InputError, quoted
from autoshard.files import write_atomically
from autoshard.tables import BagLengths, Table, check_tables
from autoshard.workloads.batches import sample_lengths
from autoshard.workloads.dlrm_tables import MIN_NUM_EMBEDDINGS, NEUROSHARD_DIMS, draw_dims
from autoshard.workloads.registry import register_workload
from autoshard.workloads.reuse_counts import measured_distribution

if TYPE_CHECKING:
    import torch

IntArray = NDArray[np.int64]

SUFFIXES = (".pt", ".pt.gz")
_REMEDY = "download the file again with Git LFS from facebookresearch/dlrm_datasets"


@dataclass(frozen=True, kw_only=True)
class DlrmDataset:
    """The lookups of T tables in one batch of B samples."""

    indices: IntArray
    """Ids of all tables, one table after the other, int64 [L]."""
    lengths: IntArray
    """Ids per table and sample, int64 [T, B]."""
    table_offsets: IntArray
    """Where the ids of each table start, and the end, int64 [T + 1]."""

    @property
    def num_tables(self) -> int:
        """How many tables the file holds."""
        return int(self.lengths.shape[0])

    @property
    def num_samples(self) -> int:
        """How many samples were recorded."""
        return int(self.lengths.shape[1])

    def table_ids(self, index: int) -> IntArray:
        """The ids of table `index` in sample order; a view."""
        return self.indices[self.table_offsets[index] : self.table_offsets[index + 1]]


def read_dlrm_dataset(path: str | Path) -> DlrmDataset:
    """Read and check one file.

    Args:
        path: a file that ends in .pt or .pt.gz. Nothing in it is executed.

    Raises:
        InputError: the file cannot be read, or its parts do not fit together.
    """
    path = Path(path)
    where = f"dataset {path}"
    content = _load(path)
    if not isinstance(content, tuple | list) or len(content) != 3:
        raise InputError(
            f"{where} does not hold three tensors",
            got=_describe(content),
            allowed="(indices, offsets, lengths)",
        )
    indices = _whole_numbers(content[0], f"{where}: indices", 1)
    offsets = _whole_numbers(content[1], f"{where}: offsets", 1)
    lengths = _whole_numbers(content[2], f"{where}: lengths", 2)
    num_tables, num_samples = lengths.shape
    if not num_tables or not num_samples:
        raise InputError(f"{where}: lengths is empty", got=f"shape {list(lengths.shape)}")
    if lengths.min() < 0:
        row, sample = divmod(int(lengths.argmin()), num_samples)
        raise InputError(
            f"{where}: table {row}, sample {sample} has a negative length", got=lengths.min()
        )
    if offsets.size != num_tables * num_samples + 1:
        raise InputError(
            f"{where}: offsets does not fit lengths of shape {[num_tables, num_samples]}",
            got=f"{offsets.size} offsets",
            allowed=f"tables · samples + 1 = {num_tables * num_samples + 1}",
        )
    expected = np.concatenate([[0], np.cumsum(lengths.ravel())])
    if np.any(wrong := offsets != expected):
        bag = max(int(np.argmax(wrong)) - 1, 0)
        raise InputError(
            f"{where}: offsets and lengths disagree at table {bag // num_samples}, "
            f"sample {bag % num_samples}",
            got=f"offset {offsets[np.argmax(wrong)]}",
            allowed=f"the running sum of the lengths, {expected[np.argmax(wrong)]}",
        )
    if indices.size != expected[-1]:
        raise InputError(
            f"{where}: the lengths add up to something else than the number of indices",
            got=f"{indices.size} indices",
            allowed=f"{expected[-1]}",
        )
    table_offsets = expected[::num_samples].astype(np.int64)
    if indices.size and indices.min() < 0:
        position = int(indices.argmin())
        table = int(np.searchsorted(table_offsets, position, side="right")) - 1
        raise InputError(f"{where}: table {table} has a negative id", got=indices[position])
    return DlrmDataset(indices=indices, lengths=lengths, table_offsets=table_offsets)


def dlrm_dataset_tables(
    dataset: DlrmDataset,
    *,
    dims: Sequence[int] = NEUROSHARD_DIMS,
    embedding_dims: Sequence[int] | None = None,
    seed: int = 0,
) -> tuple[Table, ...]:
    """Measure the tables of a dataset: rows, pooling factor and reuse.

    Args:
        dataset: as read from a file.
        dims: dimensions to draw from, evenly, unless `embedding_dims` is given.
        embedding_dims: the dimension of each table, [num_tables].
        seed: of the drawn dimensions.

    Returns:
        Tables named `table_0`, …; one without lookups has pooling factor 0 and 100 rows.

    Raises:
        InputError: the dimensions are not usable.
    """
    if embedding_dims is None:
        columns = draw_dims(dataset.num_tables, dims, seed)
    elif len(embedding_dims) != dataset.num_tables:
        raise InputError(
            "embedding_dims does not fit the dataset",
            got=f"{len(embedding_dims)} dimensions",
            allowed=f"{dataset.num_tables}, one per table",
        )
    else:
        columns = np.array(embedding_dims)
    tables = []
    for index in range(dataset.num_tables):
        ids = dataset.table_ids(index)
        rows = max(int(ids.max()) + 1 if ids.size else 0, MIN_NUM_EMBEDDINGS)
        spread = int(np.ptp(dataset.lengths[index]))
        _, counts = np.unique(ids, return_counts=True)
        tables.append(
            Table(
                name=f"table_{index}",
                num_embeddings=rows,
                embedding_dim=int(columns[index]),
                pooling_factor=ids.size / dataset.num_samples,
                ids=measured_distribution(counts),
                bag_lengths=BagLengths.CONSTANT if spread <= 1 else BagLengths.POISSON,
            )
        )
    return tuple(tables)


@register_workload("dlrm_dataset")
def dlrm_file_tables(
    path: str | Path,
    *,
    dims: Sequence[int] = NEUROSHARD_DIMS,
    embedding_dims: Sequence[int] | None = None,
    seed: int = 0,
) -> tuple[Table, ...]:
    """Read a file and measure its tables: see `read_dlrm_dataset`, `dlrm_dataset_tables`."""
    return dlrm_dataset_tables(
        read_dlrm_dataset(path), dims=dims, embedding_dims=embedding_dims, seed=seed
    )


def make_dlrm_dataset(tables: Sequence[Table], num_samples: int, *, seed: int) -> DlrmDataset:
    """Draw a synthetic dataset from tables with one feature each, for trying things out.

    Raises:
        InputError: no tables, a table with several features, or `num_samples` below 1.
    """
    tables = check_tables(tables)
    if num_samples < 1:
        raise InputError("num_samples is out of range", got=num_samples, allowed="integers >= 1")
    generator = np.random.default_rng(seed)
    lengths, indices = [], []
    for table in tables:
        if table.num_features != 1:
            raise InputError(
                f"table {table.name!r} has {table.num_features} features", allowed="one"
            )
        lengths.append(sample_lengths(table, num_samples, generator)[0])
        num_ids = int(lengths[-1].sum())
        indices.append(sample_ids(table.ids, table.num_embeddings, num_ids, generator))
    totals = [ids.size for ids in indices]
    return DlrmDataset(
        indices=np.concatenate(indices),
        lengths=np.stack(lengths),
        table_offsets=np.concatenate([[0], np.cumsum(totals)]).astype(np.int64),
    )


def write_dlrm_dataset(path: str | Path, dataset: DlrmDataset) -> None:
    """Write a dataset in the published format, atomically.

    Raises:
        InputError: the path ends in something else than .pt or .pt.gz.
    """
    import torch

    path = Path(path)
    compress = _is_compressed(path)
    offsets = np.concatenate([[0], np.cumsum(dataset.lengths.ravel())])
    content = tuple(
        torch.from_numpy(np.ascontiguousarray(array))
        for array in (dataset.indices, offsets, dataset.lengths)
    )

    def write(temporary: Path) -> None:
        if compress:
            buffer = io.BytesIO()
            torch.save(content, buffer)
            temporary.write_bytes(gzip.compress(buffer.getbuffer(), compresslevel=1))
        else:
            torch.save(content, temporary)

    write_atomically(path, write)


def _is_compressed(path: Path) -> bool:
    name = path.name.lower()
    if not name.endswith(SUFFIXES):
        raise InputError(f"the kind of dataset {path} is not known", allowed=", ".join(SUFFIXES))
    return name.endswith(".gz")


def _load(path: Path) -> Any:
    import torch

    compressed = _is_compressed(path)
    try:
        with path.open("rb") as stream:
            if stream.read(40).startswith(b"version https://git-lfs"):
                raise InputError(f"dataset {path} is only a Git LFS pointer", remedy=_REMEDY)
        if not compressed:
            return torch.load(path, map_location="cpu", weights_only=True)
        with gzip.open(path, "rb") as stream:  # slow to seek in, and torch seeks
            return torch.load(io.BytesIO(stream.read()), map_location="cpu", weights_only=True)
    except FileNotFoundError as error:
        raise InputError(f"dataset {path} does not exist", remedy="check the path") from error
    except (InputError, MemoryError):
        raise
    except pickle.UnpicklingError as error:
        raise InputError(
            f"dataset {path} holds something else than tensors",
            got=_first_line(error),
            allowed="(indices, offsets, lengths), saved with torch.save",
        ) from error
    except Exception as error:  # a damaged stream makes the unpickler fail in any way
        raise InputError(
            f"dataset {path} cannot be read", got=_first_line(error), remedy=_REMEDY
        ) from error


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def _whole_numbers(tensor: Any, what: str, num_dims: int) -> IntArray:
    import torch

    whole = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
    if not isinstance(tensor, torch.Tensor) or tensor.is_sparse or tensor.dtype not in whole:
        raise InputError(f"{what} is not a tensor of integers", got=_describe(tensor))
    if tensor.dim() != num_dims:
        raise InputError(
            f"{what} has {tensor.dim()} dimensions",
            got=f"shape {list(tensor.shape)}",
            allowed=f"{num_dims}",
        )
    array: IntArray = tensor.to(torch.int64).numpy()
    return array


def _describe(value: torch.Tensor | Any) -> str:
    if hasattr(value, "dtype"):
        return f"a tensor of {value.dtype}"
    return f"{type(value).__name__} of {len(value)}" if hasattr(value, "__len__") else quoted(value)
