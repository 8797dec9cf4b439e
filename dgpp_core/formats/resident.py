"""Bytes that a parameter takes once it is resident. Torch-free; `dgpp_core.ops.linear` makes what is counted here."""

from __future__ import annotations

import math
from typing import Literal

from dgpp_core.api.bindings import Role

DeviceKind = Literal["cpu", "cuda"]

COMPUTE_BYTES: dict[DeviceKind, int] = {"cpu": 4, "cuda": 2}
"""Bytes an element of a floating-point parameter: float32 on a CPU, bfloat16 on a GPU."""

_PACKED_ROWS, _PACKED_COLUMNS = 64, 16


POSITION_SLACK = 64
"""Rows of draft tokens may stand this far past the last position; they are computed and never committed."""


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


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
