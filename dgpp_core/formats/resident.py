"""Bytes that a parameter takes once it is resident. Torch-free.

On a CPU every weight is float32, packed as `dgpp_core.ops.linear` packs it. A GPU keeps stored forms: what operations
make of them reorders bytes and adds none. Of `WIDENED` storages it keeps values.
"""

from __future__ import annotations

import functools
import math
from typing import Literal

from dgpp_core.api.bindings import Role
from dgpp_core.formats.storage import Part, block_after_cut, parts

Bf16Form = Literal["checkpoint", "bf12", "bf12+bf16"]
"""How a GPU keeps BF16 matrices: as they are, packed (`dgpp_core.formats.bf12`), or both."""

DeviceKind = Literal["cpu", "cuda"]

WIDENED = frozenset({"code3_g128", "code4_g128", "code6_g128"})
"""Storages that no kernel reads: a GPU keeps float32 values of them, of experts bfloat16 ones."""

COMPUTE_BYTES: dict[DeviceKind, int] = {"cpu": 4, "cuda": 2}
"""Bytes an element of a floating-point parameter: float32 on a CPU, bfloat16 on a GPU."""

_PACKED_ROWS, _PACKED_COLUMNS = 64, 16


POSITION_SLACK = 64
"""Rows of draft tokens may stand this far past the last position; they are computed and never committed."""

SEEN_BYTES = 256 << 20
"""Rows that an encoder made of images and that are kept, so that an image is not encoded again for each turn."""


def rotary_table_bytes(width: int, positions: int) -> int:
    """Bytes of the cosines and sines of `dgpp_core.ops.rope.RotaryTable`, float32."""
    return 2 * 4 * (positions + POSITION_SLACK) * (width // 2)


def packed_linear_bytes(rows: int, columns: int) -> int:
    """Bytes of a float32 ``[rows, columns]`` weight in oneDNN's blocked form.

    Output rows are padded to a multiple of 64 and input columns to one of 16; a single row stays as it is. Read off
    the packed tensors of torch 2.13 (oneDNN, AVX2 and AVX-512 alike); CPUs below AVX2 pack nothing and stay below.
    """
    if rows == 1:
        return 4 * columns
    return 4 * _round_up(rows, _PACKED_ROWS) * _round_up(columns, _PACKED_COLUMNS)


def resident_bytes(role: Role, shape: tuple[int, ...], device: DeviceKind) -> int:
    """Bytes of one floating-point parameter of a rank, in the form its role gives it on ``device``.

    Args:
        shape: of the whole parameter, cut and concatenated; a linear one may be a stack ``[..., rows, columns]``.
    """
    if role == "linear" and device == "cpu" and len(shape) >= 2:
        return math.prod(shape[:-2]) * packed_linear_bytes(shape[-2], shape[-1])
    return math.prod(shape) * COMPUTE_BYTES[device]


@functools.lru_cache(maxsize=1024)
def stored_bytes(
    storage: str,
    shape: tuple[int, int],
    cut: tuple[int, int] | None = None,
    heights: tuple[int, ...] = (),
    segments: int = 1,
) -> int:
    """Bytes of a quantised matrix as `dgpp_core.formats` holds it on a device.

    Args:
        shape: ``(N, K)`` of a rank's part.
        cut: the axis that ranks divide and its whole size: a slice may have smaller scale blocks.
        heights: rows, each number once, of the matrices of the stack that it is in, save the last: blocks divide them.
        segments: under how many global scales it lies, where its storage has one of each matrix: those of a stack are
            each of equally many rows.

    Raises:
        CheckpointError, PluginError: the storage cannot hold it, or cannot be cut so.
    """
    held = parts(storage, "matrix.weight", shape)
    if storage not in _BLOCK_EDGES:
        return sum(_held_bytes(storage, part) * (1 if part.shape else segments) for part in held)
    edges = [_BLOCK_EDGES[storage]] * 2
    if cut is not None:
        edges[cut[0]] = block_after_cut(edges[cut[0]], 0, shape[cut[0]], cut[1])
    edges[0] = math.gcd(edges[0], *heights)
    scales = math.prod(-(-size // edge) for size, edge in zip(shape, edges, strict=True))
    return math.prod(shape) + 4 * scales


_BLOCK_EDGES = {"fp8_block": 128, "fp8_e8m0_128": 128, "fp8_e8m0_32": 32}
_ELEMENT_BYTES = {"U8": 1, "F8_E4M3": 1, "F8_E8M0": 1, "BF16": 2, "F16": 2, "I32": 4, "F32": 4}


def _held_bytes(storage: str, part: Part) -> int:
    if part.use != "required":
        return 0
    if part.suffix == "weight_global_scale":
        return 8  # the divisor and its reciprocal
    if storage.startswith("fp8") and part.suffix != "weight":
        return 4 * math.prod(part.shape)  # scales become float32
    return _ELEMENT_BYTES[part.dtypes[0]] * math.prod(part.shape)


def bf16_matrix_bytes(shape: tuple[int, int], form: Bf16Form = "checkpoint") -> int:
    """Bytes of a dense matrix on a GPU.

    Packed: a byte and a half a weight, two int32 a row, and four bytes for each weight that escapes. A trained or
    normal matrix has 1 to 2 escapes in 10,000 weights; one in 1,024 is counted, 0.3 % of the matrix.
    """
    rows, columns = shape
    plain = 2 * rows * columns
    if form == "checkpoint" or columns % 1024 or columns > 1 << 16:
        return plain
    packed = 3 * rows * columns // 2 + 8 * (rows + 1) + 4 * (rows * columns // 1024)
    return packed if form == "bf12" else packed + plain


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
