"""The headers of a checkpoint's safetensors files, validated as a whole before anything is allocated.

The format (https://github.com/huggingface/safetensors): a little-endian uint64 N, N bytes of JSON that map each tensor
to dtype, shape and byte range, then the data. Ranges must tile the data: no hole, no overlap, nothing left over.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

from dgpp_core.api.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_HEADER_BYTES = 100_000_000
MAX_RANK = 16
STAGING_BYTES = 1 << 24
"""Read at a time by the loader, so that it needs no second copy of a matrix."""

ROUNDED_ROWS = 1 << 11
"""Of a dense matrix that are rounded to a storage at once: whole scale blocks, and tens of megabytes in float32."""

DTYPE_BITS = {
    "F4": 4, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "BOOL": 8, "U8": 8, "I8": 8, "F16": 16, "BF16": 16, "I16": 16,
    "U16": 16, "F32": 32, "I32": 32, "U32": 32, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip

_NUMBERED = re.compile(r"(?P<stem>.+)-(?P<number>\d{5})-of-(?P<count>\d{5})\.safetensors")
_FRESH = "fetch or copy the checkpoint again"


class FileState(msgspec.Struct, frozen=True):
    """What tells whether an open file is still the one, and as it was: bytes, time of writing in ns, inode."""

    size: int
    written_ns: int
    inode: int

    @classmethod
    def of(cls, file: int) -> FileState:
        """Of an open file; raises `OSError`."""
        status = os.fstat(file)
        return cls(status.st_size, status.st_mtime_ns, status.st_ino)

    def __str__(self) -> str:
        return f"{self.size} bytes, written {self.written_ns} ns, inode {self.inode}"


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a checkpoint: bytes ``start .. end`` of ``file``, row-major.

    ``listed`` is False where the checkpoint does not say that the file is one of its own (see `read_headers`).
    ``state`` is the file's when its header was read: of another, the bytes mean nothing.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int
    state: FileState
    listed: bool = True

    @property
    def nbytes(self) -> int:
        """Bytes as stored."""
        return self.end - self.start

    def require_unchanged(self, file: int) -> None:
        """Raise `CheckpointError` if the open ``file`` is not as its header was read, and `OSError` as fstat does."""
        if (found := FileState.of(file)) != self.state:
            raise CheckpointError(
                f"{self.file.name} changed since its header was read",
                where=f"{self.file}, tensor {self.name}",
                found=str(found),
                expected=str(self.state),
                hint="let whatever writes the checkpoint end, and start again",
            )


def read_headers(folder: Path) -> Mapping[str, TensorEntry]:
    """Every tensor of the checkpoint in ``folder``, by name.

    The files are those of ``model.safetensors.index.json``, else ``model.safetensors``, else one complete numbered set.
    Any other ``*.safetensors`` beside them is read too, since an index may be older than a file that was added to it
    (``mtp.safetensors``); its entries are not ``listed``, and give way to a listed tensor of their name.

    Raises:
        CheckpointError: naming file and tensor: a file that is missing, unreadable, short, long or damaged, byte ranges
            that overlap, leave holes or do not fit dtype and shape, an index and files that do not say the same.
    """
    placed = _read_index(folder / INDEX) if (folder / INDEX).is_file() else None
    files = sorted(set(placed.values())) if placed is not None else _unindexed_files(folder)
    entries: dict[str, TensorEntry] = {}
    for name in files:
        for entry in _read_file(folder / name):
            _add(entries, entry)
            if placed is not None and placed.get(entry.name) != name:
                raise CheckpointError(
                    f"the tensor {entry.name} is not where the index says",
                    where=str(folder / INDEX),
                    found=f"it is in {name}",
                    expected=placed.get(entry.name) or "an entry in weight_map",
                    hint=_FRESH,
                )
    for tensor, name in (placed or {}).items():
        if tensor not in entries:
            raise CheckpointError(
                f"the index lists the tensor {tensor}, which its file does not hold",
                where=str(folder / name),
                hint=_FRESH,
            )
    return {**_others(folder, files), **entries}


def _add(entries: dict[str, TensorEntry], entry: TensorEntry) -> None:
    if (twin := entries.get(entry.name)) is not None:
        raise CheckpointError(
            f"the tensor {entry.name} is in two files", where=f"{twin.file} and {entry.file}", hint=_FRESH
        )
    entries[entry.name] = entry


def _others(folder: Path, files: list[str]) -> dict[str, TensorEntry]:
    """The tensors of every file that is not one of ``files``."""
    found: dict[str, TensorEntry] = {}
    for path in sorted(folder.glob("*.safetensors")):
        for entry in _read_file(path) if path.name not in files else ():
            _add(found, msgspec.structs.replace(entry, listed=False))
    return found


def _read_index(path: Path) -> dict[str, str]:
    try:
        content = parse_object(path.read_bytes(), str(path))
    except OSError as error:
        raise unreadable(path, error) from error
    placed = content.get("weight_map")
    if not isinstance(placed, dict) or not placed:
        raise CheckpointError("the index has no weight_map", where=str(path), found=type(placed).__name__, hint=_FRESH)
    for tensor, name in placed.items():
        if not isinstance(name, str) or name != Path(name).name or not name.endswith(".safetensors"):
            raise CheckpointError(
                f"the index places the tensor {tensor} in something that is not a safetensors file beside it",
                where=str(path),
                found=repr(name),
                hint=_FRESH,
            )
        if not (path.parent / name).is_file():
            raise CheckpointError(
                f"the index names a file that is not there: {name}",
                where=f"{path}, tensor {tensor}",
                hint="the download is incomplete: " + _FRESH,
            )
    _check_siblings(path, set(placed.values()))
    return placed


def _check_siblings(path: Path, named: set[str]) -> None:
    """Refuse a shard that belongs to an indexed set by its own numbering and that the index does not name."""
    sets = {_set_of(name) for name in named} - {None}
    for sibling in sorted(path.parent.glob("*.safetensors")):
        if sibling.name not in named and _set_of(sibling.name) in sets:
            raise CheckpointError(
                f"the index names no tensor of the shard {sibling.name}, which is one of its set",
                where=str(path),
                hint=_FRESH,
            )


def _set_of(name: str) -> tuple[str, int] | None:
    match = _NUMBERED.fullmatch(name)
    return (match["stem"], int(match["count"])) if match else None


def _unindexed_files(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():
        return [SINGLE]
    numbered = sorted(path.name for path in folder.glob("*.safetensors") if _set_of(path.name))
    if not numbered:
        raise CheckpointError(
            "no weights in the checkpoint folder", where=str(folder), expected=f"{SINGLE}, or shards and {INDEX}"
        )
    if len({_set_of(name) for name in numbered}) != 1:
        raise CheckpointError(
            "several sets of shards and no index that says which to load",
            where=str(folder),
            found=", ".join(numbered),
            expected=f"one set, or {INDEX}",
        )
    stem, count = _set_of(numbered[0]) or ("", 0)
    for number in range(1, count + 1):
        if (name := f"{stem}-{number:05d}-of-{count:05d}.safetensors") not in numbered:
            raise CheckpointError(f"the shard {name} is missing", where=str(folder / name), hint=_FRESH)
    return numbered


def unreadable(path: Path, error: OSError) -> CheckpointError:
    """The error for a file of a checkpoint that the system does not let us read: a folder, a link to nothing."""
    hint = f"{_FRESH}, or remove what lies there"
    return CheckpointError(f"cannot read {path.name}", where=str(path), found=error.strerror or str(error), hint=hint)


def _read_file(path: Path) -> list[TensorEntry]:
    where = str(path)
    try:
        raw, state = _header(path)
    except OSError as error:
        raise unreadable(path, error) from error
    header, length = parse_object(raw, where), len(raw)
    _check_metadata(header.pop("__metadata__", {}), where)
    data = 8 + length
    entries = [_entry(name, fields, path, data, state) for name, fields in header.items()]
    entries.sort(key=lambda entry: (entry.start, entry.end))
    _check_tiling(entries, where, data, state.size)
    return entries


def _header(path: Path) -> tuple[bytes, FileState]:
    """The JSON of a file, and what the file was like before it was read."""
    with path.open("rb") as file:
        size = (state := FileState.of(file.fileno())).size
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > MAX_HEADER_BYTES or 8 + length > size:
            raise CheckpointError(
                "the header of the safetensors file is cut off or its length is absurd",
                where=str(path),
                found=f"a header of {length} bytes in a file of {size} bytes" if size >= 8 else f"{size} bytes",
                expected=f"a header of at most {min(MAX_HEADER_BYTES, max(size - 8, 0))} bytes",
                hint=_FRESH,
            )
        return file.read(length), state


def _check_metadata(metadata: object, where: str) -> None:
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise CheckpointError("__metadata__ is not a map of strings", where=where, hint=_FRESH)


def _entry(name: str, fields: Any, path: Path, data: int, state: FileState) -> TensorEntry:
    def refuse(what: str, found: object, expected: str) -> CheckpointError:
        return CheckpointError(
            f"the tensor {name} has {what}", where=str(path), found=str(found)[:200], expected=expected, hint=_FRESH
        )

    if not isinstance(fields, dict) or set(fields) != {"dtype", "shape", "data_offsets"}:
        raise refuse("a malformed entry", fields, "dtype, shape and data_offsets")
    dtype, shape, offsets = fields["dtype"], fields["shape"], fields["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        raise refuse("an unknown dtype", repr(dtype), "one of " + ", ".join(DTYPE_BITS))
    if not _naturals(shape) or len(shape) > MAX_RANK:
        raise refuse("a malformed shape", shape, f"at most {MAX_RANK} sizes, each 0 or more")
    if not _naturals(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise refuse("malformed data_offsets", offsets, "two offsets in ascending order")
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits != 8 * (offsets[1] - offsets[0]):
        raise refuse(
            "a byte range that does not fit its dtype and shape",
            f"{offsets[1] - offsets[0]} bytes",
            f"{-(-bits // 8)} bytes for {dtype} {shape}",
        )
    return TensorEntry(
        name=name,
        dtype=dtype,
        shape=tuple(shape),
        file=path,
        start=data + offsets[0],
        end=data + offsets[1],
        state=state,
    )


def _naturals(value: object) -> bool:
    return isinstance(value, list) and all(type(item) is int and item >= 0 for item in value)


def _check_tiling(entries: list[TensorEntry], where: str, data: int, size: int) -> None:
    at, before = data, "the header"
    for entry in entries:
        if entry.start != at:
            fault = "overlaps" if entry.start < at else "leaves a hole after"
            raise CheckpointError(
                f"the tensor {entry.name} {fault} {before}",
                where=where,
                found=f"it starts at byte {entry.start}",
                expected=f"byte {at}",
                hint=_FRESH,
            )
        if entry.end > size:
            raise CheckpointError(
                f"the file is short: the tensor {entry.name} is cut off",
                where=where,
                found=f"{size} bytes",
                expected=f"{max(e.end for e in entries)} bytes",
                hint=_FRESH,
            )
        at, before = entry.end, f"the tensor {entry.name}"
    if at != size:
        raise CheckpointError(
            "the file is longer than its header says",
            where=where,
            found=f"{size} bytes",
            expected=f"{at} bytes",
            hint=_FRESH,
        )


def parse_object(raw: bytes, where: str) -> dict[str, Any]:
    """A JSON object in UTF-8 in which no object has a key twice; anything else is a `CheckpointError`."""

    def pairs(items: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in items:
            if key in found:
                raise CheckpointError(f"the key {key!r} is given twice", where=where, hint=_FRESH)
            found[key] = value
        return found

    try:
        content = json.loads(raw.decode("utf-8"), object_pairs_hook=pairs)
    except (ValueError, RecursionError) as error:
        raise CheckpointError("not valid JSON", where=where, found=str(error), hint=_FRESH) from None
    if not isinstance(content, dict):
        raise CheckpointError("not a JSON object", where=where, found=type(content).__name__, hint=_FRESH)
    return content
