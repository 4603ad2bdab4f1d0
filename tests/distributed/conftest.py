"""Worker groups that all runtime tests share: starting processes is what takes the time."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autoshard.runtime.group import WorkerGroup


class SharedGroups(dict[int, WorkerGroup]):
    """Opens a group of each size when it is first asked for, and again if a test closed it."""

    def __missing__(self, world_size: int) -> WorkerGroup:
        self[world_size] = WorkerGroup(world_size, timeout_s=20).__enter__()
        return self[world_size]

    def __getitem__(self, world_size: int) -> WorkerGroup:
        group = super().__getitem__(world_size)
        if not group.process_ids:
            del self[world_size]
            group = super().__getitem__(world_size)
        return group


@pytest.fixture(scope="session")
def groups() -> Iterator[dict[int, WorkerGroup]]:
    opened = SharedGroups()
    try:
        yield opened
    finally:
        for group in opened.values():
            group.close()
