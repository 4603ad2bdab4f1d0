"""The learning curve of a run: its rows, their file, and their picture."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from autoshard.errors import InputError
from autoshard.files import write_atomically, write_text

CURVE_FILE, PICTURE_FILE = "learning_curve.jsonl", "learning_curve.png"
RESULT_FILE = "result.json"

if TYPE_CHECKING:
    from autoshard.training.results import TrainingResult

#: Colours of the Okabe-Ito palette, which colour-blind readers can tell apart.
_BLUE, _ORANGE, _GREEN = "#0072B2", "#D55E00", "#009E73"


@dataclass(frozen=True, kw_only=True)
class CurveRow:
    """What is known after an evaluation."""

    step: int
    epoch: float
    """Passes over the training data, in fractions where their length is known."""
    samples: int
    """Training samples so far, of all ranks."""
    train_loss: float
    """Mean over the steps since the row before, of the mean over ranks."""
    auc: float | None
    """None where the evaluation data holds only clicks, or none."""
    log_loss: float | None
    samples_per_s: float
    """Training samples of all ranks per second since the row before, evaluation left out."""

    def to_json(self) -> dict[str, Any]:
        """The row as a plain dictionary."""
        return dict(vars(self))

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> CurveRow:
        """The inverse of `to_json`."""
        return cls(**value)


def write_curve(folder: str | Path, rows: Sequence[CurveRow]) -> None:
    """Write the rows as `learning_curve.jsonl`, one JSON object per line, atomically.

    Args:
        folder: made where it is missing.
        rows: all of the run.

    Raises:
        InputError: the folder is not writable.
    """
    make_folder(folder)
    lines = "".join(json.dumps(row.to_json(), allow_nan=False) + "\n" for row in rows)
    write_text(Path(folder) / CURVE_FILE, lines)


def draw_curve(folder: str | Path, rows: Sequence[CurveRow], title: str) -> Path:
    """Draw losses and AUC over samples as `learning_curve.png`, atomically.

    Returns:
        The picture's path.

    Raises:
        InputError: the folder is not writable.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import EngFormatter, MaxNLocator

    figure = Figure(figsize=(9.0, 3.8), dpi=120, layout="constrained")
    FigureCanvasAgg(figure)
    losses, quality = figure.subplots(1, 2)
    samples = [row.samples for row in rows]
    losses.plot(
        samples, [row.train_loss for row in rows], "o-", color=_ORANGE, ms=3, label="training"
    )
    evaluated = [row for row in rows if row.log_loss is not None]
    losses.plot(
        [row.samples for row in evaluated],
        [row.log_loss for row in evaluated],
        "s-", color=_BLUE, ms=3, label="evaluation",
    )  # fmt: skip
    losses.set_ylabel("log-loss (nats)")
    losses.legend(frameon=False)
    ranked = [row for row in rows if row.auc is not None]
    quality.plot(
        [row.samples for row in ranked], [row.auc for row in ranked], "s-", color=_GREEN, ms=3
    )
    quality.set_ylabel("AUC (evaluation)")
    for axes in (losses, quality):
        axes.set_xlabel("training samples")
        axes.xaxis.set_major_formatter(EngFormatter(sep=""))
        axes.xaxis.set_major_locator(MaxNLocator(6))
        axes.grid(alpha=0.3)
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    make_folder(folder)
    path = Path(folder) / PICTURE_FILE
    write_atomically(path, lambda temporary: figure.savefig(temporary, format="png"))
    return path


def write_results(folder: str | Path, result: TrainingResult) -> list[Path]:
    """Write `result.json` and the curve's rows and picture.

    Returns:
        What was written.

    Raises:
        InputError: the folder is not writable.
    """
    folder = Path(folder)
    write_curve(folder, result.curve)
    picture = draw_curve(folder, result.curve, result.data)
    facts = json.dumps(result.to_json(), indent=1, allow_nan=False)
    write_text(folder / RESULT_FILE, facts + "\n")
    return [folder / CURVE_FILE, picture, folder / RESULT_FILE]


def make_folder(folder: str | Path) -> None:
    """Make a folder for results, if it is not there.

    Raises:
        InputError: it cannot be made.
    """
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make folder {folder}", got=error.strerror, remedy="choose a writable place"
        ) from error
