"""FP8 (e4m3) matrices with a scale per block or per output row."""

from __future__ import annotations

import math
from typing import Self

import torch
from torch import Tensor

from dgpp_core.api.errors import CheckpointError
from dgpp_core.formats.scalars import E4M3_MAX, constant, decode_e4m3, encode_e4m3, pow2ceil
from dgpp_core.formats.storage import block_after_cut, joint_block
from dgpp_core.formats.stored import StoredMatrix, take_columns

SMALLEST_AMAX = 1e-4
"""Floor of a block's largest magnitude under power-of-two scales (DeepSeek V4 quantiser)."""


class Fp8BlockMatrix(StoredMatrix, frozen=True, eq=False):
    """``w[n, k] = codes[n, k] * scales[n / bn, k / bk]``, rounded once unless the scales are powers of two.

    Attributes:
        codes: float8_e4m3fn ``[N, K]``.
        scales: float32 ``[ceil(N / bn), ceil(K / bk)]``; e8m0 scales are widened, exactly.
        block: ``(bn, bk)``.
    """

    codes: Tensor
    scales: Tensor
    block: tuple[int, int]

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantise(self) -> Tensor:
        """float32 ``[N, K]``."""
        return decode_e4m3(self.codes) * _expand(self.scales, self.block, self.shape)

    def rows(self, start: int, count: int) -> Self:
        """Rows ``start .. start + count``, a view of the codes.

        A slice that splits a block gets smaller blocks with the parent's scales, as `block_after_cut` says, and
        raises as it does.
        """
        edge = block_after_cut(self.block[0], start, count, self.shape[0])
        return type(self)(
            self.codes.narrow(0, start, count),
            _reblock(self.scales, 0, self.block[0], edge, start, count),
            (edge, self.block[1]),
        )

    def columns(self, start: int, count: int) -> Self:
        """Columns ``start .. start + count``, copies; split blocks as for `rows`."""
        edge = block_after_cut(self.block[1], start, count, self.shape[1])
        return type(self)(
            take_columns(self.codes, start, count),
            _reblock(self.scales, 1, self.block[1], edge, start, count),
            (self.block[0], edge),
        )

    @classmethod
    def stack(cls, parts: list[Self]) -> Self:
        """Parts of equal K below each other, in blocks that divide the blocks and the heights of all of them.

        Raises:
            CheckpointError: those blocks would be too small, or K differs.
        """
        if len({part.shape[1] for part in parts}) != 1:
            raise CheckpointError(
                "matrices of different widths cannot be stacked", found=", ".join(str(list(p.shape)) for p in parts)
            )
        height = joint_block([part.block[0] for part in parts], [part.shape[0] for part in parts[:-1]])
        width = math.gcd(*(part.block[1] for part in parts))
        scales = [_to_block(part.scales, part.block, (height, width), part.shape) for part in parts]
        return cls(torch.cat([part.codes for part in parts]), torch.cat(scales), (height, width))


class Fp8ChannelMatrix(StoredMatrix, frozen=True, eq=False):
    """``w[n, k] = codes[n, k] * scales[n]``, rounded once.

    Attributes:
        codes: float8_e4m3fn ``[N, K]``.
        scales: float32 ``[N]``.
    """

    codes: Tensor
    scales: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.codes.shape[0], self.codes.shape[1]

    def dequantise(self) -> Tensor:
        """float32 ``[N, K]``."""
        return decode_e4m3(self.codes) * self.scales.unsqueeze(1)

    def rows(self, start: int, count: int) -> Self:
        """Rows ``start .. start + count``, views."""
        return type(self)(self.codes.narrow(0, start, count), self.scales.narrow(0, start, count))

    def columns(self, start: int, count: int) -> Self:
        """Columns ``start .. start + count``, a copy of the codes."""
        return type(self)(take_columns(self.codes, start, count), self.scales)

    @classmethod
    def stack(cls, parts: list[Self]) -> Self:
        """Parts of equal K below each other."""
        return cls(torch.cat([part.codes for part in parts]), torch.cat([part.scales for part in parts]))


def encode_block(weight: Tensor, block: tuple[int, int], power_of_two: bool = False) -> tuple[Tensor, Tensor]:
    """Codes and float32 block scales of float32 ``[N, K]``, rounded to nearest.

    A scale is ``amax / 448`` of its block (1 for a block of zeros), or with ``power_of_two``
    ``pow2ceil(max(amax, 1e-4) * (1 / 448))``; a code is ``e4m3(w / scale)`` by true division.
    """
    rows, columns = weight.shape
    padded = torch.nn.functional.pad(weight, (0, -columns % block[1], 0, -rows % block[0]))
    amax = padded.view(-1, block[0], padded.shape[1] // block[1], block[1]).abs().amax((1, 3))
    floored = amax.clamp_min(SMALLEST_AMAX)
    scales = pow2ceil(floored * constant(1 / E4M3_MAX, weight)) if power_of_two else _scale(amax)
    return encode_e4m3(weight / _expand(scales, block, (rows, columns))), scales


def encode_channel(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes and float32 scales ``[N]``: the same with one scale ``amax / 448`` a row."""
    scales = _scale(weight.abs().amax(1))
    return encode_e4m3(weight / scales.unsqueeze(1)), scales


def _scale(amax: Tensor) -> Tensor:
    return torch.where(amax > 0, amax / constant(E4M3_MAX, amax), torch.ones_like(amax))


def _expand(scales: Tensor, block: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """Block scales repeated to ``shape``."""
    return _to_block(scales, block, (1, 1), shape)


def _to_block(scales: Tensor, block: tuple[int, int], smaller: tuple[int, int], shape: tuple[int, int]) -> Tensor:
    """The scales of the same matrix in blocks that divide ``block``."""
    for axis in (0, 1):
        scales = _reblock(scales, axis, block[axis], smaller[axis], 0, shape[axis])
    return scales


def _reblock(scales: Tensor, axis: int, block: int, edge: int, start: int, count: int) -> Tensor:
    """Scales of ``start .. start + count`` along one axis, in blocks of ``edge`` that each lie inside one parent."""
    positions = torch.arange(start, start + count, edge, device=scales.device)
    return scales.index_select(axis, torch.div(positions, block, rounding_mode="floor"))
