"""Writing safetensors files whose tensors are known beforehand by name, dtype and shape, in any order and at once.

The format: see `dgpp_core.checkpoint.headers`. Wider dtypes come first in a file, so that every tensor is aligned.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import torch
from torch import Tensor

from dgpp_core.checkpoint.headers import DTYPE_BITS, SINGLE


class Slot(msgspec.Struct, frozen=True):
    """A tensor that will be written."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of it."""
        return math.prod(self.shape) * DTYPE_BITS[self.dtype] // 8


def divide(groups: Iterable[Sequence[Slot]], shard_bytes: int) -> list[list[Slot]]:
    """Groups of tensors over files of at most ``shard_bytes``; a group that is larger has a file to itself."""
    shards: list[list[Slot]] = [[]]
    filled = 0
    for group in groups:
        size = sum(slot.nbytes for slot in group)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].extend(group)
        filled += size
    return shards


class ShardWriter:
    """The files of a checkpoint, open for tensors. `write` may be called from several threads.

    Args:
        folder: where they are made.
        shards: the tensors of each file.
    """

    def __init__(self, folder: Path, shards: Sequence[Sequence[Slot]]) -> None:
        self.files: dict[str, str] = {}
        self._places: dict[str, tuple[int, int]] = {}
        self._open: list[int] = []
        for number, slots in enumerate(shards, 1):
            name = SINGLE if len(shards) == 1 else f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            self._start(folder / name, sorted(slots, key=lambda slot: -DTYPE_BITS[slot.dtype]))
            self.files.update({slot.name: name for slot in slots})

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        for file in self._open:
            os.close(file)

    def _start(self, path: Path, slots: Sequence[Slot]) -> None:
        header: dict[str, object] = {"__metadata__": {"format": "pt"}}
        end = 0
        for slot in slots:
            start, end = end, end + slot.nbytes
            header[slot.name] = {"dtype": slot.dtype, "shape": slot.shape, "data_offsets": [start, end]}
        raw = json.dumps(header, separators=(",", ":")).encode()
        raw += b" " * (-len(raw) % 8)
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o644)
        self._open.append(file)
        data = 8 + len(raw)
        os.truncate(file, data + end)
        _write_all(file, memoryview(len(raw).to_bytes(8, "little") + raw), 0)
        at = data
        for slot in slots:
            self._places[slot.name] = (file, at)
            at += slot.nbytes

    def write(self, name: str, pieces: Iterable[Tensor]) -> None:
        """Write a tensor; its pieces, flattened, one after the other."""
        file, at = self._places[name]
        for piece in pieces:
            if piece.numel():
                view = piece.contiguous().flatten().view(torch.uint8).numpy().data
                _write_all(file, view, at)
                at += len(view)


def _write_all(file: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(file, data, at)
        data, at = data[done:], at + done
