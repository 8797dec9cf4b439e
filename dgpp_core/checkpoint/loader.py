"""Loading a checkpoint by its binding table: all checked by name, then each parameter read once, cut and widened."""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from dgpp_core.api.bindings import Binding, BindingTable
from dgpp_core.api.errors import CheckpointError
from dgpp_core.checkpoint.cuts import cut_range, cut_shape
from dgpp_core.checkpoint.headers import STAGING_BYTES, TensorEntry

TORCH_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip


def check_bindings(table: BindingTable, entries: Mapping[str, TensorEntry], world: int = 1) -> None:
    """Compare the checkpoint with what the model expects, before anything is allocated.

    Raises:
        CheckpointError: naming file and tensor: one that is bound twice, missing, unknown, of another shape, stored in
            a dtype that is not accepted, or with a cut axis that ``world`` ranks cannot divide.
    """
    bound: set[str] = set()
    for binding in table.tensors:
        if binding.name in bound:
            raise CheckpointError(
                f"the tensor {binding.name} is bound twice", where=f"binding table, target {binding.target}"
            )
        bound.add(binding.name)
    if missing := [binding for binding in table.tensors if binding.name not in entries]:
        raise CheckpointError(
            f"the checkpoint has no tensor {missing[0].name}",
            where=", ".join(sorted({str(entry.file) for entry in entries.values()})),
            found=f"{len(missing)} of {len(table.tensors)} expected tensors missing",
            expected=", ".join(binding.name for binding in missing[:5]) + (", …" if len(missing) > 5 else ""),
            hint="the checkpoint is incomplete or belongs to another model",
        )
    for binding in table.tensors:
        _check_entry(binding, entries[binding.name], world)
    _check_half_precision(table, entries)
    for name, entry in entries.items():
        if name not in bound and not any(fnmatch.fnmatchcase(name, pattern) for pattern in table.ignored):
            raise CheckpointError(
                f"the checkpoint has a tensor that the model does not know: {name}",
                where=str(entry.file),
                found=f"{entry.dtype} {list(entry.shape)}",
                hint="the checkpoint belongs to another model, or to a newer version of its plugin",
            )


def _check_entry(binding: Binding, entry: TensorEntry, world: int) -> None:
    if entry.shape != binding.shape:
        raise CheckpointError(
            f"the tensor {entry.name} has the wrong shape",
            where=str(entry.file),
            found=str(list(entry.shape)),
            expected=str(list(binding.shape)),
            hint="config.json and the weights do not belong together",
        )
    if entry.dtype not in binding.formats or entry.dtype not in TORCH_DTYPES:
        raise CheckpointError(
            f"the tensor {entry.name} is stored in a dtype that is not accepted",
            where=str(entry.file),
            found=entry.dtype,
            expected=" or ".join(binding.formats),
        )
    cut_range(binding, 0, world)


def _check_half_precision(table: BindingTable, entries: Mapping[str, TensorEntry]) -> None:
    """Refuse F16 and BF16 side by side: one taken for the other fits in size and loads as noise."""
    either = [entries[b.name] for b in table.tensors if {"F16", "BF16"} <= set(b.formats)]
    halves = {dtype: [entry for entry in either if entry.dtype == dtype] for dtype in ("F16", "BF16")}
    few, many = sorted(halves.values(), key=len)
    if few:
        raise CheckpointError(
            f"the tensor {few[0].name} is {few[0].dtype} while most of the checkpoint is {many[0].dtype}",
            where=str(few[0].file),
            found=f"{len(few)} {few[0].dtype} and {len(many)} {many[0].dtype} tensors",
            expected="one of the two throughout",
            hint="fetch or copy the checkpoint again",
        )


