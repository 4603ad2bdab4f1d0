"""`json`: the plan in its canonical form, with cost, provenance and checksum.

A plan written by hand comes out with its defaults spelled out and a checksum.
"""

from __future__ import annotations

import json

from autoshard.exporters.registry import register_exporter
from autoshard.plan import ShardingPlan


@register_exporter("json")
class PlanJsonExporter:
    """The text that `ShardingPlan.save` writes."""

    name = "json"

    def export(self, plan: ShardingPlan) -> str:
        """See `autoshard.protocols.Exporter`."""
        return json.dumps(plan.to_json(), indent=1, allow_nan=False) + "\n"
