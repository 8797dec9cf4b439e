"""bf12: a bfloat16 matrix in 12 bits a weight, restored bit for bit.

The exponents of a trained matrix's row lie close together: 15 consecutive ones hold nearly all. A weight is a byte of
sign and mantissa and a 4-bit offset from its row's first exponent; the few weights outside are listed, and a row with
too many of them is kept as it was. Packed from the bfloat16 weight at load; kernels permute the two planes for
themselves.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from dgpp_core.formats.scalars import pack_nibbles, unpack_nibbles
from dgpp_core.formats.storage import require_aligned
from dgpp_core.formats.stored import StoredMatrix

COLUMN_UNIT, MAX_COLUMNS = 1024, 1 << 16
WINDOW = 15
ESCAPE = 15
MAX_ESCAPES = 64
"""Most escapes of a row; one with more is raw."""

RAW_SHARE = 8
"""A matrix with more than one raw row in so many is not packed."""

_CHUNK = 1 << 24


class Bf12Matrix(StoredMatrix, frozen=True, eq=False):
    """A bfloat16 matrix ``[N, K]``; E escapes and R raw rows in all.

    Attributes:
        mantissas: uint8 ``[N, K]``, sign in bit 7, mantissa below; 0 in a raw row.
        offsets: uint8 ``[N, K / 2]``, exponent minus the row's base, or `ESCAPE`; the low nibble is the even column.
        heads: int32 ``[N + 1, 2]``: the index of a row's first escape; and its base exponent << 23, or for a raw row
            the sign bit and the row's number in ``raw``. The last entry is (E, 0).
        escapes: int32 ``[E]``, column << 16 | bfloat16 bits, by row and ascending column.
        raw: bfloat16 ``[R, K]``, in row order.
    """

    mantissas: Tensor
    offsets: Tensor
    heads: Tensor
    escapes: Tensor
    raw: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.mantissas.shape[0], self.mantissas.shape[1]

    def weight(self) -> Tensor:
        """bfloat16 ``[N, K]``, the bits that were packed."""
        first, head = self.heads[:, 0], self.heads[:-1, 1]
        exponents = unpack_nibbles(self.offsets).to(torch.int16) + (head >> 23).to(torch.int16).unsqueeze(1)
        signed = self.mantissas.to(torch.int16)
        bits = ((signed & 0x80) << 8) | ((exponents << 7) + (signed & 0x7F))
        row = torch.repeat_interleave(torch.arange(head.shape[0], device=head.device), first[1:] - first[:-1])
        bits[row, (self.escapes >> 16) & 0xFFFF] = self.escapes.to(torch.int16)
        bits[head < 0] = self.raw.view(torch.int16)
        return bits.view(torch.bfloat16)

    def dequantise(self) -> Tensor:
        """float32 ``[N, K]``."""
        return self.weight().to(torch.float32)

    def rows(self, start: int, count: int) -> Self:
        """Rows ``start .. start + count``, packed anew."""
        return self._packed(self.weight().narrow(0, start, count))

    def columns(self, start: int, count: int) -> Self:
        """Columns ``start .. start + count``, packed anew.

        Raises:
            CheckpointError: they are not whole multiples of `COLUMN_UNIT`.
        """
        require_aligned(start, count, COLUMN_UNIT, "a bf12 matrix")
        return self._packed(self.weight().narrow(1, start, count))

    @classmethod
    def stack(cls, parts: list[Self]) -> Self:
        """Parts of equal K below each other, packed anew."""
        return cls._packed(torch.cat([part.weight() for part in parts]))

    @classmethod
    def _packed(cls, weight: Tensor) -> Self:
        return cls(*_pack(weight.contiguous()))


def encode(weight: Tensor) -> Bf12Matrix | None:
    """bfloat16 ``[N, K]`` packed, or None where it must stay as it is.

    That is: K is not a multiple of 1,024 or above 65,536, or more than one row in eight is raw.
    """
    rows, columns = weight.shape
    if columns % COLUMN_UNIT or columns > MAX_COLUMNS:
        return None
    matrix = Bf12Matrix(*_pack(weight.contiguous()))
    return matrix if matrix.raw.shape[0] * RAW_SHARE <= rows else None


def window_bases(exponents: Tensor) -> Tensor:
    """The base of each row of exponents int64 ``[N, K]``, int64 ``[N]``.

    The b in 0..241 for which b .. b + 14 hold the most weights of the row, the lowest such b.
    """
    counts = exponents.new_zeros(exponents.shape[0], 257)
    counts.scatter_add_(1, exponents + 1, torch.ones_like(exponents))
    below = counts.cumsum(1)
    held = below[:, WINDOW:] - below[:, :-WINDOW]
    last = held.shape[1] - 1
    return last - (held * (last + 1) + torch.arange(last, -1, -1, device=held.device)).amax(1) % (last + 1)


def _pack(weight: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The fields of `Bf12Matrix`, some rows at a time: the work takes 8 bytes and more a weight."""
    step = max(1, _CHUNK // weight.shape[1])
    pieces = [_pack_rows(piece) for piece in torch.split(weight, step)]
    mantissas, offsets, bases, outside, escapes, raw = (torch.cat(field) for field in zip(*pieces, strict=True))
    is_raw = outside > MAX_ESCAPES
    counts = torch.where(is_raw, torch.zeros_like(outside), outside)
    first = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
    marks = torch.where(is_raw, is_raw.cumsum(0) - 1 - (1 << 31), bases << 23)
    heads = torch.stack([first, torch.cat([marks, marks.new_zeros(1)])], dim=1)
    return mantissas, offsets, heads.to(torch.int32), escapes, raw


def _pack_rows(weight: Tensor) -> tuple[Tensor, ...]:
    """Mantissas, offsets, bases, weights outside the window a row, escapes of the rows that are not raw, raw rows."""
    bits = weight.view(torch.int16).to(torch.int64) & 0xFFFF
    exponents = (bits >> 7) & 0xFF
    bases = window_bases(exponents)
    offsets = exponents - bases.unsqueeze(1)
    outside = (offsets < 0) | (offsets >= WINDOW)
    count = outside.sum(1)
    is_raw = count > MAX_ESCAPES
    mantissas = ((bits >> 8) & 0x80) | (bits & 0x7F)
    offsets = torch.where(outside, torch.full_like(offsets, ESCAPE), offsets)
    mantissas[is_raw], offsets[is_raw] = 0, 0
    row, column = torch.nonzero(outside & ~is_raw.unsqueeze(1), as_tuple=True)
    escapes = (column << 16) | bits[row, column]
    escapes = torch.where(escapes >= 1 << 31, escapes - (1 << 32), escapes).to(torch.int32)
    return mantissas.to(torch.uint8), pack_nibbles(offsets.to(torch.uint8)), bases, count, escapes, weight[is_raw]
