"""The file of a resident image: tensors one after the other, each in pieces with a digest, and a directory of them.

Layout: a prologue of `PROLOGUE` bytes (magic, place and digest of the directory, digest of the prologue, zeros), the
tensors at multiples of `ALIGNMENT`, the directory (msgpack of `Directory`). The prologue is written last and the file
gets its name when all of it is on the disk, so that what has the name is whole; what was damaged later, a digest tells.
"""

from __future__ import annotations

import hashlib
import os
import queue
import struct
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from dgpp_core.api.errors import CheckpointError
from dgpp_core.checkpoint.image_key import ImageKey
from dgpp_core.checkpoint.reader import TORCH_DTYPES
from dgpp_core.formats.described import Description

MAGIC = b"dgpp image 1\n\0\0\0"
PROLOGUE = 4096
ALIGNMENT = 256
PIECE = 1 << 24
"""Bytes that share a digest: SHA-256, 1.7 GB/s on one core with SHA instructions, so eight readers pass 13 GB/s."""

MOST_WORKERS = 8
_FIELDS = struct.Struct("<16sQQ32s")
_DIGEST = 32

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (*TORCH_DTYPES.values(), torch.uint16, torch.uint32)}


class ImageError(CheckpointError):
    """A resident image is torn, damaged, stale or another's; the checkpoint is loaded instead."""


