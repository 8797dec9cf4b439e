"""What the checkpoint stores for one matrix, by storage name. Torch-free.

A table of one line a tensor; the loader checks a checkpoint against it, the random-checkpoint writer fills it, the
memory plan counts it, and `dgpp_core.formats.codec` turns the tensors into a matrix.

A block of FP8 scales that a tensor-parallel cut splits becomes smaller blocks (`block_after_cut`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal

import msgspec

from dgpp_core.api.errors import CheckpointError, PluginError, ScaleError

Use = Literal["required", "optional", "ignored"]

STEM = ".weight"
"""Ending of a binding's name; a stored matrix's tensors share what stands before it, and the dot."""

SMALLEST_BLOCK = 8
"""Least edge of a block that a cut may leave: below it the scales weigh as much as the codes."""


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint tensor of a stored matrix.

    Attributes:
        suffix: its name after the matrix's stem: ``weight``, ``weight_scale``.
        name: its whole name.
        shape: as it is stored; ``()`` is a scalar.
        dtypes: safetensors dtypes it may have; the first is the one to write.
        use: ``required``; ``optional``, read if there; or ``ignored``: may be there and is never read.
        variants: further shapes under which the same values are stored.
    """

    suffix: str
    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]
    use: Use = "required"
    variants: tuple[tuple[int, ...], ...] = ()

    def fits(self, shape: tuple[int, ...]) -> bool:
        """Whether a tensor of this shape can be the part."""
        return shape == self.shape or shape in self.variants


class _Tensor(msgspec.Struct, frozen=True, kw_only=True):
    """A line of the table; ``cell`` is the piece (rows, columns) of the matrix that ``each`` elements stand for.

    ``None`` for a number of columns is the whole row. ``ragged``: the last cell of an axis may be partial.
    Without a cell the shape is ``fixed``.
    """

    suffix: str
    dtypes: tuple[str, ...]
    cell: tuple[int, int | None] | None = None
    each: int = 1
    ragged: bool = False
    fixed: tuple[int, ...] = ()
    use: Use = "required"


_FLOATS = ("F32", "BF16", "F16")
_E8M0 = ("F8_E8M0", "U8")
_E4M3 = _Tensor(suffix="weight", dtypes=("F8_E4M3",), cell=(1, 1))
_FP4_SCALE = _Tensor(suffix="weight_scale", dtypes=("F8_E4M3",), cell=(1, 16))


def _scalar(suffix: str, use: Use = "required") -> _Tensor:
    return _Tensor(suffix=suffix, dtypes=("F32",), use=use)


def _blocks(edge: int, suffix: str, dtypes: tuple[str, ...]) -> tuple[_Tensor, ...]:
    return _E4M3, _Tensor(suffix=suffix, dtypes=dtypes, cell=(edge, edge), ragged=True)


