"""What messages look like to people: never Python's own notation."""

from __future__ import annotations

from enum import Enum
from pathlib import Path

import numpy as np
import pytest

from autoshard.errors import InputError, listed, quoted, readable
from autoshard.shards import ShardingType


class Reward(Enum):
    STEPWISE = 1


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("as it is", "as it is"),
        (3, "3"),
        (0.5, "0.5"),
        (True, "true"),
        (None, "nothing"),
        (["a", "b"], "a, b"),
        (("fused",), "fused"),
        ({"b", "a"}, "a, b"),
        ([], "an empty list"),
        ({}, "an empty object"),
        ({"a": 1, "b": [1, 2]}, "a: 1, b: [1, 2]"),
        ([{"a": 1}, ("x", "y"), []], "{a: 1}, [x, y], []"),
        ([[[[[1]]]]], "[[[…]]]"),
        (["a, b", "", " c", "d\u202e"], r"'a, b', '', ' c', 'd\u202e'"),
        (ShardingType.ROW_WISE, "row_wise"),
        ([ShardingType.ROW_WISE, ShardingType.TABLE_WISE], "row_wise, table_wise"),
        (Reward.STEPWISE, "STEPWISE"),
        (np.array([1.5, 2.0]), "1.5, 2.0"),
        (np.int64(7), "7"),
        (Path("a/b"), "a/b"),
        (object(), "something of type object"),
        (ValueError("why"), "why"),
        pytest.param(10**5000, "a number of thousands of digits", id="huge"),
        (list(range(10)), "0, 1, 2, 3, 4, 5, 6, 7 and 2 more"),
        (
            {str(i): i for i in range(9)},
            "0: 0, 1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 6, 7: 7 and 1 more",
        ),
    ],
)
def test_values_are_shown_for_people(value: object, text: str) -> None:
    assert readable(value) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("3", "'3'"),
        (3, "3"),
        (None, "nothing"),
        (["a", 1], "a list of 2: a, 1"),
        ({"a": 1}, "an object with a: 1"),
        ({}, "an empty object"),
        ((), "an empty list"),
        ("\u202eabc\n", r"'\u202eabc\n'"),
        ("x" * 100, "'" + "x" * 76 + "..."),
    ],
)
def test_a_value_from_outside_shows_its_kind(value: object, text: str) -> None:
    assert quoted(value) == text


def test_a_message_counts_what_it_leaves_out() -> None:
    error = InputError("what", got=["a"] * 10, allowed=tuple(f"n{i}" for i in range(30)))
    assert "got: a, a, a, a, a, a, a, a and 2 more" in str(error)
    assert str(error).endswith("n22, n23 and 6 more")
    assert error.got == ["a"] * 10  # as given, for whoever handles it
    assert listed(["a", "b", "c"], 2) == "a, b and 1 more"
