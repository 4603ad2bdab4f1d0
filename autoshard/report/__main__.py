"""`python -m autoshard.report FOLDER --out report.html`: the report of a run folder."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from autoshard.errors import AutoshardError
from autoshard.report.page import load_report_data, write_report


def main(arguments: Sequence[str] | None = None) -> int:
    """Write the report; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m autoshard.report",
        description="Write one self-contained HTML page about what a run folder holds.",
    )
    parser.add_argument("folder", type=Path, help="output folder of the demo or of experiments")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("report.html"),
        help="the page to write, in a folder that exists",
    )
    options = parser.parse_args(arguments)
    try:
        write_report(options.out, load_report_data(options.folder))
    except AutoshardError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