class CheckpointWeights:
    """The parameters of one rank, read from the files as the model takes them.

    Args:
        table: what the model expects; checked against ``entries`` first.
        entries: the checkpoint's tensors, from `read_headers`.
        device: where parameters are made.
        dtype: what floating-point parameters are widened to; integers stay as stored.
        rank, world: which part of each cut tensor this process holds.
        progress: called with (stored bytes read, stored bytes in all) after each parameter.

    Raises:
        CheckpointError: as `check_bindings`.
    """

    def __init__(
        self,
        table: BindingTable,
        entries: Mapping[str, TensorEntry],
        *,
        device: torch.device,
        dtype: torch.dtype,
        rank: int,
        world: int,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        check_bindings(table, entries, world)
        self._entries, self._device, self._dtype = entries, device, dtype
        self._rank, self._world, self._progress = rank, world, progress
        self._waiting: dict[str, list[Binding]] = {}
        for binding in table.tensors:
            self._waiting.setdefault(binding.target, []).append(binding)
        self._targets = frozenset(self._waiting)
        self._files: dict[Path, BufferedReader] = {}
        self._staging = bytearray()
        self._done, self._total = 0, sum(entries[binding.name].nbytes for binding in table.tensors)

    def take(self, target: str) -> Tensor:
        """The parameter ``target``: its parts, each cut for this rank, concatenated along axis 0. Once each.

        Raises:
            CheckpointError: not in the binding table, or taken before, or its parts do not fit together.
        """
        parts = self._waiting.pop(target, None)
        if parts is None:
            fault = "taken twice" if target in self._targets else "not in the binding table"
            raise CheckpointError(f"the parameter {target} is {fault}", where="model build")
        shapes = [cut_shape(part, self._world) for part in parts]
        dtypes = {self._resident_dtype(part) for part in parts}
        if len({shape[1:] for shape in shapes} | dtypes) != 2 or (len(parts) > 1 and not shapes[0]):
            raise CheckpointError(
                f"the parts of the parameter {target} do not fit together",
                where=", ".join(part.name for part in parts),
                found=", ".join(str(list(shape)) for shape in shapes),
            )
        shape = shapes[0] if len(parts) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
        whole = torch.empty(shape, dtype=dtypes.pop(), device=self._device)
        row = 0
        for part, part_shape in zip(parts, shapes, strict=True):
            place = whole if len(parts) == 1 else whole.narrow(0, row, part_shape[0])
            self._read_into(place, part)
            row += part_shape[0] if part_shape else 0
        if self._progress is not None:
            self._progress(self._done, self._total)
        return whole

    def finish(self) -> None:
        """Close the files.

        Raises:
            CheckpointError: naming parameters that were never taken.
        """
        for file in self._files.values():
            file.close()
        self._files.clear()
        self._staging = bytearray()
        if self._waiting:
            names = list(self._waiting)
            raise CheckpointError(
                f"the model never took the parameter {names[0]}",
                where="model build",
                found=f"{len(names)} of {len(self._targets)} parameters left: "
                + ", ".join(names[:5])
                + (", …" if len(names) > 5 else ""),
            )

    def _resident_dtype(self, binding: Binding) -> torch.dtype:
        stored = TORCH_DTYPES[self._entries[binding.name].dtype]
        return self._dtype if stored.is_floating_point else stored

    def _read_into(self, place: Tensor, binding: Binding) -> None:
        """Fill ``place`` with this rank's part, `STAGING_BYTES` at a time.

        The file is read rather than mapped: a file that shrinks under a mapping ends the process without a word.
        """
        entry = self._entries[binding.name]
        self._done += entry.nbytes
        if not entry.nbytes:
            return
        shape, place = entry.shape or (1,), place if entry.shape else place.view(1)
        start, count = cut_range(binding, self._rank, self._world)
        across = binding.cut is not None and binding.cut > 0
        first, last = (0, shape[0]) if across else (start, start + count)
        row_bytes = entry.nbytes // shape[0]
        step = max(1, STAGING_BYTES // row_bytes)
        for row in range(first, last, step):
            rows = min(step, last - row)
            piece = self._read(entry, row * row_bytes, rows * row_bytes).view(rows, *shape[1:])
            if binding.cut and across:
                piece = piece.narrow(binding.cut, start, count)
            place.narrow(0, row - first, rows).copy_(piece)

    def _read(self, entry: TensorEntry, offset: int, count: int) -> Tensor:
        """``count`` bytes of a tensor, flat; valid until the next call."""
        if len(self._staging) < count:
            self._staging = bytearray(max(count, STAGING_BYTES))
        if entry.file not in self._files:
            self._files[entry.file] = entry.file.open("rb")
        file = self._files[entry.file]
        file.seek(entry.start + offset)
        if (got := file.readinto(memoryview(self._staging)[:count])) < count:
            raise CheckpointError(
                f"the file became short: the tensor {entry.name} is cut off",
                where=str(entry.file),
                found=f"{entry.start + offset + got} bytes",
                expected=f"at least {entry.end} bytes",
            )
        dtype = TORCH_DTYPES[entry.dtype]
        return torch.frombuffer(self._staging, dtype=dtype, count=count // dtype.itemsize)
