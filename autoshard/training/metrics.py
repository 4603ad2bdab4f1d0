"""How well a model tells clicks from other samples: AUC and log-loss.

Shapes: S=samples.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike
from scipy.stats import rankdata

from autoshard.errors import InputError


def auc(labels_S: ArrayLike, scores_S: ArrayLike) -> float | None:
    """The area under the ROC curve: the chance that a click scores above another sample.

    The rank formula (Mann and Whitney, 1947): with n clicks among m other samples and the
    clicks' ranks r_i, ties sharing their mean rank, (Σ r_i - n (n + 1) / 2) / (n m).

    Args:
        labels_S: 0 or 1.
        scores_S: any finite numbers; larger for clicks.

    Returns:
        In [0, 1]; None where there are no clicks or nothing but clicks.

    Raises:
        InputError: shapes differ, a label is neither 0 nor 1, or a score is not finite.
    """
    labels, scores = _checked(labels_S, scores_S)
    num_clicks = int(labels.sum())
    num_others = len(labels) - num_clicks
    if not num_clicks or not num_others:
        return None
    ranks = rankdata(scores)
    above = float(ranks[labels == 1].sum()) - num_clicks * (num_clicks + 1) / 2
    return above / num_clicks / num_others


def log_loss(labels_S: ArrayLike, logits_S: ArrayLike) -> float | None:
    """The mean logistic loss in nats, -log of the probability given to what happened.

    Returns:
        >= 0; None for no samples.

    Raises:
        InputError: as for `auc`.
    """
    labels, logits = _checked(labels_S, logits_S)
    if not len(labels):
        return None
    # log(1 + e^z) - y z, without overflow.
    losses = np.logaddexp(0.0, logits) - labels * logits
    return math.fsum(losses.tolist()) / len(losses)


def _checked(labels_S: ArrayLike, scores_S: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    labels = np.asarray(labels_S, dtype=np.float64)
    scores = np.asarray(scores_S, dtype=np.float64)
    if labels.ndim != 1 or labels.shape != scores.shape:
        raise InputError(
            "labels and scores do not match",
            got=f"shapes {labels.shape} and {scores.shape}",
            allowed="one score per label",
        )
    if not np.isin(labels, (0.0, 1.0)).all():
        raise InputError("a label is neither 0 nor 1", got=labels[~np.isin(labels, (0, 1))][0])
    if not np.isfinite(scores).all():
        raise InputError(
            "a score is not finite",
            got=scores[~np.isfinite(scores)][0],
            remedy="the model diverged: lower the learning rate",
        )
    return labels, scores
