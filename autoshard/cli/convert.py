"""`autoshard convert`: table lists from one format to another, measured from lookups if given."""

from __future__ import annotations

from typing import Annotated

import typer

from autoshard.cli.console import note, show_json
from autoshard.cli.options import JsonOption, TablesArgument, check_output, load_tables


def convert_command(
    source: TablesArgument,
    target: Annotated[
        str,
        typer.Argument(
            metavar="TARGET",
            help="A .csv, .json or .parquet file in a folder that exists, replaced whole.",
        ),
    ],
    trace: Annotated[
        str | None,
        typer.Option(
            metavar="LOOKUPS.PARQUET",
            help="Measure pooling factors and id distributions from recorded lookups: one row "
            "per sample, one column of id lists per feature.",
        ),
    ] = None,
    json_output: JsonOption = False,
) -> None:
    """Write a table list in another format.

    For example:

      autoshard convert tables.csv tables.parquet
      autoshard convert tables.csv measured.csv --trace lookups.parquet
      autoshard convert 'workload:trace?path=lookups.parquet&embedding_dims=64' tables.csv
      autoshard convert 'workload:dlrm_dataset?path=fbgemm_t856_bs65536.pt.gz&seed=1' tables.csv
      autoshard convert 'workload:production?num_tables=80&seed=0' tables.json

    Lookups of facebookresearch/dlrm_datasets (.pt, .pt.gz) may also be named directly.
    """
    check_output(target)
    from autoshard.table_io import write_tables

    tables = load_tables(source)
    if trace is not None:
        from autoshard.workloads.registry import make_workload

        tables = make_workload("trace", path=trace, tables=tables)
    write_tables(target, tables)
    if json_output:
        show_json({"out": target, "num_tables": len(tables)})
    note(f"wrote {len(tables)} tables to {target}")
