"""Tables that stay in the checkpoint's files, of which a step reads the rows that its tokens look up.

A table of n-grams is larger than all else of its model, and a token needs a few rows of it. Rows are read, not mapped:
a file that shrinks under a mapping ends the process without a word. What the system keeps of the files in its page
cache is memory that nobody else needs.
"""

from __future__ import annotations

import bisect
import math
import os
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path

import msgspec
import torch
from torch import Tensor

from dgpp_core.api.bindings import Binding, BindingTable
from dgpp_core.api.errors import CheckpointError
from dgpp_core.checkpoint.cuts import cut_ranges
from dgpp_core.checkpoint.gather import Run, StreamGather
from dgpp_core.checkpoint.headers import FileState, TensorEntry, unreadable
from dgpp_core.checkpoint.reader import TORCH_DTYPES, largest


class _File(msgspec.Struct, frozen=True, eq=False):
    """An open file, and what it was like when it was opened."""

    path: Path
    file: FileIO
    state: FileState

    @classmethod
    def open(cls, entry: TensorEntry) -> _File:
        """The file of a tensor, told that rows are read here and there: reading ahead would only fill the cache."""
        try:
            file = FileIO(entry.file, "r")
            entry.require_unchanged(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)
        except OSError as error:
            raise unreadable(entry.file, error) from error
        return cls(entry.file, file, entry.state)

    def check(self) -> None:
        """Raise `CheckpointError` if the file is no longer what it was."""
        if (found := FileState.of(self.file.fileno())) != self.state:
            raise CheckpointError(
                "a file of the checkpoint changed while rows of a table are read from it",
                where=str(self.path),
                found=str(found),
                expected=f"{self.state}, as when its header was read",
                hint="restore the checkpoint and start again",
            )


class FileRows:
    """Implements `dgpp_core.api.model.Rows`: what this rank holds of a table, its parts below each other, in files."""

    def __init__(
        self,
        target: str,
        runs: Sequence[Run],
        rows: int,
        width: int,
        dtypes: tuple[torch.dtype, torch.dtype],
        device: torch.device,
    ) -> None:
        self.target, self._runs, self._width = target, tuple(runs), width
        self._firsts, self._rows = [run.first for run in runs], rows
        self._stored, self.dtype = dtypes
        self._gather = StreamGather(runs, rows, self.row_bytes, device) if device.type == "cuda" else None

    @property
    def row_bytes(self) -> int:
        """Of a row as it is stored."""
        return self._width * self._stored.itemsize

    def __getitem__(self, rows: Tensor) -> Tensor:
        """See `dgpp_core.api.model.Rows`."""
        flat = rows.flatten()
        found = self._gather(flat) if self._gather else self._read(flat.tolist())
        return found.view(self._stored).to(self.dtype).view(*rows.shape, self._width)

    def check(self) -> None:
        """Raise `CheckpointError` if a row could not be read."""
        if self._gather and (fault := self._gather.fault()):
            raise self._fault(*fault)

    def _read(self, rows: Sequence[int]) -> Tensor:
        found, size = bytearray(max(1, len(rows)) * self.row_bytes), self.row_bytes
        view = memoryview(found)
        for place, row in enumerate(rows):
            if not 0 <= row < self._rows:
                raise self._fault(row, "the table has no such row")
            run = self._runs[bisect.bisect_right(self._firsts, row) - 1]
            at, got = run.offset + (row - run.first) * size, 0
            try:
                while got < size and (
                    more := os.preadv(run.file, [view[place * size + got : (place + 1) * size]], at + got)
                ):
                    got += more
            except OSError as error:
                raise self._fault(row, error.strerror or str(error)) from error
            if got < size:
                raise self._fault(row, "the file has become short")
        read = torch.frombuffer(found, dtype=torch.uint8)[: len(rows) * size].view(-1, size)
        self._require_numbers(rows, read.view(self._stored))
        return read

    def _require_numbers(self, rows: Sequence[int], values: Tensor) -> None:
        """A resident table is looked through when it is loaded; of one in files, each row as it is read."""
        if rows and self._stored.is_floating_point and not largest(values).isfinite():
            damaged = next(row for row, one in zip(rows, values, strict=True) if not largest(one).isfinite())
            raise self._fault(damaged, "values that are no finite numbers")

    def _fault(self, row: int, why: str) -> CheckpointError:
        return CheckpointError(
            f"a row of the table {self.target} cannot be read from the checkpoint",
            where=f"row {row} of {self._rows}",
            found=why,
            hint="restore the checkpoint and start again",
        )


class RowFiles:
    """Every table of a model that stays in the checkpoint's files; see `BindingTable.on_disk`.

    Args:
        entries: the checkpoint's tensors, which were checked against the whole table.
        dtype: what dense values are converted to, as the loader does it.

    Raises:
        CheckpointError: a file cannot be opened or changed since its header was read, or the parts of a table do not
            fit together.
        EngineError: on a GPU: as `StreamGather`.
    """

    def __init__(
        self,
        table: BindingTable,
        entries: Mapping[str, TensorEntry],
        *,
        device: torch.device,
        dtype: torch.dtype,
        rank: int = 0,
        world: int = 1,
    ) -> None:
        parts: dict[str, list[Binding]] = {}
        for binding in table.on_disk:
            parts.setdefault(binding.target, []).append(binding)
        found = {(entry := entries[binding.name]).file: entry for binding in table.on_disk}
        self._files = {path: _File.open(found[path]) for path in sorted(found)}
        self._rank, self._world, self._device, self._dtype = rank, world, device, dtype
        self.tables: Mapping[str, FileRows] = {
            target: self._table(target, bindings, entries) for target, bindings in parts.items()
        }

    def check(self) -> None:
        """Whether all rows that were looked up so far were those of the checkpoint; before a result is used.

        Raises:
            CheckpointError: naming the file that changed, or the row that could not be read.
        """
        for rows in self.tables.values():
            rows.check()
        for file in self._files.values():
            file.check()

    def _table(self, target: str, bindings: Sequence[Binding], entries: Mapping[str, TensorEntry]) -> FileRows:
        found = [entries[binding.name] for binding in bindings]
        if len({(entry.dtype, entry.shape[1:]) for entry in found}) != 1:
            raise CheckpointError(
                f"the parts of the table {target} do not fit together",
                where=", ".join(entry.name for entry in found),
                found=", ".join(f"{entry.dtype} {list(entry.shape)}" for entry in found),
            )
        runs, first, stored = list[Run](), 0, TORCH_DTYPES[found[0].dtype]
        width = math.prod(found[0].shape[1:])
        for binding, entry in zip(bindings, found, strict=True):
            file = self._files[entry.file].file.fileno()
            for start, count in cut_ranges(binding, self._rank, self._world):
                runs.append(Run(first, entry.start + start * width * stored.itemsize, file))
                first += count
        stays = bindings[0].stays_stored or not stored.is_floating_point
        return FileRows(target, runs, first, width, (stored, stored if stays else self._dtype), self._device)
