"""The tables of MovieLens-100k, so that a plan needs no download.

Rows follow from the published data set (943 users, 1,682 movies, 19 genres, 21
occupations); how often each row is looked up was counted in its 100,000 ratings.
`autoshard.clicks.movielens` reads the samples themselves.
"""

from __future__ import annotations

from collections.abc import Mapping

from autoshard.distributions import IdDistribution
from autoshard.tables import BagLengths, PoolingType, Table
from autoshard.workloads.registry import register_workload

#: The first year in which one of its movies was released is row 1; row 0 is "not known".
FIRST_YEAR = 1922
LAST_YEAR = 1998
NUM_RATINGS = 100_000
#: Row of all zip codes that start with a letter, after those of two digits.
FIRST_ZIP_LETTER = 100

#: Rows of each table, by feature.
ROWS: Mapping[str, int] = {
    "user_id": 943,
    "movie_id": 1_682,
    "age_group": 7,
    "gender": 2,
    "occupation": 21,
    "zip_prefix": FIRST_ZIP_LETTER + 1,
    "genres": 19,
    "release_year": LAST_YEAR - FIRST_YEAR + 2,
    "hour": 24,
    "weekday": 7,
}

#: Per feature, rows by how often they are looked up in all ratings, most often first:
#: (rows, lookups of these rows together).
_REUSE: Mapping[str, tuple[tuple[int, int], ...]] = {
    "user_id": (
        (5, 3_116),
        (83, 27_333),
        (193, 34_741),
        (191, 17_844),
        (241, 11_279),
        (230, 5_687),
    ),
    "movie_id": (
        (1, 583),
        (59, 19_926),
        (186, 33_725),
        (261, 23_998),
        (262, 12_341),
        (222, 5_339),
        (194, 2_338),
        (164, 1_037),
        (124, 436),
        (68, 136),
        (141, 141),
    ),
    "age_group": ((1, 35_444), (2, 43_651), (3, 18_414), (1, 2_491)),
    "gender": ((1, 74_260), (1, 25_740)),
    "occupation": (
        (1, 21_957),
        (2, 20_105),
        (5, 34_264),
        (6, 16_174),
        (3, 4_904),
        (3, 2_297),
        (1, 299),
    ),
    "zip_prefix": (
        (2, 11_766),
        (11, 27_658),
        (27, 40_581),
        (16, 10_514),
        (18, 6_574),
        (12, 2_137),
        (6, 585),
        (3, 141),
        (2, 44),
    ),
    "genres": (
        (1, 39_895),
        (4, 96_754),
        (3, 35_881),
        (5, 30_753),
        (1, 3_605),
        (3, 4_939),
        (1, 758),
        (1, 10),
    ),
    "release_year": (
        (2, 37_101),
        (2, 19_392),
        (1, 6_657),
        (3, 6_765),
        (8, 10_630),
        (14, 10_163),
        (18, 6_720),
        (9, 1_763),
        (6, 551),
        (4, 193),
        (2, 42),
        (2, 21),
        (1, 2),
    ),
    "hour": ((14, 81_180), (3, 9_756), (5, 7_471), (2, 1_593)),
    "weekday": ((1, 16_621), (6, 83_379)),
}


@register_workload("movielens_100k")
def movielens_100k(*, embedding_dim: int = 16) -> tuple[Table, ...]:
    """One table per categorical feature; the movie's genres are a bag, all else single ids.

    Args:
        embedding_dim: of every table.

    Raises:
        InputError: `embedding_dim` is out of range.
    """
    return tuple(
        Table(
            name=feature,
            num_embeddings=num_embeddings,
            embedding_dim=embedding_dim,
            pooling_factor=sum(lookups for _, lookups in _REUSE[feature]) / NUM_RATINGS,
            pooling=PoolingType.SUM,
            ids=_ids(feature),
            bag_lengths=BagLengths.CONSTANT,
        )
        for feature, num_embeddings in ROWS.items()
    )


def _ids(feature: str) -> IdDistribution:
    total = sum(lookups for _, lookups in _REUSE[feature])
    return IdDistribution(
        bucket_rows=tuple(rows for rows, _ in _REUSE[feature]),
        bucket_shares=tuple(lookups / total for _, lookups in _REUSE[feature]),
    )
