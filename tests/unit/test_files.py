"""Files are whole or not there, readable by others, and errors name the path."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from autoshard.errors import InputError
from autoshard.files import (
    canonical_json,
    fingerprint,
    read_json,
    read_text,
    write_atomically,
    write_text,
)


def test_a_writer_that_fails_leaves_the_old_file_and_no_rubbish(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "old")

    def fail(temporary: Path) -> None:
        temporary.write_text("half")
        raise RuntimeError("disk on fire")

    with pytest.raises(RuntimeError, match="fire"):
        write_atomically(path, fail)
    assert path.read_text() == "old"
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    write_text(path, "old")
    script = f"""
import os, signal
from autoshard.files import write_atomically
def write(temporary):
    temporary.write_text("half")
    os.kill(os.getpid(), signal.SIGKILL)
write_atomically({str(path)!r}, write)
"""
    root = Path(__file__).parents[2]
    done = subprocess.run([sys.executable, "-c", script], cwd=root, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert path.read_text() == "old"


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_permissions_follow_the_umask(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_text(tmp_path / "file", "text")
        assert os.umask(umask) == umask  # writing put it back
    finally:
        os.umask(before)
    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


def test_text_is_utf8(tmp_path: Path) -> None:
    write_text(tmp_path / "c.txt", "größer")
    assert read_text(tmp_path / "c.txt", "note") == "größer"


def test_a_mistyped_path_makes_no_folders(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"the folder .*b does not exist; remedy: create it"):
        write_text(tmp_path / "a" / "b" / "c.txt", "text")
    assert list(tmp_path.iterdir()) == []


def test_places_that_cannot_be_written_are_input_errors(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    for path in (tmp_path / "file" / "below", tmp_path / "folder", tmp_path / ("x" * 300)):
        with pytest.raises(InputError, match="cannot write"):
            write_text(path, "text")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "folder"]


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"plan .*nowhere.json does not exist"):
        read_text(tmp_path / "nowhere.json", "plan")
    with pytest.raises(InputError, match="cannot read"):
        read_text(tmp_path, "plan")
    (tmp_path / "binary").write_bytes(b"ab\xff")
    with pytest.raises(InputError, match="0xff at offset 2"):
        read_text(tmp_path / "binary", "plan")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1, column 1"),
        ('{"a": 1,\n}', "line 2, column 1"),
        ("[" * 100_000, "nested"),
        ("1" * 5000, "not usable"),
    ],
)
def test_what_is_not_json_is_an_input_error(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "x.json").write_text(text)
    with pytest.raises(InputError, match=message):
        read_json(tmp_path / "x.json", "plan")


def test_fingerprints_depend_on_values_not_on_order() -> None:
    assert canonical_json({"b": 1, "a": [1, 2]}) == '{"a":[1,2],"b":1}'
    assert fingerprint({"b": 1, "a": 2}) == fingerprint({"a": 2, "b": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": 1.5})
    assert len(fingerprint(None)) == 16
    with pytest.raises(ValueError, match="not JSON compliant"):
        fingerprint(float("nan"))


def test_nothing_but_a_regular_file_is_replaced(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for place in (pipe, tmp_path, Path("/dev/null")):
        with pytest.raises(InputError, match="cannot write"):
            write_text(place, "text")
    assert pipe.is_fifo()
    assert Path("/dev/null").is_char_device()


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    write_text(link, "new")
    assert link.is_symlink()
    assert target.read_text() == "new"
