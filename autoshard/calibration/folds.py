"""Cross-validation: which rows are held out when, and when a difference counts.

Shapes: N=rows.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
_FOLD_STREAM = 11


def fold_numbers(index_N: IntArray, num_folds: int, seed: int) -> IntArray:
    """The fold of each row, 0 to num_folds − 1, [N].

    Args:
        index_N: what each row is of; rows of one number fall into one fold.
        num_folds: how many, >= 2.
        seed: decides which.
    """
    _, group_N = np.unique(index_N, return_inverse=True)
    num_groups = int(group_N.max()) + 1
    order = np.random.default_rng([_FOLD_STREAM, seed]).permutation(num_groups)
    return (order % num_folds)[group_N].astype(np.int64)


def folds_of(index_N: IntArray, num_folds: int, seed: int) -> list[tuple[IntArray, IntArray]]:
    """Row numbers to train on and to hold out, for each fold."""
    fold_N = fold_numbers(index_N, num_folds, seed)
    return [(np.flatnonzero(fold_N != k), np.flatnonzero(fold_N == k)) for k in range(num_folds)]


def helps(before_N: FloatArray, after_N: FloatArray) -> bool:
    """Whether losses fell by more than one standard error of the mean difference.

    Args:
        before_N: losses of the simpler model on rows that it was not fitted to.
        after_N: those of the other one on the same rows.
    """
    gain_N = before_N - after_N
    return bool(gain_N.mean() > gain_N.std() / np.sqrt(len(gain_N)))


def most_restrained(losses: FloatArray) -> int:
    """The first alternative that the best one does not beat by more than one standard error.

    With few rows the least mean loss is often luck, and what it is luck about is freedom (the
    one-standard-error rule of Breiman et al., "Classification and Regression Trees", 1984).

    Args:
        losses: of alternatives on the same held-out rows, [alternatives, N]; the one with the
            least freedom first.
    """
    best = int(losses.mean(axis=1).argmin())
    return next(
        number
        for number in range(best + 1)
        if number == best or not helps(losses[number], losses[best])
    )
