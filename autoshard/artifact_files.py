"""Folders of trained artifacts: written whole or not at all, checked when read.

A policy or cost model travels as a folder: `config.json` beside weights and exported programs.
Writers are in `agents` and `cost_net`, readers in `autoshard.policies` and
`autoshard.cost_models`. The config holds facts and three kinds of marks:

* `files`, the SHA-256 of every other file, and `checksum`, of the config itself: whatever is
  altered is noticed;
* `fingerprint`, of the weights and of the facts that decide what is computed (`identity` lists
  both): the same training gives the same fingerprint, on whatever day and in whatever folder.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from autoshard.errors import ArtifactError, InputError, listed, quoted, readable
from autoshard.files import fingerprint, read_json
from autoshard.programs import load_program
from autoshard.suggestions import did_you_mean

CONFIG_FILE = "config.json"
#: Artifacts that are shipped with the package, one folder per kind.
SHIPPED_FOLDER = Path(__file__).parent / "artifacts"


def shipped_names(folder: str) -> tuple[str, ...]:
    """Names of the shipped artifacts in a folder such as `policies`."""
    root = SHIPPED_FOLDER / folder
    return tuple(sorted(p.name for p in root.glob("*") if (p / CONFIG_FILE).is_file()))


def find_artifact(path_or_name: str | Path, *, folder: str, what: str) -> Path:
    """The folder of an artifact: a path if one exists there, else a shipped name.

    Args:
        path_or_name: where to look.
        folder: the shipped artifacts' folder, such as `policies`.
        what: such as "policy", for messages.

    Raises:
        ArtifactError: neither a folder nor a shipped name.
    """
    path = Path(path_or_name)
    if path.is_dir():
        return path
    names = shipped_names(folder)
    if str(path_or_name) in names:
        return SHIPPED_FOLDER / folder / str(path_or_name)
    raise ArtifactError(
        f"{what} {str(path_or_name)!r} does not exist",
        allowed=f"the folder of an exported {what}, or a shipped one: {', '.join(names) or 'none'}",
        remedy=did_you_mean(path_or_name, names) or "check the path",
    )


def write_artifact(
    folder: str | Path,
    *,
    kind: str,
    version: int,
    config: Mapping[str, Any],
    writers: Mapping[str, Callable[[Path], None]],
    identity: Sequence[str],
) -> str:
    """Write an artifact folder beside its place, then move it there in one step.

    Args:
        folder: where it goes; an older artifact there is replaced.
        kind: such as `autoshard-policy`.
        version: of the format of this kind.
        config: facts in plain JSON values.
        writers: what fills each further file, by file name.
        identity: keys of `config` and names of files that the fingerprint covers; kind and
            version always count.

    Returns:
        The artifact's fingerprint.

    Raises:
        InputError: the place is not writable, or holds something else than an artifact.
    """
    folder = Path(folder)
    if folder.exists() and not (folder / CONFIG_FILE).is_file() and any(folder.iterdir()):
        raise InputError(
            f"{folder} exists and is no artifact", remedy="choose another folder or empty it"
        )
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    except OSError as error:
        raise InputError(
            f"cannot write {folder}", got=error.strerror, remedy="choose a writable folder"
        ) from error
    try:
        umask = os.umask(0)
        os.umask(umask)
        fresh.chmod(0o777 & ~umask)  # mkdtemp makes folders private
        for name, write in writers.items():
            write(fresh / name)
            (fresh / name).chmod(0o666 & ~umask)  # some writers make files private
        whole = seal(
            {
                "kind": kind,
                "version": version,
                **config,
                "files": {name: _sha256(fresh / name) for name in sorted(writers)},
                "identity": list(identity),
            }
        )
        (fresh / CONFIG_FILE).write_text(json.dumps(whole, indent=2) + "\n", encoding="utf-8")
        _replace_folder(fresh, folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
    return str(whole["fingerprint"])


def seal(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config with its fingerprint and checksum, new ones if it had any.

    Args:
        config: facts, with `files` and `identity`.
    """
    whole = {key: value for key, value in config.items() if key not in ("fingerprint", "checksum")}
    whole["fingerprint"] = _identify(whole)
    whole["checksum"] = fingerprint(whole)
    return whole


def _identify(config: Mapping[str, Any]) -> str:
    names = ("kind", "version", *config["identity"])
    return fingerprint({name: {**config, **config["files"]}[name] for name in names})


