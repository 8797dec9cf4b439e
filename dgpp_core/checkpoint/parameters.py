"""What one rank holds of a binding table, target by target. Torch-free, for the memory plan and the resident image."""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

from dgpp_core.api.bindings import Binding, BindingTable, Role, Stack
from dgpp_core.checkpoint.cuts import cut_ranges, cut_shape, naming
from dgpp_core.checkpoint.headers import DTYPE_BITS
from dgpp_core.formats.resident import (
    WIDENED,
    Bf16Form,
    DeviceKind,
    bf16_matrix_bytes,
    resident_bytes,
    stored_bytes,
)


class Parameter(msgspec.Struct, frozen=True):
    """One target of the binding table on one rank.

    Attributes:
        bindings: its parts, in order.
        shape: of the values, cut and concatenated.
        entries: matrices of equal size that ``shape`` is a stack of, each used by itself.
        met: how many of them a row goes through.
        world: the ranks it is cut for.
    """

    bindings: tuple[Binding, ...]
    shape: tuple[int, ...]
    entries: int
    met: int
    world: int

    @property
    def role(self) -> Role:
        """How it is used."""
        return self.bindings[0].role

    @property
    def elements(self) -> int:
        """How many values it has."""
        return math.prod(self.shape)

    @property
    def matrix_rows(self) -> int:
        """Output rows of one matrix of the stack."""
        return self.shape[-2] // self.entries

    def storage(self, device: DeviceKind) -> str:
        """The storage it has once it is loaded."""
        first = self.bindings[0]
        return "dense" if device == "cpu" else first.resident or first.storage

    def bytes(self, device: DeviceKind, bf16_form: Bf16Form = "checkpoint") -> int:
        """Resident bytes.

        Args:
            bf16_form: how dense matrices are kept on a GPU.

        Raises:
            CheckpointError, PluginError: as `dgpp_core.formats.resident.stored_bytes`.
        """
        if self.role == "linear" and device == "cpu" and len(self.shape) >= 2:
            return self.entries * resident_bytes("linear", (*self.shape[:-2], self.matrix_rows, self.shape[-1]), device)
        if (storage := self.storage(device)) in WIDENED:
            return self.elements * (2 if self.entries > 1 else 4)
        if storage != "dense":
            return self.loaded_bytes(storage)
        if self.bindings[0].stays_float32:
            return 4 * self.elements
        if self.bindings[0].stays_stored:
            return DTYPE_BITS[self.bindings[0].formats[0]] // 8 * self.elements
        if self.role == "linear" and len(self.shape) == 2:
            return bf16_matrix_bytes((self.shape[0], self.shape[1]), bf16_form)
        return resident_bytes(self.role, self.shape, device)

    def loaded_bytes(self, storage: str) -> int:
        """Bytes as the loader leaves it in ``storage``; raises as `bytes`."""
        heights = [height for binding in self.bindings for height in self._heights(binding, storage)]
        edges, unit = sorted({*heights[:-1]}), math.gcd(*heights)
        return sum(self._stored_bytes(binding, storage, edges, unit) for binding in self.bindings)

    def _divided(self, binding: Binding, storage: str) -> bool:
        """Whether what is loaded is a slice of what is stored; a conversion comes after the cut and sees no edge."""
        return binding.cut is not None and self.world > 1 and storage == binding.storage

    def _heights(self, binding: Binding, storage: str) -> Sequence[int]:
        """Rows of the matrices below each other that it is loaded as: one, or one of each fused part."""
        if binding.fused and self._divided(binding, storage):
            return [length for _, length in cut_ranges(binding, 0, self.world)]
        return [cut_shape(binding, self.world)[0]]

    def _stored_bytes(self, binding: Binding, storage: str, edges: Sequence[int], unit: int) -> int:
        rows, columns = cut_shape(binding, self.world)
        divided = self._divided(binding, storage)
        cut = (binding.cut, binding.shape[binding.cut]) if divided and binding.cut is not None else None
        grids = (binding.shape[0] // binding.grids,) if binding.grids > 1 and storage == binding.storage else ()
        with naming(binding, storage, self.world):
            return stored_bytes(storage, (rows, columns), cut, (*edges, *grids), rows // unit)


def parameters(table: BindingTable, world: int) -> dict[str, Parameter]:
    """Every target as one rank of ``world`` holds it, by name; raises `CheckpointError` where a cut does not divide."""
    parts: dict[str, list[Binding]] = {}
    for binding in table.tensors:
        parts.setdefault(binding.target, []).append(binding)
    stacks = {stack.target: stack for stack in table.stacks}
    found = {}
    for target, bindings in parts.items():
        shapes = [cut_shape(binding, world) for binding in bindings]
        shape = shapes[0] if len(shapes) == 1 else (sum(s[0] for s in shapes), *shapes[0][1:])
        stack = stacks.get(target, Stack(target, 1, 1))
        found[target] = Parameter(tuple(bindings), shape, stack.entries, stack.met, world)
    return found
