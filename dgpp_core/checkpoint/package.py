"""A checkpoint out of an installed registry package that carries a GGUF file: checked, converted once, kept."""

from __future__ import annotations

import hashlib
import multiprocessing
import os
import shutil
import tempfile
from importlib import metadata
from multiprocessing.connection import Connection
from pathlib import Path

from filelock import FileLock

from dgpp_core.api.errors import CheckpointError, DgppError
from dgpp_core.api.spec import ModelSpec, PackagedCheckpoint
from dgpp_core.checkpoint.gguf import convert, require_gguf
from dgpp_core.checkpoint.progress import Progress
from dgpp_core.host.child import end_with

DTYPE = "float32"
"""Keeps every value of the file; a narrower one would round once more what was quantised before."""

_PIECE = 1 << 22


def converted_folder(spec: ModelSpec, cache: Path) -> Path:
    """Where the conversion of a model's package is kept: ``cache/NAME-VERSION``."""
    version = spec.package.version if spec.package is not None else ""
    return cache / f"{spec.name}-{version}"


def from_package(spec: ModelSpec, package: PackagedCheckpoint, cache: Path, report: Progress) -> Path:
    """The converted checkpoint of an installed package.

    A second process waits for the first one's conversion; a conversion that is cut off leaves no folder behind that
    could be taken for a whole one.

    Raises:
        CheckpointError: the package is not installed, of another version, or its file is not the one that was checked.
    """
    folder = converted_folder(spec, cache)
    require_gguf()
    source = packaged_file(package)
    try:
        cache.mkdir(parents=True, exist_ok=True)
        with FileLock(cache / f"{folder.name}.lock"):
            if not folder.is_dir():
                _convert(source, folder, package, report)
    except OSError as error:
        raise CheckpointError(
            "cannot write the converted checkpoint",
            where=str(folder),
            found=error.strerror or str(error),
            hint="free some space there, or choose another cache folder",
        ) from error
    return folder


def packaged_file(package: PackagedCheckpoint) -> Path:
    """The package's file, found without importing the package."""
    try:
        distribution = metadata.distribution(package.distribution)
    except metadata.PackageNotFoundError:
        raise CheckpointError("not installed", expected=f"version {package.version}") from None
    if distribution.version != package.version:
        raise CheckpointError("of another version", found=distribution.version, expected=package.version)
    for file in distribution.files or ():
        if file.name.endswith(package.suffix):
            return Path(str(file.locate()))
    raise CheckpointError("without the expected file", expected=f"a file ending in {package.suffix}")


def _convert(source: Path, folder: Path, package: PackagedCheckpoint, report: Progress) -> None:
    if (found := _sha256(source, report)) != package.sha256:
        raise CheckpointError(
            "its file is damaged or was replaced", where=str(source), found=found, expected=package.sha256
        )
    work = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        _convert_apart(source, work, report)
        work.chmod(0o755)
        work.rename(folder)
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _convert_apart(source: Path, work: Path, report: Progress) -> None:
    """Convert in a process of its own: the front end must not keep torch and the weights' pages for its whole life."""
    context = multiprocessing.get_context("spawn")
    here, there = context.Pipe(duplex=False)
    child = context.Process(target=_child, args=(os.getpid(), there, source, work), daemon=True)
    child.start()
    there.close()
    try:
        while isinstance(message := here.recv(), tuple):
            report(*message)
    except EOFError:
        message = CheckpointError("the conversion was ended", where=str(source), hint="is there enough memory?")
    child.join()
    if message is not None:
        raise message


def _child(parent: int, pipe: Connection, source: Path, work: Path) -> None:
    end_with(parent)
    try:
        convert(source, work, DTYPE, lambda *progress: pipe.send(progress))
        pipe.send(None)
    except DgppError as error:
        pipe.send(CheckpointError(error.line(), where=error.where))
    except OSError as error:
        pipe.send(error)


def _sha256(path: Path, report: Progress) -> str:
    total, done, digest = path.stat().st_size, 0, hashlib.sha256()
    with path.open("rb") as file:
        while piece := file.read(_PIECE):
            digest.update(piece)
            done += len(piece)
            report("checking the package", done, total)
    return digest.hexdigest()
