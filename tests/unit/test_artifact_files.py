"""Artifact folders: whole or absent, checked when read."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from autoshard.artifact_files import CONFIG_FILE, find_artifact, read_artifact, write_artifact
from autoshard.errors import ArtifactError, InputError
from autoshard.files import fingerprint


def write(
    folder: Path, text: str = "weights", card: str = "a card", version: int = 3, **config: object
) -> str:
    return write_artifact(
        folder,
        kind="test-kind",
        version=version,
        config={"size": 1, "seconds": 1.5, **config},
        writers={
            "weights.bin": lambda path: path.write_text(text),
            "card.md": lambda path: path.write_text(card),
        },
        identity=("size", "weights.bin"),
    )


def read(folder: Path) -> dict:
    return read_artifact(folder, kind="test-kind", version=3, what="test artifact")


def test_what_is_written_is_read(tmp_path: Path) -> None:
    written = write(tmp_path / "a")
    config = read(tmp_path / "a")
    assert config["fingerprint"] == written
    assert config["size"] == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]


def test_the_fingerprint_covers_what_decides_and_nothing_else(tmp_path: Path) -> None:
    first = write(tmp_path / "a")
    assert write(tmp_path / "same") == first
    assert write(tmp_path / "slower", seconds=99.0, card="another card") == first
    assert write(tmp_path / "other", text="other weights") != first
    assert write(tmp_path / "larger", size=2) != first
    assert write(tmp_path / "newer", version=4) != first


def test_an_older_artifact_is_replaced_and_something_else_is_not(tmp_path: Path) -> None:
    write(tmp_path / "a", text="old")
    write(tmp_path / "a", text="new")
    read(tmp_path / "a")
    assert (tmp_path / "a" / "weights.bin").read_text() == "new"
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("")
    with pytest.raises(InputError, match="no artifact"):
        write(tmp_path / "mine")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a", "mine"]


def test_a_failing_writer_leaves_the_older_artifact(tmp_path: Path) -> None:
    write(tmp_path / "a", text="old")

    def fail(path: Path) -> None:
        path.write_text("half")
        raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        write_artifact(
            tmp_path / "a",
            kind="test-kind",
            version=3,
            config={},
            writers={"weights.bin": fail},
            identity=("weights.bin",),
        )
    read(tmp_path / "a")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(bytes(data))


def _edit(folder: Path, **values: object) -> None:
    config = json.loads((folder / CONFIG_FILE).read_text())
    (folder / CONFIG_FILE).write_text(json.dumps({**config, **values}))


def _forge(folder: Path) -> None:
    """Change what counts, and give the config a checksum that fits."""
    config = json.loads((folder / CONFIG_FILE).read_text())
    forged = {**config, "size": 2}
    forged["checksum"] = fingerprint({k: v for k, v in forged.items() if k != "checksum"})
    (folder / CONFIG_FILE).write_text(json.dumps(forged))


@pytest.mark.parametrize(
    ("harm", "message"),
    [
        (lambda f: _flip(f / "weights.bin"), "weights.bin does not match its checksum"),
        (lambda f: (f / "weights.bin").unlink(), "lacks its file weights.bin"),
        (lambda f: _flip(f / "card.md"), "card.md does not match its checksum"),
        (lambda f: _edit(f, size=2), "altered"),
        (lambda f: _edit(f, seconds=2.5), "altered.*checksum"),
        (lambda f: _edit(f, identity=["size"]), "altered"),
        (lambda f: _edit(f, identity=[["size"]]), "altered"),
        (lambda f: _edit(f, files=[]), "altered"),
        (lambda f: _edit(f, fingerprint="0" * 16), "altered"),
        (_forge, "altered.*fingerprint"),
        (lambda f: _edit(f, version=2), "another format version.*got: 2.*allowed: 3"),
        (lambda f: _edit(f, kind="other"), "is not a test artifact.*other"),
        (lambda f: (f / CONFIG_FILE).write_text("{"), "not JSON"),
        (lambda f: (f / CONFIG_FILE).write_text("[]"), "is not a test artifact"),
        (lambda f: (f / CONFIG_FILE).write_text('{"kind": "test-kind", "version": 3}'), "altered"),
        (lambda f: (f / CONFIG_FILE).unlink(), "does not exist"),
    ],
)
def test_harm_is_noticed(tmp_path: Path, harm, message: str) -> None:
    write(tmp_path / "a")
    harm(tmp_path / "a")
    with pytest.raises(ArtifactError, match=message):
        read(tmp_path / "a")


def test_an_unknown_name_says_what_there_is(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="policy 'nothing' does not exist"):
        find_artifact("nothing", folder="policies", what="policy")
    assert find_artifact(tmp_path, folder="policies", what="policy") == tmp_path
