"""`csv`: one row per shard, for spreadsheets and for other people's loaders."""

from __future__ import annotations

import csv
import io

from autoshard.exporters.registry import register_exporter
from autoshard.plan import ShardingPlan

COLUMNS = (
    "table",
    "sharding_type",
    "compute_kernel",
    "data_type",
    "rank",
    "row_offset",
    "col_offset",
    "num_rows",
    "num_cols",
    "weights_bytes",
)


@register_exporter("csv")
class ShardsCsvExporter:
    """One row per shard, tables in the plan's order; weights without padding."""

    name = "csv"

    def export(self, plan: ShardingPlan) -> str:
        """See `autoshard.protocols.Exporter`."""
        stream = io.StringIO()
        writer = csv.writer(stream, lineterminator="\n")
        writer.writerow(COLUMNS)
        for entry in plan.tables:
            data_type = entry.table.data_type
            for shard in entry.shards:
                writer.writerow(
                    (
                        entry.table.name,
                        entry.sharding_type.value,
                        entry.compute_kernel,
                        data_type.value,
                        shard.rank,
                        shard.row_offset,
                        shard.col_offset,
                        shard.num_rows,
                        shard.num_cols,
                        shard.num_rows * shard.num_cols * data_type.num_bytes,
                    )
                )
        return stream.getvalue()