class StoredTensor(msgspec.Struct, frozen=True):
    """A tensor of the image: ``nbytes`` from byte ``offset`` on, row-major, with the digests of its pieces."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    digests: tuple[bytes, ...]


class Entry(msgspec.Struct, frozen=True):
    """What is kept of a parameter: its one tensor, its stored matrix, or a form that an operation made of it."""

    target: str
    form: str
    tensors: tuple[StoredTensor, ...]


class Directory(msgspec.Struct, frozen=True):
    """All that the image says of itself; ``matrices`` are the shapes of every stored matrix."""

    key: ImageKey
    entries: tuple[Entry, ...]
    matrices: Mapping[str, Description]


_Pending = tuple[StoredTensor, list[Future[bytes]]]
"""A tensor, and its digests when they are there."""


def _with_digests(pending: _Pending) -> StoredTensor:
    stored, digests = pending
    return msgspec.structs.replace(stored, digests=tuple(digest.result() for digest in digests))


class _Buffers:
    """A few pieces of staging memory, and threads that use them."""

    def __init__(self, device: torch.device) -> None:
        count = max(1, min(MOST_WORKERS, len(os.sched_getaffinity(0))))
        self.pool = ThreadPoolExecutor(count, "image")
        self.free: queue.SimpleQueue[Tensor] = queue.SimpleQueue()
        with torch.inference_mode(False):  # used by threads of either mode
            for _ in range(count):
                self.free.put(torch.empty(PIECE, dtype=torch.uint8, pin_memory=device.type == "cuda"))

    def close(self) -> None:
        self.pool.shutdown(cancel_futures=True)


class ImageWriter:
    """Writes an image beside ``path`` and gives it that name at the end.

    Raises:
        OSError: from any method: the file cannot be written.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self._path, self._temporary = path, path.with_name(f".{path.name}.tmp")
        self._file = os.open(self._temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._end = PROLOGUE
        self._buffers = _Buffers(device)
        self._entries: list[tuple[str, str, list[_Pending]]] = []
        self._failure: OSError | None = None

    @property
    def written(self) -> int:
        """Bytes so far."""
        return self._end

    def add(self, target: str, form: str, tensors: Mapping[str, Tensor]) -> None:
        """Write an entry; the tensors may be changed or freed when this returns."""
        self._entries.append((target, form, [self._add(name, tensor) for name, tensor in tensors.items()]))

    def _add(self, name: str, tensor: Tensor) -> _Pending:
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in DTYPES:
            raise ImageError(f"a resident image has no dtype {dtype}", where=name)
        offset = -(-self._end // ALIGNMENT) * ALIGNMENT
        data = tensor.contiguous().flatten().view(torch.uint8) if tensor.numel() else torch.empty(0, dtype=torch.uint8)
        digests = []
        for start in range(0, data.numel(), PIECE):
            if self._failure is not None:
                raise self._failure
            piece = data[start : start + PIECE]
            staging = self._buffers.free.get()
            staging[: piece.numel()].copy_(piece)
            digests.append(self._buffers.pool.submit(self._write, staging, piece.numel(), offset + start))
        self._end = offset + data.numel()
        return StoredTensor(name, dtype, tuple(tensor.shape), offset, data.numel(), ()), digests

    def _write(self, staging: Tensor, count: int, offset: int) -> bytes:
        try:
            view = staging.numpy().data[:count]
            _write_all(self._file, view, offset)
            return hashlib.sha256(view).digest()
        except OSError as error:
            self._failure = error
            raise
        finally:
            self._buffers.free.put(staging)

    def commit(self, key: ImageKey, matrices: Mapping[str, Description]) -> None:
        """Finish the file and name it."""
        entries = tuple(
            Entry(
                target, form, tuple(msgspec.structs.replace(t, digests=tuple(f.result() for f in d)) for t, d in held)
            )
            for target, form, held in self._entries
        )
        directory = msgspec.msgpack.encode(Directory(key, entries, matrices))
        _write_all(self._file, memoryview(directory), self._end)
        fields = _FIELDS.pack(MAGIC, self._end, len(directory), hashlib.sha256(directory).digest())
        prologue = (fields + hashlib.sha256(fields).digest()).ljust(PROLOGUE, b"\0")
        os.fsync(self._file)
        _write_all(self._file, memoryview(prologue), 0)
        os.fsync(self._file)
        os.rename(self._temporary, self._path)
        self.close()
        _sync_folder(self._path.parent)

    def close(self) -> None:
        """Give up what was not committed."""
        self._buffers.close()
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        self._temporary.unlink(missing_ok=True)


class ImageReader:
    """An open image whose directory is whole.

    Raises:
        ImageError: no image, torn or damaged.
    """

    def __init__(self, path: Path, device: torch.device) -> None:
        self.path, self._device = path, device
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.directory = self._read_directory()
        except BaseException:
            os.close(self._file)
            raise
        self._buffers = _Buffers(device)

    def _read_directory(self) -> Directory:
        size = os.fstat(self._file).st_size
        prologue = os.pread(self._file, PROLOGUE, 0)
        used = _FIELDS.size + _DIGEST
        if len(prologue) < PROLOGUE or not prologue.startswith(MAGIC):
            raise self.fault("it has no prologue of this version")
        if hashlib.sha256(prologue[: _FIELDS.size]).digest() != prologue[_FIELDS.size : used] or any(prologue[used:]):
            raise self.fault("its prologue is damaged")
        _, start, length, digest = _FIELDS.unpack(prologue[: _FIELDS.size])
        if start + length != size:
            raise self.fault("it is torn", found=f"{size} bytes", expected=f"{start + length} bytes")
        raw = os.pread(self._file, length, start)
        if hashlib.sha256(raw).digest() != digest:
            raise self.fault("its directory is damaged")
        try:
            return msgspec.msgpack.decode(raw, type=Directory)
        except msgspec.MsgspecError as error:
            raise self.fault("its directory is not that of this version", found=str(error)) from error

    def fault(self, what: str, *, found: str = "", expected: str = "") -> ImageError:
        """An error about this image."""
        return ImageError(
            f"the resident image cannot be used: {what}", where=str(self.path), found=found, expected=expected
        )

    def load(self, entry: Entry) -> dict[str, Tensor]:
        """The entry's tensors on the device.

        Raises:
            ImageError: a piece is not what was written.
        """
        made = {t.name: torch.empty(t.shape, dtype=DTYPES[t.dtype], device=self._device) for t in entry.tensors}
        jobs = []
        for stored in entry.tensors:
            into = made[stored.name].flatten().view(torch.uint8) if stored.nbytes else made[stored.name]
            for number, digest in enumerate(stored.digests):
                at = number * PIECE
                place = into[at : at + PIECE]
                jobs.append(self._buffers.pool.submit(self._read, place, stored.offset + at, digest))
        wait(jobs)
        if not all(job.result() for job in jobs):
            raise self.fault(f"a piece of the parameter {entry.target} is damaged")
        return made

    def _read(self, place: Tensor, offset: int, digest: bytes) -> bool:
        """Read a piece; whether it is what was written."""
        staging = self._buffers.free.get()
        try:
            view, got = staging.numpy().data[: place.numel()], 0
            while got < len(view) and (more := os.preadv(self._file, [view[got:]], offset + got)):
                got += more
            if got < len(view) or hashlib.sha256(view).digest() != digest:
                return False
            with torch.inference_mode():
                place.copy_(staging[: place.numel()])
            return True
        except OSError:
            return False
        finally:
            self._buffers.free.put(staging)

    def close(self) -> None:
        """Close the file and free the buffers."""
        self._buffers.close()
        os.close(self._file)


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done


def _sync_folder(folder: Path) -> None:
    file = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
