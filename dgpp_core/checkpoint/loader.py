"""Loading a checkpoint by its binding table: all checked by name, then each parameter read once and cut."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import msgspec
import torch
from torch import Tensor

from dgpp_core.api.bindings import Binding, BindingTable
from dgpp_core.api.errors import CheckpointError
from dgpp_core.checkpoint.check import check_bindings, present_parts
from dgpp_core.checkpoint.cuts import cut_ranges, cut_shape, naming
from dgpp_core.checkpoint.headers import ROUNDED_ROWS, TensorEntry
from dgpp_core.checkpoint.reader import TORCH_DTYPES, TensorReader
from dgpp_core.checkpoint.stacking import stack
from dgpp_core.formats.codec import decode, encode
from dgpp_core.formats.dense import DenseMatrix
from dgpp_core.formats.described import Description
from dgpp_core.formats.matrix import Matrix
from dgpp_core.formats.storage import Part


class CheckpointWeights:
    """The parameters of one rank, read from the files as the model takes them.

    Args:
        table: what the model expects; checked against ``entries`` first.
        entries: the checkpoint's tensors, from `read_headers`.
        device: where parameters are made.
        dtype: what dense floating-point parameters are converted to; integers stay as stored, and so does what is
            accepted in one format alone.
        rank, world: which part of each cut tensor this process holds.
        progress: called with (stored bytes read, stored bytes in all) after each parameter.

    Raises:
        CheckpointError, PluginError: as `check_bindings`.
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
        self._reader = TensorReader(device)
        self._bytes = {target: sum(map(self._stored_bytes, parts)) for target, parts in self._waiting.items()}
        self._done, self._total = 0, sum(self._bytes.values())

    def take(self, target: str) -> Tensor:
        """The parameter ``target``: its parts, each cut for this rank, concatenated along axis 0. Once each.

        Raises:
            CheckpointError: not in the binding table, or taken before, or its parts do not fit together, or not dense;
                a file that cannot be read, or that holds what is no finite number.
        """
        parts = self._claim(target)
        if parts[0].storage != "dense":
            raise CheckpointError(
                f"the parameter {target} is no single tensor",
                where="model build",
                found=f"stored as {parts[0].storage}",
                hint="take it with weights.matrix",
            )
        whole = self._dense(target, parts)
        self._count(target)
        return whole

    def matrix(self, target: str) -> Matrix:
        """The matrix ``target`` as stored, cut for this rank, its parts below each other; on a GPU as ``resident``.

        Raises:
            CheckpointError: as `take`, save that any storage will do; a cut that no scale of the storage survives.
        """
        parts = self._claim(target)
        if parts[0].storage == "dense" and not self._converts(parts[0]):
            whole: Matrix = DenseMatrix(self._dense(target, parts))
        else:
            self._check_parts(target, parts, [cut_shape(part, self._world) for part in parts])
            with naming(parts[0], parts[0].storage, self._world):
                whole = _owned(stack(self._matrices(parts), len(parts)))
        self._count(target)
        return whole

    def prepared(
        self, target: str | tuple[str, ...], form: str, make: Callable[[], Mapping[str, Tensor]]
    ) -> Mapping[str, Tensor]:
        """What ``make`` gives: nothing is kept of it."""
        return make()

    def finish(self) -> None:
        """Close the files.

        Raises:
            CheckpointError: naming parameters that were never taken.
        """
        self._reader.close()
        if self._waiting:
            names = list(self._waiting)
            raise CheckpointError(
                f"the model never took the parameter {names[0]}",
                where="model build",
                found=f"{len(names)} of {len(self._targets)} parameters left: "
                + ", ".join(names[:5])
                + (", …" if len(names) > 5 else ""),
            )

    def _claim(self, target: str) -> list[Binding]:
        parts = self._waiting.pop(target, None)
        if parts is None:
            fault = "taken twice" if target in self._targets else "not in the binding table"
            raise CheckpointError(f"the parameter {target} is {fault}", where="model build")
        return parts

    def _count(self, target: str) -> None:
        self._done += self._bytes[target]
        if self._progress is not None:
            self._progress(self._done, self._total)

    def _stored_bytes(self, binding: Binding) -> int:
        return sum(self._entries[part.name].nbytes for part in present_parts(binding, self._entries))

    def _check_parts(self, target: str, parts: Sequence[Binding], shapes: Sequence[tuple[int, ...]]) -> None:
        if len({shape[1:] for shape in shapes}) != 1 or (len(parts) > 1 and not shapes[0]):
            raise CheckpointError(
                f"the parts of the parameter {target} do not fit together",
                where=", ".join(part.name for part in parts),
                found=", ".join(str(list(shape)) for shape in shapes),
            )

    # dense parameters

    def _dense(self, target: str, parts: Sequence[Binding]) -> Tensor:
        shapes = [cut_shape(part, self._world) for part in parts]
        self._check_parts(target, parts, shapes)
        dtypes = {self._dense_dtype(part) for part in parts}
        if len(dtypes) != 1:
            raise CheckpointError(
                f"the parts of the parameter {target} do not fit together",
                where=", ".join(part.name for part in parts),
                found=", ".join(str(dtype) for dtype in dtypes),
            )
        shape = shapes[0] if len(parts) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
        whole = torch.empty(shape, dtype=dtypes.pop(), device=self._device)
        row = 0
        for part, part_shape in zip(parts, shapes, strict=True):
            axis, ranges = self._held(part)
            for start, count in ranges:
                height = part_shape[0] if axis else count
                place = whole.narrow(0, row, height) if part_shape else whole
                self._reader.fill(place, self._entries[part.name], axis, start)
                row += height
        self._reader.settle()
        return whole

    def _dense_dtype(self, binding: Binding) -> torch.dtype:
        stored = TORCH_DTYPES[self._entries[binding.name].dtype]
        stays = binding.stays_float32 or binding.stays_stored
        return self._dtype if stored.is_floating_point and not stays else stored

    def _held(self, binding: Binding) -> tuple[int, tuple[tuple[int, int], ...]]:
        """Cut axis and what this rank holds along it; all of axis 0 where nothing is cut."""
        return binding.cut or 0, cut_ranges(binding, self._rank, self._world)

    # stored matrices

    def _converts(self, binding: Binding) -> bool:
        return self._device.type == "cuda" and binding.resident not in ("", binding.storage)

    def _matrices(self, bindings: Sequence[Binding]) -> Iterator[Matrix]:
        for binding in bindings:
            with naming(binding, binding.storage, self._world):
                matrix = self._stored(binding)
            with naming(binding, binding.resident, self._world):
                if self._converts(binding):
                    matrix = self._converted(matrix, binding.resident)
            yield matrix

    def _converted(self, matrix: Matrix, storage: str) -> Matrix:
        if storage == "dense":
            return DenseMatrix(matrix.dequantise().to(self._dtype))
        return decode(storage, encode(storage, matrix.dequantise()), matrix.shape)

    def _stored(self, binding: Binding) -> Matrix:
        """This rank's part of one stored matrix; where every row has its own scales, no other rows are read."""
        rows, columns = binding.shape
        axis, ranges = self._held(binding)
        (start, count), fused = ranges[0], len(ranges) > 1
        present = present_parts(binding, self._entries)
        if (
            not binding.source
            and binding.cut == 0
            and self._world > 1
            and binding.grids == 1
            and not fused
            and all(_row_by_row(part, rows) for part in present)
        ):
            stored = {part.suffix: self._part(part, start, count) for part in present if part.use == "required"}
            self._reader.settle()
            return decode(binding.storage, stored, (count, columns), binding.name)
        if binding.source:
            whole = self._rounded(binding)
        else:
            stored = {part.suffix: self._part(part) for part in present}
            self._reader.settle()
            whole = decode(binding.storage, stored, (rows, columns), binding.name, binding.grids)
        if binding.cut is None or self._world == 1:
            return whole
        if fused:
            return stack((whole.rows(*each) for each in ranges), len(ranges))
        return whole.columns(start, count) if axis else whole.rows(start, count)

    def _rounded(self, binding: Binding) -> Matrix:
        """A dense matrix in its `Binding.storage`, some rows at a time: a large one has no room in float32."""
        rows, columns = binding.shape

        def pieces() -> Iterator[Matrix]:
            for start in range(0, rows, ROUNDED_ROWS):
                place = torch.empty(min(ROUNDED_ROWS, rows - start), columns, device=self._device)
                self._reader.fill(place, self._entries[binding.name], 0, start)
                self._reader.settle()
                yield decode(binding.storage, encode(binding.storage, place), (len(place), columns))

        return stack(pieces(), -(-rows // ROUNDED_ROWS))

    def _part(self, part: Part, start: int = 0, count: int = -1) -> Tensor:
        """A stored tensor: all of it, or ``count`` rows; a scalar is always whole."""
        entry = self._entries[part.name]
        if entry.dtype == "U8" and "F8_E8M0" in part.dtypes:  # exponents by another name, of which one is no number
            entry = msgspec.structs.replace(entry, dtype="F8_E8M0")
        shape = entry.shape if count < 0 or part.shape == () else (count, *entry.shape[1:])
        place = torch.empty(shape, dtype=TORCH_DTYPES[entry.dtype], device=self._device)
        self._reader.fill(place, entry, 0, start if shape != entry.shape else 0)
        return place


def _owned(matrix: Matrix) -> Matrix:
    """The matrix in memory of its own: some rows of a tensor would keep all of it."""
    if all(tensor.untyped_storage().nbytes() == tensor.nbytes for tensor in matrix.tensors().values()):
        return matrix
    return Description.of(matrix).matrix({name: tensor.clone() for name, tensor in matrix.tensors().items()})


def _row_by_row(part: Part, rows: int) -> bool:
    """Whether the tensor has one row a row of the matrix, or is a scalar, or says nothing that a slice needs."""
    return part.shape == () or part.shape[0] == rows or part.use == "optional"
