"""NVFP4: e2m1 codes, an e4m3 scale per 16 columns, a float32 scale per matrix.

Two lineages store the last one differently. modelopt's ``weight_scale_2`` multiplies; compressed-tensors'
``weight_global_scale`` divides, and its reciprocal is rounded. `Nvfp4Matrix` carries a multiplier in ``globals`` for
both and, for the second, the divisor too: ``dequantise`` divides by it, and a kernel either divides its finished dot
by it or multiplies it by ``globals``, which differs by at most one rounding of the reciprocal (2^-24, relative) and
never depends on the row count. A divisor that is a power of two has an exact reciprocal and is not kept.
"""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor

from dgpp_core.api.errors import CheckpointError
from dgpp_core.formats.scalars import (
    E2M1_MAX,
    E4M3_MAX,
    constant,
    decode_e2m1,
    decode_e4m3,
    encode_e2m1,
    encode_e4m3,
    in_groups,
    pack_nibbles,
    unpack_nibbles,
)
from dgpp_core.formats.storage import require_aligned
from dgpp_core.formats.stored import StoredMatrix, spread, take_columns

GROUP = 16


class Nvfp4Matrix(StoredMatrix, frozen=True, eq=False):
    """``w[n, k] = e2m1(code) * scales[n, k / 16] * globals[n / (N / G)]``, or ``/ divisors[...]`` where they are kept.

    Attributes:
        codes: uint8 ``[N, K / 2]``, the low nibble is the even column.
        scales: float8_e4m3fn ``[N, K / 16]``.
        globals: float32 ``[G]``, each for N / G consecutive rows.
        divisors: float32 ``[G]`` or None (see the module).
    """

    codes: Tensor
    scales: Tensor
    globals: Tensor
    divisors: Tensor | None = None

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    @property
    def segment(self) -> int:
        """Consecutive rows that share a global scale, N / G."""
        return self.codes.shape[0] // self.globals.shape[0]

    def dequantise(self) -> Tensor:
        """float32 ``[N, K]``: the product of code and scale is exact, the global scale rounds once."""
        values = decode_e2m1(unpack_nibbles(self.codes)) * spread(decode_e4m3(self.scales), GROUP)
        if self.divisors is not None:
            return values / self.divisors.repeat_interleave(self.segment).unsqueeze(1)
        return values * self.globals.repeat_interleave(self.segment).unsqueeze(1)

    def rows(self, start: int, count: int) -> Self:
        """Rows ``start .. start + count``, views of codes and scales; they keep the global scales of their rows."""
        first, last = start // self.segment, (start + count - 1) // self.segment
        unit = count if first == last else math.gcd(self.segment, start, count)
        index = torch.arange(start, start + count, unit, device=self.globals.device) // self.segment
        return type(self)(
            self.codes.narrow(0, start, count),
            self.scales.narrow(0, start, count),
            self.globals[index],
            None if self.divisors is None else self.divisors[index],
        )

    def columns(self, start: int, count: int) -> Self:
        """Columns ``start .. start + count``, copies.

        Raises:
            CheckpointError: the slice splits a group of 16.
        """
        require_aligned(start, count, GROUP, "an NVFP4 matrix")
        return type(self)(
            take_columns(self.codes, start // 2, count // 2),
            take_columns(self.scales, start // GROUP, count // GROUP),
            self.globals,
            self.divisors,
        )

    @classmethod
    def stack(cls, parts: list[Self]) -> Self:
        """Parts of equal K below each other, each under its own global scales.

        Raises:
            CheckpointError: parts that divide by their global scale beside others that cannot.
        """
        unit = math.gcd(*(part.segment for part in parts))
        divide = any(part.divisors is not None for part in parts)
        dividing = [_divisors(part) for part in parts] if divide else []
        repeats = [part.segment // unit for part in parts]
        return cls(
            torch.cat([part.codes for part in parts]),
            torch.cat([part.scales for part in parts]),
            torch.cat([part.globals.repeat_interleave(n) for part, n in zip(parts, repeats, strict=True)]),
            torch.cat([d.repeat_interleave(n) for d, n in zip(dividing, repeats, strict=True)]) if dividing else None,
        )


def _divisors(part: Nvfp4Matrix) -> Tensor:
    """Global scales as divisors: those that were kept, or the exact reciprocals of powers of two.

    Raises:
        CheckpointError: a multiplier without an exact reciprocal, which is of the other lineage.
    """
    if part.divisors is not None:
        return part.divisors
    if not all(_is_power_of_two(value) for value in part.globals.tolist()):
        raise CheckpointError(
            "NVFP4 matrices of two lineages cannot be one matrix",
            where="matrices with one target",
            found=f"one that multiplies by {part.globals.tolist()} beside one that divides by its global scale",
            expected="global scales of one lineage",
        )
    return torch.ones_like(part.globals) / part.globals


def _is_power_of_two(value: float) -> bool:
    return abs(math.frexp(value)[0]) == 0.5


def from_multiplier(codes: Tensor, scales: Tensor, scale_2: Tensor) -> Nvfp4Matrix:
    """The matrix of modelopt's tensors; raises `CheckpointError` where the scale is not a finite number."""
    value = float(scale_2)
    _require_scale("weight_scale_2", value, math.isfinite(value))
    return Nvfp4Matrix(codes, scales, scale_2.reshape(1))


def from_divisor(codes: Tensor, scales: Tensor, global_scale: Tensor) -> Nvfp4Matrix:
    """The matrix of compressed-tensors' tensors; raises `CheckpointError` where the scale cannot divide."""
    value = float(global_scale)
    _require_scale("weight_global_scale", value, math.isfinite(value) and value != 0)
    divisor = global_scale.reshape(1)
    kept = None if _is_power_of_two(value) else divisor
    return Nvfp4Matrix(codes, scales, torch.ones_like(divisor) / divisor, kept)


def _require_scale(name: str, value: float, usable: bool) -> None:
    if not usable:
        raise CheckpointError(
            "the global scale of an NVFP4 matrix cannot be used",
            where=name,
            found=str(value),
            expected="a finite number, and not 0 where it divides",
            hint="fetch or copy the checkpoint again",
        )


def encode(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes, scales and global multiplier (a scalar) of float32 ``[N, K]``, rounded to nearest.

    ``scale_2 = amax / (6 * 448)``, a block's scale ``e4m3(bmax / 6 / scale_2)``, a code
    ``e2m1(w / (scale * scale_2))``, all true divisions (the modelopt quantiser). A block whose scale rounds to zero
    has codes 0; an all-zero matrix has a multiplier of 1.
    """
    amax = weight.abs().amax()
    scale_2 = torch.where(amax > 0, amax / constant(E2M1_MAX * E4M3_MAX, weight), torch.ones_like(amax))
    blocks = in_groups(weight, GROUP)
    scales = encode_e4m3(blocks.abs().amax(-1) / constant(E2M1_MAX, weight) / scale_2)
    return _codes(blocks, decode_e4m3(scales) * scale_2), scales, scale_2


def encode_divided(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The same with a global divisor ``(6 * 448) / amax``, for compressed-tensors."""
    amax = weight.abs().amax()
    divisor = torch.where(amax > 0, constant(E2M1_MAX * E4M3_MAX, weight) / amax, torch.ones_like(amax))
    blocks = in_groups(weight, GROUP)
    scales = encode_e4m3(blocks.abs().amax(-1) / constant(E2M1_MAX, weight) * divisor)
    return _codes(blocks, decode_e4m3(scales) / divisor), scales, divisor


def _codes(blocks: Tensor, steps: Tensor) -> Tensor:
    """uint8 ``[N, K / 2]``: each block ``[N, K / 16, 16]`` over its step ``[N, K / 16]``, packed."""
    steps = steps.unsqueeze(-1)
    scaled = torch.where(steps > 0, blocks / steps, torch.zeros_like(blocks))
    return pack_nibbles(encode_e2m1(scaled).flatten(-2))
