"""Files that clients upload and name in later requests: a folder each, which is there as a whole or not at all."""

from __future__ import annotations

import hashlib
import logging
import os
import re
import shutil
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from filelock import FileLock, Timeout

from dgpp_core.api.errors import ConfigError, RequestError
from dgpp_core.config.settings import FileInputs

log = logging.getLogger("dgpp.files")

Purpose = Literal["user_data", "assistants", "vision"]
FileId = Annotated[str, msgspec.Meta(pattern="^file-[0-9a-f]{32}$")]
CONTENT, ABOUT, LOCK = "content", "about.json", ".lock"
LEAST_CHARGE = 4096
"""Bytes of the store that a file takes at least, so that there is a bound on empty ones too."""
_NAME = re.compile(r"file-[0-9a-f]{32}")
_UNFINISHED = re.compile(r"\.(new|gone)-file-[0-9a-f]{32}")
_SETTING = "engine.file_inputs.directory"


class StoredFile(msgspec.Struct, frozen=True, kw_only=True):
    """A file that is kept: its size in bytes, and the Unix time at which it came."""

    id: FileId
    object: Literal["file"] = "file"
    bytes: Annotated[int, msgspec.Meta(ge=0)]
    created_at: int
    filename: str
    purpose: Purpose
    status: Literal["processed"] = "processed"
    status_details: None = None


