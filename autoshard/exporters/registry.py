"""All export formats by name. A new one is one file with `@register_exporter`, named below."""

from __future__ import annotations

from collections.abc import Callable

from autoshard.protocols import Exporter
from autoshard.registry import Registry

EXPORTERS: Registry[Callable[[], Exporter]] = Registry(
    "export format",
    # In the order in which help texts list them.
    ("autoshard.exporters.plan_json", "autoshard.exporters.shards_csv"),
)
register_exporter = EXPORTERS.register
exporter_names = EXPORTERS.names


def make_exporter(name: str) -> Exporter:
    """Make the exporter called `name`.

    Raises:
        InputError: there is no format of that name.
    """
    return EXPORTERS.find(name)()