def _integers(bits: int, group: int, scale: tuple[str, ...]) -> tuple[_Tensor, ...]:
    return (
        _Tensor(suffix="weight_packed", dtypes=("I32",), cell=(1, 32 // bits)),
        _Tensor(suffix="weight_scale", dtypes=scale, cell=(1, group)),
        _Tensor(suffix="weight_shape", dtypes=("I64",), fixed=(2,), use="optional"),
    )


def _codebook(bits: int) -> tuple[_Tensor, ...]:
    return (
        _Tensor(suffix="weight_indices", dtypes=("I32",), cell=(1, 32), each=bits),
        _Tensor(suffix="weight_scale", dtypes=("BF16",), cell=(1, 128)),
        _Tensor(suffix="weight_shape", dtypes=("I64",), fixed=(2,), use="optional"),
    )


STORAGES: Mapping[str, tuple[_Tensor, ...]] = MappingProxyType(
    {
        "dense": (_Tensor(suffix="weight", dtypes=_FLOATS, cell=(1, 1)),),
        "fp8_block": _blocks(128, "weight_scale_inv", ("F32", "BF16")),
        "fp8_e8m0_32": _blocks(32, "scale", _E8M0),
        "fp8_e8m0_128": _blocks(128, "scale", _E8M0),
        "fp8_channel": (_E4M3, _Tensor(suffix="weight_scale", dtypes=_FLOATS, cell=(1, None))),
        "nvfp4": (
            _Tensor(suffix="weight", dtypes=("U8",), cell=(1, 2)),
            _FP4_SCALE,
            _scalar("weight_scale_2"),
            _scalar("input_scale", "ignored"),
        ),
        "nvfp4_ct": (
            _Tensor(suffix="weight_packed", dtypes=("U8",), cell=(1, 2)),
            _FP4_SCALE,
            _scalar("weight_global_scale"),
            _scalar("input_global_scale", "ignored"),
        ),
        "mxfp4": (
            _Tensor(suffix="weight", dtypes=("U8", "I8"), cell=(1, 2)),
            _Tensor(suffix="scale", dtypes=_E8M0, cell=(1, 32)),
        ),
        "mxfp4_u8": (
            _Tensor(suffix="weight", dtypes=("U8", "I8"), cell=(1, 2)),
            _Tensor(suffix="weight_scale", dtypes=_E8M0[::-1], cell=(1, 32)),
        ),
        "int4_g64": _integers(4, 64, ("BF16", "F16", "F32")),
        "int8_g64": _integers(8, 64, ("BF16", "F16", "F32")),
        "int4_g128": _integers(4, 128, ("F16", "BF16", "F32")),
        "int8_g128": _integers(8, 128, ("F16", "BF16", "F32")),
        "code3_g128": _codebook(3),
        "code4_g128": _codebook(4),
        "code6_g128": _codebook(6),
    }
)
"""Storage names and their tensors (formats: `dgpp_core.formats` module of each)."""


def parts(storage: str, name: str, shape: tuple[int, ...], grids: int = 1) -> tuple[Part, ...]:
    """The checkpoint tensors of one stored matrix.

    Args:
        storage: a key of `STORAGES`.
        name: the binding's name, ending in ``.weight`` (any name for ``dense``, which is one tensor).
        shape: ``(N, K)`` of the matrix; any shape for ``dense``.
        grids: matrices of equal height that it was quantised as; see `dgpp_core.api.Binding`.

    Raises:
        PluginError: an unknown storage name, or a name that does not end in ``.weight``.
        CheckpointError: the shape is not that of a matrix, or K is not a whole number of scale groups, or N
            not one of grids.
    """
    if storage not in STORAGES:
        raise PluginError(
            f"the storage {storage!r} of {name} is not known", where="binding table", expected=", ".join(STORAGES)
        )
    if storage == "dense":
        return (Part(suffix="weight", name=name, shape=shape, dtypes=_FLOATS),)
    if not name.endswith(STEM):
        raise PluginError(
            f"a binding stored as {storage} must be named by its weight",
            where="binding table",
            found=name,
            expected=f"a name that ends in {STEM}",
        )
    if len(shape) != 2:
        raise CheckpointError(
            f"{name} is not a matrix", where=f"stored as {storage}", found=str(list(shape)), expected="[N, K]"
        )
    if grids < 1 or shape[0] % grids:
        raise CheckpointError(
            f"{name} is no {grids} matrices of equal height", where=f"stored as {storage}", found=f"{shape[0]} rows"
        )
    stem, one = name.removesuffix(STEM), (shape[0] // grids, shape[1])
    return tuple(_below(_part(tensor, storage, stem, one), grids) for tensor in STORAGES[storage])


def _below(part: Part, count: int) -> Part:
    """The part of ``count`` alike matrices below each other; a number of the whole matrix stays one."""
    if count == 1 or not part.shape:
        return part
    taller = [(count * shape[0], *shape[1:]) for shape in (part.shape, *part.variants)]
    return msgspec.structs.replace(part, shape=taller[0], variants=tuple(taller[1:]))


def _part(tensor: _Tensor, storage: str, stem: str, shape: tuple[int, int]) -> Part:
    found: tuple[int, ...] = tensor.fixed
    variants: tuple[tuple[int, ...], ...] = ()
    if tensor.cell is None:
        variants = () if tensor.fixed else ((1,),)
    elif tensor.cell[1] is None:
        found, variants = shape[:1], ((shape[0], 1),)
    else:
        height, width = tensor.cell[0], tensor.cell[1]
        if shape[1] % width and not tensor.ragged:
            raise ScaleError(
                f"{stem}{STEM} cannot be stored as {storage}",
                where=f"{tensor.suffix} of {list(shape)}",
                found=f"{shape[1]} columns",
                expected=f"a multiple of {width}",
                hint="config.json and the storage of this matrix do not belong together",
            )
        found = (-(-shape[0] // height), -(-shape[1] // width) * tensor.each)
    return Part(
        suffix=tensor.suffix,
        name=f"{stem}.{tensor.suffix}",
        shape=found,
        dtypes=tensor.dtypes,
        use=tensor.use,
        variants=variants,
    )


def block_after_cut(block: int, start: int, count: int, size: int) -> int:
    """Edge of the scale blocks of ``start .. start + count`` out of an axis of ``size`` with blocks of ``block``.

    The whole axis and a slice of whole blocks keep ``block``. Any other slice is divided into the largest blocks that
    lie inside one block of the parent each, gcd(block, start, count), and repeats the parent's scales: equal slices
    of one axis, one a rank, get equal blocks.

    Raises:
        ScaleError: the blocks would be smaller than `SMALLEST_BLOCK`.
    """
    return block if count == size else joint_block([block], [start, count])


def joint_block(blocks: list[int], edges: list[int]) -> int:
    """Edge of the largest blocks that divide ``blocks`` and end at each of ``edges``; raises as `block_after_cut`."""
    edge = math.gcd(*blocks, *edges)
    if edge < min(SMALLEST_BLOCK, *blocks):
        raise ScaleError(
            "a scale block would be cut into pieces that are too small",
            where=f"blocks of {', '.join(map(str, sorted(set(blocks))))}, cut at {', '.join(map(str, edges))}",
            found=f"pieces of {edge}",
            expected=f"edges that are multiples of {SMALLEST_BLOCK}",
            hint="cut the matrix elsewhere",
        )
    return edge


def require_aligned(start: int, count: int, unit: int, what: str) -> None:
    """Refuse a slice whose ends do not fall on multiples of ``unit``.

    Raises:
        ScaleError: naming ``what`` is cut, the slice and the unit.
    """
    if start % unit or count % unit:
        raise ScaleError(
            f"a slice of {what} does not fall on a scale's boundary",
            where=f"columns {start} .. {start + count}",
            found=f"start {start}, length {count}",
            expected=f"multiples of {unit}",
            hint="cut the matrix elsewhere",
        )
