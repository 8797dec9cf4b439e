"""MXFP4: e2m1 codes with a power-of-two (e8m0) scale per 32 columns; every value is exact."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from dgpp_core.formats.cache_rows import encode_mxfp4_rows
from dgpp_core.formats.scalars import decode_e2m1, decode_e8m0, unpack_nibbles
from dgpp_core.formats.storage import require_aligned
from dgpp_core.formats.stored import StoredMatrix, spread, take_columns

GROUP = 32


class Mxfp4Matrix(StoredMatrix, frozen=True, eq=False):
    """``w[n, k] = e2m1(code) * 2^(scales[n, k / 32] - 127)``.

    Attributes:
        codes: uint8 ``[N, K / 2]``, the low nibble is the even column.
        scales: uint8 ``[N, K / 32]``, e8m0 exponents.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.codes.shape[0], 2 * self.codes.shape[1]

    def dequantise(self) -> Tensor:
        """float32 ``[N, K]``."""
        return decode_e2m1(unpack_nibbles(self.codes)) * spread(decode_e8m0(self.scales), GROUP)

    def rows(self, start: int, count: int) -> Self:
        """Rows ``start .. start + count``, views."""
        return type(self)(self.codes.narrow(0, start, count), self.scales.narrow(0, start, count))

    def columns(self, start: int, count: int) -> Self:
        """Columns ``start .. start + count``, copies.

        Raises:
            CheckpointError: the slice splits a group of 32.
        """
        require_aligned(start, count, GROUP, "an MXFP4 matrix")
        return type(self)(
            take_columns(self.codes, start // 2, count // 2), take_columns(self.scales, start // GROUP, count // GROUP)
        )

    @classmethod
    def stack(cls, parts: list[Self]) -> Self:
        """Parts of equal K below each other."""
        return cls(torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]))


def encode(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and scales of float32 ``[N, K]``, rounded to nearest: the arithmetic of an MXFP4 cache row."""
    return encode_mxfp4_rows(weight)
