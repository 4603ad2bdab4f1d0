"""The data set as plain tables, for people who train without this project's classes.

`feature_table` gives one row per shard; `read_predictions` takes one row per shard set.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from numpy.typing import NDArray
from pandas.api.types import is_bool_dtype, is_integer_dtype, is_numeric_dtype

from autoshard.errors import InputError, listed
from autoshard.features import SHARD_FEATURES
from autoshard.measure.loading import load_kernel_measurements, row_features, row_slices
from cost_net.dataset import PHASES

#: Of a second measurement of the same set, where there is one.
_AGAIN = {f"{phase}_ms": f"{phase}_again_ms" for phase in PHASES}
SET_COLUMNS = ("protocol", "index", "split", "augmented", "num_samples", "world_size")


def load_kernels(data: str | Path) -> pd.DataFrame:
    """Kernel measurements of a data set, normalised and with their passes combined.

    Args:
        data: a folder with `kernels.parquet` (or `kernels/`), or the file itself.

    Returns:
        One row per measurement, as `autoshard.measure.loading.load_kernel_measurements` gives.

    Raises:
        InputError: there are no usable measurements of one machine and optimizer.
    """
    data = Path(data)
    if data.is_dir():
        places = (data / "kernels.parquet", data / "kernels")
        found = next((place for place in places if place.exists()), None)
        if found is None:
            raise InputError(f"{data} holds no kernels.parquet", remedy="check the path")
        data = found
    frame = load_kernel_measurements(data)
    optimizers = sorted(frame["optimizer"].unique())
    if len(optimizers) > 1:
        raise InputError(
            "measurements of different optimizers are mixed",
            got=listed(optimizers),
            remedy="score one optimizer at a time",
        )
    return frame


def feature_table(frame: pd.DataFrame) -> pd.DataFrame:
    """What a cost model can learn from, one row per shard.

    Args:
        frame: from `load_kernels`.

    Returns:
        The columns `SET_COLUMNS`, then `shard` (its place in the set), `table` (its name),
        `SHARD_FEATURES`, and labels of the whole set, the same for all its shards: `fwd_ms`,
        `bwd_ms`, and `fwd_again_ms` and `bwd_again_ms` of a second measurement, NaN without one.
    """
    names = ["protocol", "index"]
    first = frame[frame["repeat"] == 0]
    again = frame[frame["repeat"] == 1].rename(columns=_AGAIN)[[*names, *_AGAIN.values()]]
    sets = first.merge(again, on=names, how="left", validate="one_to_one")
    features: list[NDArray[np.float64]] = []
    tables: list[str] = []
    for record in sets.to_dict("records"):
        row = {str(key): value for key, value in record.items()}
        features.append(row_features(row))
        tables.extend(slice_.table.name for slice_ in row_slices(row))
    counts = [len(own) for own in features]
    repeated = sets.loc[np.repeat(np.arange(len(sets)), counts)].reset_index(drop=True)
    shards = repeated[list(SET_COLUMNS)].assign(
        shard=np.concatenate([np.arange(count) for count in counts]), table=tables
    )
    described = pd.DataFrame(np.concatenate(features), columns=list(SHARD_FEATURES))
    labels = repeated[[*_AGAIN, *_AGAIN.values()]]
    return pd.concat([shards, described, labels], axis=1)


def read_predictions(path: str | Path) -> pd.DataFrame:
    """A table of predictions.

    Args:
        path: Parquet, or CSV if the name ends with `.csv`; columns `index`, `fwd_ms`, `bwd_ms`,
            and `protocol` if the data holds several runs. Others are not read.

    Raises:
        InputError: the file cannot be read, lacks a column, or a column holds no numbers.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"predictions {path} do not exist", remedy="check the path")
    try:
        frame = pd.read_csv(path) if path.suffix.lower() == ".csv" else pd.read_parquet(path)
    except (OSError, ValueError, pd.errors.ParserError) as error:
        raise InputError(
            f"predictions {path} cannot be read",
            got=str(error).splitlines()[0][:120],
            allowed="a Parquet file, or CSV with a name that ends with .csv",
        ) from error
    wanted = ["index", *_AGAIN]
    if "index" not in frame.columns and frame.index.name == "index":
        frame = frame.reset_index()
    if missing := [name for name in wanted if name not in frame.columns]:
        raise InputError(
            f"predictions {path} lack columns",
            got=f"{listed(missing)} (it has {listed(map(str, frame.columns))})",
            allowed=listed(wanted),
        )
    for name in wanted:
        column = frame[name]
        if not is_numeric_dtype(column) or is_bool_dtype(column):
            raise InputError(f"predictions {path}: column {name!r} holds no numbers")
    if not is_integer_dtype(frame["index"]):
        numbers = frame["index"].to_numpy(dtype=np.float64)
        if not np.all(np.isfinite(numbers) & (numbers == np.round(numbers))):
            raise InputError(f"predictions {path}: column 'index' holds other than whole numbers")
        frame = frame.assign(index=numbers.astype(np.int64))
    return frame
