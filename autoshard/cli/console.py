"""The two output streams: results on stdout, everything else on stderr.

Names in tables and plans come from other people's files; nothing in them may be taken for
markup or reach the terminal as a control character.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
)
from rich.table import Table as RichTable
from rich.text import Text

#: Columns when stdout is a file or a pipe, and COLUMNS does not say otherwise.
PIPE_WIDTH = 120


class _Console(Console):
    """A console that lets `main` handle a reader who went away."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def _console(stream: IO[str]) -> _Console:
    width = None if stream.isatty() or "COLUMNS" in os.environ else PIPE_WIDTH
    return _Console(file=stream, width=width, markup=False, highlight=False, emoji=False)


def printable(text: object) -> str:
    """The text with control characters (ESC, newlines, …) shown as Python escapes."""
    return "".join(
        char if char.isprintable() else char.encode("unicode_escape").decode("ascii")
        for char in str(text)
    )


def say(line: str) -> None:
    """Print one line of a result on stdout."""
    _console(sys.stdout).print(Text(printable(line)), soft_wrap=True)


def note(line: str) -> None:
    """Print one line on stderr: progress, warnings, what was written."""
    print(printable(line), file=sys.stderr, flush=True)


def show_json(value: Any) -> None:
    """Print machine-readable output: one JSON document on stdout."""
    print(json.dumps(value, indent=1, allow_nan=False))


def show_table(
    title: str,
    columns: Sequence[tuple[str, bool]],
    rows: Sequence[Sequence[object]],
    *,
    caption: str | None = None,
    last_row_is_total: bool = False,
) -> None:
    """Print a table on stdout.

    Args:
        title: above it.
        columns: (heading, whether the cells are numbers).
        rows: cells, shown as `str`.
        caption: below it.
        last_row_is_total: set the last row apart.
    """
    table = RichTable(
        title=Text(printable(title), style="bold"),
        title_justify="left",
        caption=None if caption is None else Text(printable(caption), style="dim"),
        caption_justify="left",
        header_style="bold",
    )
    for heading, is_number in columns:
        table.add_column(
            Text(printable(heading)),
            justify="right" if is_number else "left",
            overflow="fold",
            no_wrap=is_number,
        )
    for index, row in enumerate(rows):
        if last_row_is_total and index == len(rows) - 1:
            table.add_section()
        table.add_row(*(Text(printable(cell)) for cell in row))
    _console(sys.stdout).print(table)


@contextmanager
def waiting(message: str) -> Iterator[None]:
    """Show on stderr that something runs; silent unless stderr is a terminal."""
    console = _console(sys.stderr)
    if not console.is_terminal:
        yield
        return
    with console.status(Text(printable(message))):
        yield


@contextmanager
def progress_bar(message: str, total: int) -> Iterator[Progress]:
    """A progress bar on stderr with one task (id 0); silent unless stderr is a terminal."""
    console = _console(sys.stderr)
    bar = Progress(
        SpinnerColumn(),
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=console,
        disable=not console.is_terminal,
        transient=True,
    )
    with bar:
        bar.add_task(message, total=total)
        yield bar