class About(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What stands beside a file's bytes; ``sha256`` is their digest in hexadecimal."""

    file: StoredFile
    sha256: str


class FileStore:
    """Keeps files up to ``limits.max_storage_bytes``, in ``limits.directory`` or in a folder that ends with the store.

    A file is one folder, written under another name and renamed once it is on the disk; what an interrupted upload or
    deletion left is removed at the next start. Paths are made of ids that were drawn here, never of a client's words.
    Every method may be called by any thread, and may wait for the disk.

    Args:
        random_bytes: for ids.

    Raises:
        ConfigError: the directory cannot be used, or another service uses it.
    """

    def __init__(self, limits: FileInputs, random_bytes: Callable[[int], bytes]) -> None:
        self._limits, self._random_bytes = limits, random_bytes
        self._lock = threading.Lock()
        self._kept: dict[str, About] = {}
        self._charged = 0
        self._closed = False
        self._own: Path | None = None  # made with the first upload: most services get none
        self._held: FileLock | None = None
        if limits.directory:
            self._use(Path(limits.directory).expanduser())

    def _use(self, folder: Path) -> None:
        """Keep files in ``folder`` from now on, and those that are there."""
        where = f"{_SETTING}={folder}"
        try:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._held = FileLock(folder / LOCK, timeout=0, thread_local=False)  # opened and closed by two threads
            self._held.acquire()
            self._find(folder)
        except Timeout:
            hint = "give each service a directory of its own"
            raise ConfigError("another service keeps files here", where=where, hint=hint) from None
        except OSError as error:
            if self._held is not None:
                self._held.release()
            raise ConfigError(
                "files cannot be kept here",
                where=where,
                found=error.strerror or str(error),
                expected="a directory that this user may write to, or one that can be made",
                hint="correct it, or leave the setting empty to keep uploads until the service ends",
            ) from error

    def close(self) -> None:
        """Keep nothing more. A folder of its own is removed."""
        with self._lock:
            self._closed = True
        if self._held is not None:
            self._held.release()
        if self._own is not None:
            shutil.rmtree(self._own, ignore_errors=True)

    @property
    def _folder(self) -> Path:
        if self._limits.directory:
            return Path(self._limits.directory).expanduser()
        with self._lock:
            if self._own is None:
                self._own = Path(tempfile.mkdtemp("-files", "dgpp-"))
            return self._own

    @property
    def count(self) -> int:
        """Files that are kept."""
        return len(self._kept)

    @property
    def charged(self) -> int:
        """Bytes that count against ``max_storage_bytes``."""
        return self._charged

    def add(self, filename: str, purpose: Purpose, data: bytes, created_at: int) -> StoredFile:
        """Keep ``data``; once this returns, the file outlasts a crash.

        Raises:
            RequestError: 413 `file_storage_full`, 500 `file_processing_failed` where the disk is at fault, 503.
        """
        charge = _charge(len(data))
        with self._lock:
            self._check_open()
            if self._charged + charge > (most := self._limits.max_storage_bytes):
                what = f"{self._charged} of {most} bytes are in use, which leaves no room for {charge} more"
                hint = "delete files, or raise engine.file_inputs.max_storage_bytes"
                raise RequestError(what, status=413, param="file", code="file_storage_full", hint=hint)
            self._charged += charge
        number = f"file-{self._random_bytes(16).hex()}"
        file = StoredFile(id=number, bytes=len(data), created_at=created_at, filename=filename, purpose=purpose)
        about = About(file=file, sha256=hashlib.sha256(data).hexdigest())
        try:
            self._write(about, data)
        except OSError as error:
            with self._lock:
                self._charged -= charge
            raise _disk_failed("kept", error) from error
        with self._lock:
            self._kept[number] = about
        return file

    def all(self) -> tuple[StoredFile, ...]:
        """Every file, the oldest first."""
        with self._lock:
            return tuple(about.file for about in self._kept.values())

    def get(self, number: str, param: str) -> StoredFile:
        """The file with the id ``number``; ``param`` is the field that names it.

        Raises:
            RequestError: 404 `file_not_found`.
        """
        return self._about(number, param).file

    def read(self, number: str, param: str) -> tuple[StoredFile, bytes]:
        """A file with its bytes.

        Raises:
            RequestError: 404 `file_not_found`, 500 `file_processing_failed` where they are not those that were sent.
        """
        about = self._about(number, param)
        path = self._folder / about.file.id
        try:
            data = (path / CONTENT).read_bytes()
        except OSError as error:
            self._about(number, param)  # it may just have been deleted
            raise _disk_failed("read", error) from error
        if fault := _difference(about, data):
            log.error("%s", _damaged(path, fault))
            what = f"`{param}`: the file {about.file.id} was damaged after it came"
            raise RequestError(what, status=500, param=param, code="file_processing_failed", hint="upload it again")
        return about.file, data

    def delete(self, number: str, param: str) -> None:
        """Forget a file.

        Raises:
            RequestError: as `get`, and 500 `file_processing_failed` where the disk is at fault.
        """
        with self._lock:
            self._check_open()
            about = self._kept.pop(number, None)
        if about is None:
            raise _not_found(number, param)
        folder = self._folder
        gone = folder / f".gone-{about.file.id}"
        try:
            os.rename(folder / about.file.id, gone)
            _sync(folder)
            shutil.rmtree(gone)
        except FileNotFoundError:
            log.warning("%s was gone before it was deleted", folder / about.file.id)
        except OSError as error:
            raise _disk_failed("deleted", error) from error
        with self._lock:
            self._charged -= _charge(about.file.bytes)

    def _about(self, number: str, param: str) -> About:
        with self._lock:
            self._check_open()
            about = self._kept.get(number)
        if about is None:
            raise _not_found(number, param)
        return about

    def _check_open(self) -> None:
        if self._closed:
            raise RequestError("the server is shutting down", status=503, code="server_shutdown")

    def _write(self, about: About, data: bytes) -> None:
        folder = self._folder
        new = folder / f".new-{about.file.id}"
        try:
            new.mkdir(mode=0o700)
            for name, content in ((CONTENT, data), (ABOUT, msgspec.json.encode(about))):
                with open(new / name, "xb") as file:
                    file.write(content)
                    file.flush()
                    os.fsync(file.fileno())
            _sync(new)
            os.rename(new, folder / about.file.id)
            _sync(folder)
        except OSError:
            shutil.rmtree(new, ignore_errors=True)
            raise

    def _find(self, folder: Path) -> None:
        """Take up what is there. Damaged files are named and left where they are; what is not ours is left alone."""
        found = []
        for path in folder.iterdir():
            if _UNFINISHED.fullmatch(path.name):
                shutil.rmtree(path)
            elif _NAME.fullmatch(path.name):
                try:
                    found.append(_checked(path))
                except (OSError, ValueError) as error:
                    log.warning("%s", _damaged(path, str(error)))
        for about in sorted(found, key=lambda about: (about.file.created_at, about.file.id)):
            self._kept[about.file.id] = about
            self._charged += _charge(about.file.bytes)
        if found:
            log.info("%d files are kept in %s", len(found), folder)


def _checked(path: Path) -> About:
    about = msgspec.json.decode((path / ABOUT).read_bytes(), type=About)
    if about.file.id != path.name:
        raise ValueError(f"{ABOUT} is of {about.file.id}")
    if fault := _difference(about, (path / CONTENT).read_bytes()):
        raise ValueError(fault)
    return about


def _difference(about: About, data: bytes) -> str:
    """What is wrong with the bytes of a file, if anything."""
    if len(data) != about.file.bytes:
        return f"{len(data)} bytes where {ABOUT} says {about.file.bytes}"
    return "" if hashlib.sha256(data).hexdigest() == about.sha256 else f"other bytes than those that {ABOUT} is of"


def _damaged(path: Path, found: str) -> str:
    hint = "restore the folder from a copy, or remove it; until then the id is not served"
    return ConfigError("a kept file is damaged", where=str(path), found=found, hint=hint).line()


def _charge(size: int) -> int:
    return max(size, LEAST_CHARGE)


def _sync(folder: Path) -> None:
    """Make what was renamed or made in ``folder`` outlast a crash."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _not_found(number: str, param: str) -> RequestError:
    shown = number if len(number) <= 60 else number[:57] + "..."
    what = f"`{param}`: no file has the id {shown!r}"
    return RequestError(what, status=404, param=param, code="file_not_found", hint="GET /v1/files lists what is kept")


def _disk_failed(verb: str, error: OSError) -> RequestError:
    log.error("a file could not be %s: %s", verb, error)
    what = f"the file could not be {verb}: {error.strerror or type(error).__name__}"
    return RequestError(what, status=500, param="file", code="file_processing_failed")
