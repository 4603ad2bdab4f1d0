"""Tables: defaults, arithmetic, refusals and fingerprints."""

from __future__ import annotations

import pytest

from autoshard.distributions import IdDistribution
from autoshard.errors import InputError
from autoshard.table_cells import CellError, check_name
from autoshard.tables import (
    BagLengths,
    DataType,
    PoolingType,
    Table,
    check_tables,
    tables_fingerprint,
)

FIELDS = {"name": "t", "num_embeddings": 10, "embedding_dim": 6, "pooling_factor": 1.5}


def table(**changes) -> Table:
    return Table(**{**FIELDS, **changes})


def test_defaults_and_arithmetic():
    plain = table()
    assert plain.feature_names == ("t",)
    assert plain.data_type is DataType.FP32
    assert plain.weight_bytes == 10 * 6 * 4
    assert plain.lookups_per_sample == 1.5
    shared = table(feature_names=("x", "y"), data_type=DataType.FP16)
    assert shared.num_features == 2
    assert shared.lookups_per_sample == 3.0
    assert shared.weight_bytes == 10 * 6 * 2
    assert table(data_type=DataType.BF16).weight_bytes == 120


def test_sizes_are_exact_beyond_double_precision():
    big = table(num_embeddings=2**61 + 1, embedding_dim=3)
    assert big.weight_bytes == (2**61 + 1) * 3 * 4


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", ""),
        ("name", 5),
        ("name", "n" * 257),
        ("num_embeddings", 0),
        ("num_embeddings", -1),
        ("num_embeddings", 1.0),
        ("num_embeddings", True),
        ("num_embeddings", "10"),
        ("num_embeddings", 2**62 + 1),
        ("embedding_dim", 0),
        ("embedding_dim", 4.0),
        ("pooling_factor", -0.1),
        ("pooling_factor", float("nan")),
        ("pooling_factor", float("inf")),
        ("pooling_factor", "1"),
        ("pooling_factor", True),
        ("feature_names", ("",)),
        ("feature_names", ("x", 3)),
        ("feature_names", ("x", "x")),
        ("feature_names", ("x", "y\u200d")),
    ],
)
def test_unusable_values_are_refused_by_name(field, value):
    with pytest.raises(InputError) as caught:
        table(**{field: value})
    assert field.removesuffix("_names").removesuffix("s") in str(caught.value).replace(" ", "_")


@pytest.mark.parametrize(
    "character",
    [
        "\n",
        "\x1b",
        "\x7f",
        "\u00ad",  # soft hyphen
        "\u200b",  # zero-width space
        "\u202e",  # right-to-left override: shows "gpj" as "jpg"
        "\u2066",
        "\u2028",  # line separator
        "\ufeff",
        "\ud800",  # lone surrogate
        "\ue000",  # private use
        "\u0378",  # not assigned
        "\U000e0041",  # tag letter
    ],
    ids=ascii,
)
def test_names_hold_nothing_invisible_or_reordering(character):
    for field, value in (("name", f"a{character}b"), ("feature_names", ("x", f"a{character}b"))):
        with pytest.raises(InputError, match="not usable") as caught:
            table(**{field: value})
        assert character not in str(caught.value)
    with pytest.raises(CellError, match=f"U\\+{ord(character):04X}"):
        check_name(f"a{character}b")


@pytest.mark.parametrize(
    "name", ["Größe", "用户", "пользователь", "שם", "اسم", "नाम", "a b|c,d", "é", "🙂"]
)
def test_names_of_every_script_are_fine(name):
    assert table(name=name).name == check_name(name) == name


def test_equal_tables_have_equal_fingerprints():
    first, second = table(name="a"), table(name="b")
    assert tables_fingerprint([first, second]) == tables_fingerprint([second, first])
    changes = [
        {"num_embeddings": 11},
        {"embedding_dim": 7},
        {"pooling_factor": 1.6},
        {"feature_names": ("x",)},
        {"data_type": DataType.FP16},
        {"pooling": PoolingType.MEAN},
        {"weighted": True},
        {"ids": IdDistribution(zipf_exponent=1.0)},
        {"bag_lengths": BagLengths.POISSON},
    ]
    prints = {tables_fingerprint([table(**change)]) for change in [{}, *changes]}
    assert len(prints) == len(changes) + 1


def test_check_tables():
    assert check_tables(iter([table()])) == (table(),)
    with pytest.raises(InputError, match="empty"):
        check_tables([])
    with pytest.raises(InputError, match="duplicate table name 't'"):
        check_tables([table(), table()])
