"""Which differences of held-out losses count, by hand."""

from __future__ import annotations

import numpy as np

from autoshard.calibration.folds import fold_numbers, helps, most_restrained

BASE = np.array([3.0, 5.0, 4.0, 4.0])


def test_a_gain_counts_from_one_standard_error_on() -> None:
    gain = np.array([1.0, 3.0, 1.0, 3.0])  # mean 2, deviation 1, standard error 1/2
    assert helps(BASE, BASE - gain)
    assert not helps(BASE, BASE - gain + 1.5)  # mean 1/2: exactly one standard error
    assert helps(BASE, BASE - gain + 1.49)
    assert not helps(BASE, BASE)


def test_the_least_freedom_that_is_as_good_is_chosen() -> None:
    little = BASE - np.array([0.0, 2.0, -1.0, 1.0])  # mean gain 1/2
    much = BASE - 1.0
    lucky = much - np.array([0.5, -0.4, 0.3, -0.3])  # better than `much`, within the error
    assert most_restrained(np.stack([BASE, little])) == 0
    assert most_restrained(np.stack([BASE, much])) == 1
    assert most_restrained(np.stack([BASE, much, lucky])) == 1
    assert most_restrained(np.stack([much, BASE])) == 0
    assert most_restrained(BASE[None]) == 0


def test_rows_of_one_set_share_a_fold() -> None:
    index = np.repeat(np.arange(50), 2)
    folds = fold_numbers(index, 5, seed=1)
    assert (folds[::2] == folds[1::2]).all()
    assert np.bincount(folds).tolist() == [20] * 5
    assert (fold_numbers(index, 5, seed=2) != folds).any()
