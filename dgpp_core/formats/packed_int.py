"""Signed integers packed into 32-bit words, with a floating-point scale per group of columns.

Fields are unsigned (the value plus half their range), the first column in a word's least significant bits.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from dgpp_core.formats.scalars import constant, in_groups
from dgpp_core.formats.storage import require_aligned
from dgpp_core.formats.stored import StoredMatrix, spread, take_columns

WORD_BITS = 32


class PackedIntMatrix(StoredMatrix, frozen=True, eq=False):
    """``w[n, k] = (field - 2^(bits - 1)) * scales[n, k / group]``, exact in float32 with 16-bit scales.

    Attributes:
        words: int32 ``[N, K * bits / 32]``.
        scales: bfloat16, float16 or float32 ``[N, K / group]``, as stored.
        bits: 4 or 8.
        group: columns a scale.
    """

    words: Tensor
    scales: Tensor
    bits: int
    group: int

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.words.shape[0], self.words.shape[1] * WORD_BITS // self.bits

    def dequantise(self) -> Tensor:
        """float32 ``[N, K]``."""
        values = (unpack_fields(self.words, self.bits) - (1 << (self.bits - 1))).to(torch.float32)
        return values * spread(self.scales.to(torch.float32), self.group)

    def rows(self, start: int, count: int) -> Self:
        """Rows ``start .. start + count``, views."""
        return type(self)(
            self.words.narrow(0, start, count), self.scales.narrow(0, start, count), self.bits, self.group
        )

    def columns(self, start: int, count: int) -> Self:
        """Columns ``start .. start + count``, copies.

        Raises:
            CheckpointError: the slice splits a group.
        """
        require_aligned(start, count, self.group, f"an int{self.bits} matrix")
        fields = WORD_BITS // self.bits
        return type(self)(
            take_columns(self.words, start // fields, count // fields),
            take_columns(self.scales, start // self.group, count // self.group),
            self.bits,
            self.group,
        )

    @classmethod
    def stack(cls, parts: list[Self]) -> Self:
        """Parts of equal K, bits, group and scale dtype below each other."""
        words, scales = torch.cat([part.words for part in parts]), torch.cat([part.scales for part in parts])
        return cls(words, scales, parts[0].bits, parts[0].group)


def pack_fields(fields: Tensor, bits: int) -> Tensor:
    """Unsigned fields int64 ``[N, K]`` to words int32 ``[N, K * bits / 32]``."""
    shifts = torch.arange(0, WORD_BITS, bits, device=fields.device)
    words = (in_groups(fields, WORD_BITS // bits) << shifts).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_fields(words: Tensor, bits: int) -> Tensor:
    """Words int32 to unsigned fields int32 ``[N, K]``."""
    shifts = torch.arange(0, WORD_BITS, bits, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & ((1 << bits) - 1)).flatten(-2)


def encode(weight: Tensor, bits: int, group: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Words and scales of float32 ``[N, K]``, symmetric and rounded to nearest.

    A scale is ``max|w| / ((2^bits - 1) / 2)`` rounded to ``dtype`` (1 where that is 0); a code is
    ``rint(w * (1 / scale))``, clamped.
    """
    groups = in_groups(weight, group)
    amax = groups.abs().amax(-1)
    scales = (amax / constant(((1 << bits) - 1) / 2, weight)).to(dtype)
    scales = torch.where(scales > 0, scales, torch.ones_like(scales))
    half = 1 << (bits - 1)
    inverse = torch.ones_like(amax) / scales.to(torch.float32)
    codes = torch.round(groups * inverse.unsqueeze(-1)).clamp(-half, half - 1).to(torch.int64) + half
    return pack_fields(codes.flatten(-2), bits), scales
