"""Files that are never half-written, and fingerprints of what they hold."""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autoshard.errors import InputError


def canonical_json(value: Any) -> str:
    """JSON with sorted keys and no spaces: equal values give equal text."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def fingerprint(value: Any) -> str:
    """The first 16 hex digits of the SHA-256 of `canonical_json(value)`."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()[:16]


def write_atomically(path: str | Path, write: Callable[[Path], None]) -> None:
    """Let `write` fill a temporary file beside `path`, then rename it into place.

    A reader sees the old file or the whole new one, whenever the writer is killed. A
    symbolic link stays one: the file that it names is replaced.

    Raises:
        InputError: the place is not writable, is a folder, device, pipe or socket, or lies in a
            folder that does not exist: what makes folders for results says so itself.
    """
    path = Path(path)
    try:
        check_replaceable(path)
        path = path.resolve()
        check_folder_of(path)
        descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    except OSError as error:
        raise InputError(
            f"cannot write {path}", got=error.strerror, remedy="choose a writable folder"
        ) from error
    os.close(descriptor)
    temporary = Path(name)
    try:
        write(temporary)
        with temporary.open("rb") as stream:
            os.fsync(stream.fileno())
        umask = os.umask(0)
        os.umask(umask)
        temporary.chmod(0o666 & ~umask)  # mkstemp makes files private
        try:
            temporary.replace(path)
        except OSError as error:  # such as a folder of that name
            raise InputError(
                f"cannot write {path}", got=error.strerror, remedy="choose another path"
            ) from error
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(path: str | Path) -> Path:
    """Make a folder for results, with the folders above it, unless it is there.

    Raises:
        InputError: the place is not writable, or something else is there.
    """
    path = Path(path)
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise InputError(
            f"cannot make the folder {path}", got=error.strerror, remedy="choose another folder"
        ) from error
    return path


def check_folder_of(path: Path) -> None:
    """Refuse to put a file where there is no folder; a mistyped path should not make one.

    Raises:
        InputError: the folder does not exist or is none.
    """
    folder = path.parent
    if not folder.exists():
        raise InputError(
            f"cannot write {path}",
            got=f"the folder {folder} does not exist",
            remedy="create it, or choose another place",
        )
    if not folder.is_dir():
        raise InputError(f"cannot write {path}", got=f"{folder} is not a folder")


def check_replaceable(path: Path) -> None:
    """Refuse to put a file in the place of anything else, such as a device.

    Raises:
        InputError: something else than a regular file is there.
    """
    if path.exists() and not path.is_file():
        kind = "a folder" if path.is_dir() else "a device, pipe or socket"
        raise InputError(f"cannot write {path}", got=kind, allowed="a new or a regular file")


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8, atomically."""
    write_atomically(path, lambda temporary: _write_utf8(temporary, text))


def _write_utf8(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def read_text(path: str | Path, what: str) -> str:
    """Read a UTF-8 file, or raise an `InputError` that names `what` and the path."""
    path = Path(path)
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError as error:
        raise InputError(f"{what} {path} does not exist", remedy="check the path") from error
    except UnicodeDecodeError as error:
        raise InputError(
            f"{what} {path} is not a text file",
            got=f"byte {error.object[error.start]:#04x} at offset {error.start}",
            allowed="UTF-8 text",
        ) from error
    except OSError as error:
        raise InputError(f"cannot read {what} {path}", got=error.strerror) from error


def read_json(path: str | Path, what: str) -> Any:
    """Read a JSON file, or raise an `InputError` that names line and column."""
    return parse_json(read_text(path, what), path, what)


def parse_json(
    text: str,
    path: str | Path,
    what: str,
    object_pairs_hook: Callable[[list[tuple[str, Any]]], Any] | None = None,
) -> Any:
    """The value of a JSON text that was read from `path`; errors as in `read_json`.

    Args:
        text: of the file.
        path: named in errors.
        what: the kind of file, such as "plan".
        object_pairs_hook: as in `json.loads`.
    """
    try:
        return json.loads(text, object_pairs_hook=object_pairs_hook)
    except json.JSONDecodeError as error:
        raise InputError(
            f"{what} {path} is not JSON",
            got=f"{error.msg} at line {error.lineno}, column {error.colno}",
        ) from error
    except RecursionError as error:
        raise InputError(f"{what} {path} is nested too deeply to be read") from error
    except ValueError as error:  # a number with thousands of digits
        raise InputError(f"{what} {path} is not usable", got=error) from error


def read_whole_lines(path: Path) -> list[bytes]:
    """The lines of a file that is appended to; a last one that a kill cut off is removed."""
    lines = path.read_bytes().splitlines(keepends=True)
    if lines and not lines[-1].endswith(b"\n"):
        lines.pop()
        with path.open("r+b") as stream:
            stream.truncate(sum(map(len, lines)))
    return lines