def _replace_folder(fresh: Path, folder: Path) -> None:
    if not folder.exists():
        fresh.rename(folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}.old.", dir=folder.parent))
    try:
        folder.rename(old / "artifact")
        try:
            fresh.rename(folder)
        except OSError:
            with contextlib.suppress(OSError):
                (old / "artifact").rename(folder)
            raise
    finally:
        shutil.rmtree(old, ignore_errors=True)


def read_artifact(folder: Path, *, kind: str, version: int, what: str) -> dict[str, Any]:
    """Read and check an artifact's config.

    Args:
        folder: the artifact.
        kind: what it must be.
        version: the format version that this code reads.
        what: such as "policy", for messages.

    Returns:
        The config.

    Raises:
        ArtifactError: it is of another kind or version, or a file is missing or altered.
    """
    try:
        config = read_json(folder / CONFIG_FILE, f"{what} config")
    except InputError as error:
        raise ArtifactError(f"{folder} is not a {what}: {error}") from error
    if not isinstance(config, dict) or config.get("kind") != kind:
        got = f"kind {quoted(config.get('kind'))}" if isinstance(config, dict) else quoted(config)
        raise ArtifactError(f"{folder} is not a {what}", got=got, allowed=f"kind {kind!r}")
    if config.get("version") != version:
        raise ArtifactError(
            f"{what} {folder} has another format version",
            got=config.get("version"),
            allowed=version,
            remedy=f"export the {what} again with this version of autoshard",
        )
    _check_config(config, folder, what)
    for name, checksum in config["files"].items():
        path = folder / name
        if Path(name).name != name or not path.is_file():
            raise ArtifactError(
                f"{what} {folder} lacks its file {name}", remedy=f"export the {what} again"
            )
        if _sha256(path) != checksum:
            raise ArtifactError(
                f"{what} {folder} is damaged: {name} does not match its checksum",
                remedy=f"copy or export the {what} again",
            )
    return config


def _check_config(config: Mapping[str, Any], folder: Path, what: str) -> None:
    """Refuse a config that is not as it was written."""
    try:
        sealed = seal(config)
    except (KeyError, TypeError, ValueError):  # parts missing, or NaN: no writer of ours did it
        sealed = {}
    for mark in ("fingerprint", "checksum"):
        if config.get(mark) is None or config[mark] != sealed.get(mark):
            raise ArtifactError(
                f"{what} {folder} was altered: {CONFIG_FILE} does not match its {mark}",
                got=f"{mark} {readable(config.get(mark))} in the file",
                allowed=f"{readable(sealed.get(mark))}, which is what its content gives",
                remedy=f"export the {what} again",
            )


def check_names(
    config: Mapping[str, Any], key: str, names: Sequence[str], folder: Path, what: str
) -> None:
    """Refuse an artifact that reads other features than this version computes.

    Args:
        config: the artifact's.
        key: of the list of names in it, such as `shard_features`.
        names: what this version computes, in order.
        folder: the artifact.
        what: such as "policy", for messages.

    Raises:
        ArtifactError: says which are missing and which are not known.
    """
    given = config.get(key)
    if given == list(names):
        return
    given = [str(name) for name in given] if isinstance(given, list) else []
    missing = [name for name in names if name not in given]
    unknown = [name for name in given if name not in names]
    raise ArtifactError(
        f"{what} {folder} reads other {key} than this version computes",
        got=f"without {listed(missing) or 'none'}, with {listed(unknown) or 'none'} besides"
        if missing or unknown
        else "another order",
        remedy=f"train a {what} with this version, or install the version that made it",
    )


def load_artifact_program(
    folder: Path, config: Mapping[str, Any], name: str, what: str
) -> Callable[..., Any]:
    """Load one exported program of an artifact.

    Args:
        folder: the artifact.
        config: as `read_artifact` returned it.
        name: of the program's file.
        what: such as "policy", for messages.

    Raises:
        ArtifactError: there is no such file, or torch cannot read it.
    """
    if name not in config["files"]:
        raise ArtifactError(
            f"{what} {folder} lacks its file {name}", remedy=f"export the {what} again"
        )
    import torch

    try:
        return load_program(folder / name)
    except Exception as error:
        raise ArtifactError(
            f"{what} {folder} cannot be loaded with torch {torch.__version__}",
            got=str(error)[:200],
            remedy=f"install torch {config.get('torch')} or export the {what} again",
        ) from error


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()
