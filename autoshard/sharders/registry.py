"""All sharders by name. A new one is one file with `@register_sharder`, named below."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.protocols import Sharder
from autoshard.registry import Registry

SHARDERS: Registry[Callable[..., Sharder]] = Registry(
    "sharder",
    # In the order in which reports list them: the plainest first.
    (
        "autoshard.sharders.heuristics",
        "autoshard.sharders.cost_greedy",
        "autoshard.sharders.learned",
        "autoshard.sharders.search",
    ),
)
register_sharder = SHARDERS.register
sharder_names = SHARDERS.names


def make_sharder(name: str, **options: object) -> Sharder:
    """Make the sharder called `name`.

    Args:
        name: one of `sharder_names()`.
        options: passed to the sharder, such as `policy` for `ppo` and `autoshard`.

    Raises:
        InputError: there is no sharder of that name.
    """
    return SHARDERS.find(name)(**options)
