"""One measurement at a time on a machine: two at once would time each other.

`runner` holds this lock while it times something real. The lock belongs to the operating
system, so it ends with the process that holds it, however that ends. Whose temporary folders
differ (containers, `TMPDIR`, private `/tmp` of a cluster's jobs) do not see each other: there,
ask for whole machines.
"""

from __future__ import annotations

import contextlib
import fcntl
import getpass
import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from autoshard.errors import AutoshardError, InputError

LOCK_NAME = "autoshard-measuring.lock"
_POLL_S = 0.5
_TELL_EVERY_S = 60.0
_log = logging.getLogger(__name__)


class MachineBusyError(AutoshardError, TimeoutError):
    """Another process measured on this machine for longer than we were ready to wait."""


def lock_path() -> Path:
    """The file that all measuring processes of this machine lock."""
    return Path(tempfile.gettempdir()) / LOCK_NAME


@contextmanager
def machine_to_itself(folder: Path, limit_s: float, *, needed: bool = True) -> Iterator[None]:
    """Wait until nobody else measures on this machine, and keep others out.

    Args:
        folder: that is measured into, told to those who wait.
        limit_s: how long to wait at most; 0 does not wait.
        needed: whether anything is timed; if not, this does nothing.

    Raises:
        MachineBusyError: another process still measures; the message says which.
        InputError: the lock's file cannot be opened, or the process that measures started this one
            as its worker and so waits for it.
    """
    if not needed:
        yield
        return
    descriptor = _open(lock_path())
    try:
        _acquire(descriptor, limit_s)
        try:
            _write_holder(descriptor, folder)
            yield
        finally:
            _write(descriptor, "")
    finally:
        os.close(descriptor)  # and so the lock


def _open(path: Path) -> int:
    """Open the file, or make it, for users of all kinds; a link is not followed."""
    flags = os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW
    try:
        for _ in range(2):  # twice: another process may make it between our two tries
            with contextlib.suppress(FileNotFoundError):
                return os.open(path, flags)
            with contextlib.suppress(FileExistsError):
                descriptor = os.open(path, flags | os.O_CREAT | os.O_EXCL, 0o666)
                os.fchmod(descriptor, 0o666)  # whatever the umask: other users lock it too
                return descriptor
        return os.open(path, flags)
    except OSError as error:
        raise InputError(
            f"cannot open {path}, which keeps two processes from measuring at once",
            got=error.strerror,
            remedy="remove it, or let TMPDIR name a folder that is writable",
        ) from error


def _acquire(descriptor: int, limit_s: float) -> None:
    deadline_s = time.monotonic() + limit_s
    tell_at_s = 0.0
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _refuse_to_wait_for_parent(descriptor)
            now_s = time.monotonic()
            if now_s >= deadline_s:
                raise MachineBusyError(
                    "another process measures on this machine",
                    got=f"{_holder(descriptor)}, after {limit_s:g} s",
                    remedy="wait for it, stop it, or raise machine_wait_limit_s",
                ) from None
            if now_s >= tell_at_s:
                _log.warning(
                    "waiting for the machine: %s; for %.0f s at most",
                    _holder(descriptor),
                    deadline_s - now_s,
                )
                tell_at_s = now_s + _TELL_EVERY_S
            time.sleep(min(_POLL_S, max(deadline_s - now_s, 0.0)))
        else:
            return


def _refuse_to_wait_for_parent(descriptor: int) -> None:
    """Workers import the script that starts them; without its guard it would measure in them."""
    is_spawned = "__mp_main__" in sys.modules  # `multiprocessing` imports the script by this name
    if is_spawned and _told(descriptor).get("pid") == os.getppid():
        raise InputError(
            "a worker of a measurement cannot measure itself",
            got=f"process {os.getpid()}, started by {_holder(descriptor)}",
            remedy='put what your script does under `if __name__ == "__main__":`',
        )


def _write_holder(descriptor: int, folder: Path) -> None:
    try:
        user = getpass.getuser()
    except (KeyError, OSError):  # no entry in the list of users
        user = str(os.getuid())
    since = datetime.now(UTC).isoformat(timespec="seconds")
    holder = {"pid": os.getpid(), "user": user, "folder": str(folder.resolve()), "since": since}
    _write(descriptor, json.dumps(holder))


def _write(descriptor: int, text: str) -> None:
    """Replace the content, for people only: who cannot write it holds the lock all the same."""
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, text.encode(), 0)


def _told(descriptor: int) -> dict[str, Any]:
    """What the holder wrote; nothing if it did not, or not yet all of it."""
    try:
        told = json.loads(os.pread(descriptor, 4096, 0))
    except (OSError, ValueError):
        return {}
    return told if isinstance(told, dict) else {}


def _holder(descriptor: int) -> str:
    """Who measures, as far as they said."""
    told = _told(descriptor)
    if not {"pid", "user", "folder", "since"} <= told.keys():
        return "a process that has not said which"
    return (
        f"process {told['pid']} of {told['user']} measures into {told['folder']} "
        f"since {told['since']}"
    )
