"""The progress bar of every experiment: what is being done, how far, how long still."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

#: Progress and messages go to stderr, so that stdout stays for results.
console = Console(stderr=True)
Report = Callable[[int, int, str], None]


@contextmanager
def progress_bar(title: str) -> Iterator[Report]:
    """Show a bar; call what it yields with (done, total, what is being done)."""
    with Progress(
        TextColumn("[bold]{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
        TextColumn("[dim]{task.fields[what]}"),
        console=console,
    ) as bar:
        task = bar.add_task(title, total=None, what="starting")

        def report(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, what=what)

        yield report
