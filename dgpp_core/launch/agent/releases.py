"""Releases on a node: folders side by side, each as its manifest says, and a link to the one that is used."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import socket
import tarfile
from pathlib import Path, PurePosixPath
from typing import Any

MANIFEST, DIGESTS, CURRENT = "MANIFEST.json", "MANIFEST.sha256", "current"
_PIECE = 1 << 20


def releases(folder: str) -> dict[str, Any]:
    """What is installed.

    Returns:
        ``versions``, by name the digest of the list of digests; ``current``, empty for none.
    """
    place = Path(os.path.expanduser(folder))
    found = {path.parent.name: _digest(path) for path in sorted(place.glob("*/" + DIGESTS)) if _counts(path.parent)}
    current = os.readlink(place / CURRENT) if (place / CURRENT).is_symlink() else ""
    return {"versions": found, "current": current}


def prepare(folder: str) -> str:
    """Make the folder; its absolute path."""
    place = Path(os.path.expanduser(folder))
    place.mkdir(parents=True, exist_ok=True)
    return str(place)


def unpack(folder: str, archive: str, digest: str, version: str) -> None:
    """Install an archive that was put beside the releases, and remove it. Nodes may share the folder.

    Args:
        digest: SHA-256 of the archive.

    Raises:
        ValueError: it arrived damaged, or a file is not as the manifest says.
        OSError: there is another release of that version.
    """
    place = Path(os.path.expanduser(folder))
    source, target, fresh = place / archive, place / version, place / f".new-{socket.gethostname()}-{os.getpid()}"
    try:
        if (found := _digest(source)) != digest:
            raise ValueError(f"the archive arrived damaged: {found} and not {digest}")
        _extract(source, fresh)
        if problems := _problems(fresh, version):
            raise ValueError("; ".join(problems))
        try:
            fresh.rename(target)
        except OSError:
            if not target.is_dir() or _digest(target / DIGESTS) != _digest(fresh / DIGESTS):
                raise
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        with contextlib.suppress(FileNotFoundError):
            source.unlink()


def verify(folder: str, version: str) -> list[str]:
    """What is not as the manifest says: files that are missing, changed or unknown."""
    return _problems(Path(os.path.expanduser(folder)) / version, version)


def activate(folder: str, version: str) -> None:
    """Point ``current`` at a version, in one step.

    Raises:
        FileNotFoundError: there is no such version.
    """
    place = Path(os.path.expanduser(folder))
    (place / version / MANIFEST).stat()
    fresh = place / f".new-{CURRENT}-{socket.gethostname()}-{os.getpid()}"
    fresh.symlink_to(version)
    fresh.replace(place / CURRENT)


def digests(folder: str) -> dict[str, str]:
    """SHA-256 of every file below a folder, by its path in it; links are followed. Empty where there is no folder."""
    place = Path(os.path.expanduser(folder))
    return {str(path.relative_to(place)): _digest(path) for path in sorted(place.rglob("*")) if path.is_file()}


def has(program: str) -> bool:
    """Whether a program is installed."""
    return shutil.which(program) is not None


def _problems(place: Path, version: str) -> list[str]:
    wanted = {}
    for line in (place / DIGESTS).read_text(encoding="utf-8").splitlines():
        digest, _, name = line.partition("  ")
        wanted[name] = digest
    there = {
        str(path.relative_to(place))
        for path in place.rglob("*")
        if (path.is_file() or path.is_symlink()) and "__pycache__" not in path.parts
    } - {DIGESTS}
    problems = [f"{name} is missing" for name in sorted(set(wanted) - there)]
    problems += [f"{name} is not in the manifest" for name in sorted(there - set(wanted))]
    problems += [f"{name} has changed" for name in sorted(there & set(wanted)) if _digest(place / name) != wanted[name]]
    named = json.loads((place / MANIFEST).read_text(encoding="utf-8"))["version"]
    return problems + ([f"it calls itself {named}"] if named != version else [])


def _counts(path: Path) -> bool:
    return not path.is_symlink() and not path.name.startswith(".")


def _digest(path: Path) -> str:
    state = hashlib.sha256()
    with open(path, "rb") as file:
        while piece := file.read(_PIECE):
            state.update(piece)
    return state.hexdigest()


def _extract(source: Path, target: Path) -> None:
    """Plain files and folders below ``target``; anything else in an archive is refused."""
    with tarfile.open(source) as archive:
        for member in archive:
            name = PurePosixPath(member.name)
            if name.is_absolute() or ".." in name.parts or not (member.isfile() or member.isdir()):
                raise ValueError(f"the archive has {member.name}, which is no plain file below it")
            if member.isfile():
                path = target.joinpath(*name.parts)
                path.parent.mkdir(parents=True, exist_ok=True)
                data = archive.extractfile(member)
                assert data is not None, "it is a file"
                with open(path, "wb") as file:
                    shutil.copyfileobj(data, file, _PIECE)
                path.chmod(0o755 if member.mode & 0o100 else 0o644)
