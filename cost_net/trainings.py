"""The trainings of a comparison: in several processes, each kept when it is done.

A training leaves what it predicted, not the fitted model: all that the comparison looks at. A
killed comparison goes on with the trainings that are missing.

Shapes: N=measured sets, M=grown sets, P=phases.
"""

from __future__ import annotations

import json
import time
import zipfile
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from autoshard.errors import InputError
from autoshard.files import fingerprint, make_folder, read_json, write_atomically, write_text
from autoshard.measure.workers import run_tasks
from cost_net.comparison_data import ComparisonData
from cost_net.contenders import fit, some_rows
from cost_net.learning_curve import Training

FloatArray = NDArray[np.float64]
IDENTITY_FILE = "identity.json"


@dataclass(frozen=True, kw_only=True, eq=False)
class Predictions:
    """What one trained contender says, in ms."""

    measured_NP: FloatArray
    grown_MP: FloatArray
    odd: Mapping[str, FloatArray]
    """Of each kind of odd sets, [sets, P]."""
    seconds: float
    """That the training took."""


class TrainingFolder:
    """One file for each finished training."""

    def __init__(self, folder: Path, identity: Mapping[str, Any]) -> None:
        """Open or continue a folder.

        Args:
            folder: made if it is not there.
            identity: whatever decides the predictions.

        Raises:
            InputError: the folder belongs to another comparison.
        """
        self.folder = make_folder(folder)
        mark = {"identity": fingerprint(dict(identity))}
        path = folder / IDENTITY_FILE
        if not path.exists():
            write_text(path, json.dumps(mark) + "\n")
        elif read_json(path, "comparison") != mark:
            raise InputError(
                f"{folder} holds trainings on other data or with another configuration",
                remedy="choose another output folder, or repeat the old configuration",
            )

    def _path(self, training: Training) -> Path:
        return self.folder / f"{training.key}.npz"

    def __contains__(self, training: Training) -> bool:
        return self._path(training).exists()

    def add(self, training: Training, predictions: Predictions) -> None:
        """Keep what a training predicted; the file appears whole or not at all."""
        arrays = {
            "measured": predictions.measured_NP,
            "grown": predictions.grown_MP,
            "seconds": np.array(predictions.seconds),
            **{f"odd_{name}": values for name, values in predictions.odd.items()},
        }
        write_atomically(self._path(training), partial(_save, arrays))

    def read(self, training: Training) -> Predictions:
        """What a finished training predicted.

        Raises:
            InputError: its file is damaged.
        """
        path = self._path(training)
        try:
            with np.load(path) as stored:
                return Predictions(
                    measured_NP=stored["measured"],
                    grown_MP=stored["grown"],
                    odd={
                        name.removeprefix("odd_"): stored[name]
                        for name in stored.files
                        if name.startswith("odd_")
                    },
                    seconds=float(stored["seconds"]),
                )
        except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
            raise InputError(
                f"{path} is damaged", remedy="remove it: the training will be repeated"
            ) from error


def _save(arrays: Mapping[str, Any], path: Path) -> None:
    with path.open("wb") as stream:  # given a path, NumPy would append a suffix
        np.savez_compressed(stream, **arrays)


def run_trainings(
    data: ComparisonData,
    trainings: Iterable[Training],
    folder: TrainingFolder,
    *,
    min_steps: int,
    num_workers: int,
    time_limit_s: float,
) -> Generator[Training, None, None]:
    """Do the trainings that are missing, one per process at a time, on one thread each.

    Args:
        data: what to learn from, and what to predict.
        trainings: all of them.
        folder: where finished ones are.
        min_steps: see `cost_net.contenders.fit`.
        num_workers: processes.
        time_limit_s: for one training.

    Yields:
        Each training when it is done.

    Raises:
        WorkerError: a process failed, died or took too long.
    """
    missing = [training for training in trainings if training not in folder]
    handler = partial(_handler, data, folder, min_steps)
    workers = min(num_workers, len(missing))
    for training, _ in run_tasks(handler, missing, num_workers=workers, time_limit_s=time_limit_s):
        yield training


def _handler(
    data: ComparisonData, folder: TrainingFolder, min_steps: int, _number: int
) -> Callable[[Training], None]:
    return partial(train_and_keep, data, folder, min_steps)


def train_and_keep(
    data: ComparisonData, folder: TrainingFolder, min_steps: int, training: Training
) -> None:
    """Do one training and keep what it predicts."""
    start_s = time.monotonic()
    rows = some_rows(data.kernels, training.num_sets, seed=training.seed)
    predict = fit(training.contender, rows, seed=training.seed, min_steps=min_steps)
    seconds = time.monotonic() - start_s
    folder.add(
        training,
        Predictions(
            measured_NP=predict(data.kernels),
            grown_MP=predict(data.grown.data),
            odd={name: predict(sets) for name, sets in data.odd.items()},
            seconds=seconds,
        ),
    )
