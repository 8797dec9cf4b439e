"""A checkpoint's tensors against the binding table, by name, before anything is allocated. Torch-free."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping

from dgpp_core.api.bindings import Binding, BindingTable
from dgpp_core.api.errors import CheckpointError
from dgpp_core.checkpoint.cuts import cut_ranges
from dgpp_core.checkpoint.headers import TensorEntry
from dgpp_core.formats.storage import Part, parts

DTYPES = (
    "F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0",
)  # fmt: skip
"""Safetensors dtypes that the loader can read."""


def parts_of(binding: Binding) -> tuple[Part, ...]:
    """The checkpoint tensors of a binding; raises as `dgpp_core.formats.storage.parts`."""
    stored = binding.source or binding.storage
    if stored == "dense":
        return (Part(suffix="weight", name=binding.name, shape=binding.shape, dtypes=binding.formats),)
    return parts(stored, binding.name, binding.shape, binding.grids)


def present_parts(binding: Binding, entries: Mapping[str, TensorEntry]) -> tuple[Part, ...]:
    """Those parts that a loader reads: all that are required, and the optional ones that are there."""
    return tuple(part for part in parts_of(binding) if part.use != "ignored" and part.name in entries)


def check_bindings(table: BindingTable, entries: Mapping[str, TensorEntry], world: int = 1) -> None:
    """Compare the checkpoint with what the model expects, before anything is allocated.

    Raises:
        CheckpointError: naming file and tensor: one that is bound twice, missing, unknown, of another shape, stored in
            a dtype that is not accepted, or with a cut axis that ``world`` ranks cannot divide.
        PluginError: a binding that no storage can hold, or matrices of one target in several storages.
    """
    bound: dict[str, tuple[Binding, Part]] = {}
    for binding, part in _bound_parts(table):
        if part.name in bound:
            raise CheckpointError(
                f"the tensor {part.name} is bound twice", where=f"binding table, target {binding.target}"
            )
        bound[part.name] = binding, part
    _check_missing(bound, entries)
    for _, part in bound.values():
        if part.name in entries and part.use != "ignored":
            _check_entry(part, entries[part.name])
    for binding in table.tensors:
        cut_ranges(binding, 0, world)
    _check_half_precision(table, entries)
    _check_unknown(table, bound, entries)


def _bound_parts(table: BindingTable) -> Iterator[tuple[Binding, Part]]:
    first: dict[str, Binding] = {}
    for binding in table.tensors:
        one = first.setdefault(binding.target, binding)
        if (one.storage, one.resident) != (binding.storage, binding.resident):
            raise CheckpointError(
                f"the parts of the parameter {binding.target} are stored in different ways",
                where=f"{one.name}, {binding.name}",
                found=f"{one.storage} and {binding.storage}",
                expected="one storage and one resident form a target",
            )
        for storage in filter(None, (binding.source and binding.storage, binding.resident)):
            parts(storage, binding.name, binding.shape)
        yield from ((binding, part) for part in parts_of(binding))


def _check_missing(bound: Mapping[str, tuple[Binding, Part]], entries: Mapping[str, TensorEntry]) -> None:
    needed = [(binding.hint, part) for binding, part in bound.values() if part.use == "required"]
    if lacking := [each for each in needed if each[1].name not in entries]:
        hint, missing = min(hint for hint, _ in lacking), [part for _, part in lacking]
        raise CheckpointError(
            f"the checkpoint has no tensor {missing[0].name}",
            where=", ".join(sorted({str(entry.file) for entry in entries.values()})),
            found=f"{len(missing)} of {len(needed)} expected tensors missing",
            expected=", ".join(part.name for part in missing[:5]) + (", …" if len(missing) > 5 else ""),
            hint=hint or "the checkpoint is incomplete or belongs to another model",
        )


def _check_entry(part: Part, entry: TensorEntry) -> None:
    if not part.fits(entry.shape):
        raise CheckpointError(
            f"the tensor {entry.name} has the wrong shape",
            where=str(entry.file),
            found=str(list(entry.shape)),
            expected=" or ".join(str(list(shape)) for shape in (part.shape, *part.variants)),
            hint="config.json and the weights do not belong together",
        )
    if entry.dtype not in part.dtypes or entry.dtype not in DTYPES:
        raise CheckpointError(
            f"the tensor {entry.name} is stored in a dtype that is not accepted",
            where=str(entry.file),
            found=entry.dtype,
            expected=" or ".join(part.dtypes),
        )


def _check_half_precision(table: BindingTable, entries: Mapping[str, TensorEntry]) -> None:
    """Refuse F16 and BF16 side by side: one taken for the other fits in size and loads as noise."""
    dense = [binding for binding in table.tensors if "dense" in (binding.storage, binding.source)]
    either = [entries[b.name] for b in dense if {"F16", "BF16"} <= set(b.formats)]
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


def _check_unknown(
    table: BindingTable, bound: Mapping[str, tuple[Binding, Part]], entries: Mapping[str, TensorEntry]
) -> None:
    """Refuse a tensor that nobody knows, unless its file is a stranger: not listed, and nothing in it is bound."""
    own = {entry.file for name, entry in entries.items() if entry.listed or name in bound}
    for name, entry in entries.items():
        if name in bound or entry.file not in own:
            continue
        if not any(fnmatch.fnmatchcase(name, pattern) for pattern in table.ignored):
            raise CheckpointError(
                f"the checkpoint has a tensor that the model does not know: {name}",
                where=str(entry.file),
                found=f"{entry.dtype} {list(entry.shape)}",
                hint="the checkpoint belongs to another model, or to a newer version of its plugin",
            )
