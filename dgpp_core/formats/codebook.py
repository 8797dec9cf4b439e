"""Levels of a codebook in 3, 4 or 6 bits with a scale per 128 columns, of a matrix whose inputs are rotated.

What is stored is ``W R``, where R turns each 32 columns by a Hadamard matrix over sqrt(32) (QuaRot, 2024): no column
then stands out, and few levels do. R is its own inverse, so the matrix itself comes back by rotating once more.

Fields lie in one stream of bits a row, the first column in the least significant ones: 32 columns are ``bits`` words,
and a field of 3 or 6 bits may go on in the next word.
"""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor

from dgpp_core.formats.levels import LEVELS
from dgpp_core.formats.scalars import constant, in_groups
from dgpp_core.formats.storage import require_aligned
from dgpp_core.formats.stored import StoredMatrix, spread, take_columns

GROUP, BLOCK, WORD_BITS = 128, 32, 32
LARGEST = {3: 127 / 0.75, 4: 127.0, 6: 31.0}
"""By bits, what the largest magnitude of a group is mapped to. In 3 bits it lies beyond the last level."""
TURN = 0.17677669529663687
"""1 / sqrt(32)."""


class CodebookMatrix(StoredMatrix, frozen=True, eq=False):
    """``w = (level(field) * scale) R``.

    Attributes:
        words: int32 ``[N, K * bits / 32]``.
        scales: bfloat16 ``[N, K / 128]``.
        bits: 3, 4 or 6.
    """

    words: Tensor
    scales: Tensor
    bits: int

    @property
    def shape(self) -> tuple[int, int]:
        """``(N, K)``."""
        return self.words.shape[0], self.words.shape[1] * WORD_BITS // self.bits

    def rotated(self) -> Tensor:
        """What is stored: float32 ``[N, K]``, exact. It multiplies rotated inputs."""
        return self._levels() * spread(self.scales.to(torch.float32), GROUP)

    def dequantise(self) -> Tensor:
        """float32 ``[N, K]``, rounded once: a block has one scale, and sums of 32 levels are exact."""
        turned = _butterflies(self._levels()) * spread(self.scales.to(torch.float32), GROUP)
        return turned * constant(TURN, turned)

    def _levels(self) -> Tensor:
        levels = torch.tensor(LEVELS[self.bits], dtype=torch.float32, device=self.words.device)
        return levels[unpack_stream(self.words, self.bits)]

    def rows(self, start: int, count: int) -> Self:
        """Rows ``start .. start + count``, views."""
        return type(self)(self.words.narrow(0, start, count), self.scales.narrow(0, start, count), self.bits)

    def columns(self, start: int, count: int) -> Self:
        """Columns ``start .. start + count``, copies.

        Raises:
            CheckpointError: the slice splits a group.
        """
        require_aligned(start, count, GROUP, f"a matrix in a codebook of {self.bits} bits")
        return type(self)(
            take_columns(self.words, start // BLOCK * self.bits, count // BLOCK * self.bits),
            take_columns(self.scales, start // GROUP, count // GROUP),
            self.bits,
        )

    @classmethod
    def stack(cls, parts: list[Self]) -> Self:
        """Parts of equal K and bits below each other."""
        words, scales = torch.cat([part.words for part in parts]), torch.cat([part.scales for part in parts])
        return cls(words, scales, parts[0].bits)


def rotate(x: Tensor) -> Tensor:
    """Each 32 columns of float32 ``[..., K]`` times R: five rounds of sums and differences, and one product."""
    return _butterflies(x) * constant(TURN, x)


def _butterflies(x: Tensor) -> Tensor:
    for stride in (1, 2, 4, 8, 16):
        pairs = x.reshape(*x.shape[:-1], -1, 2, stride)
        first, second = pairs.unbind(-2)
        x = torch.stack((first + second, first - second), dim=-2).reshape(x.shape)
    return x


def encode(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Words and scales of float32 ``[N, K]``."""
    return encode_rotated(rotate(weight), bits)


def encode_rotated(weight: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The same of a matrix that is rotated already, each value rounded to the nearest level, halfway to the lower one.

    A scale is ``max|w| / LARGEST`` rounded to bfloat16; that of zeros is 0, since 3 bits have no level for them. Levels
    of 6 bits are all integers, where halfway is to the even one.
    """
    groups = in_groups(weight, GROUP)
    scales = (groups.abs().amax(-1) / constant(LARGEST[bits], weight)).to(torch.bfloat16)
    values = groups / torch.where(scales > 0, scales, torch.ones_like(scales)).to(torch.float32).unsqueeze(-1)
    if bits == 6:
        fields = torch.round(values).clamp(-32, 31).to(torch.int32) + 32
    else:
        levels = torch.tensor(LEVELS[bits], dtype=torch.float32, device=weight.device)
        fields = torch.bucketize(values, (levels[:-1] + levels[1:]) / 2, out_int32=True)
    return pack_stream(fields.flatten(-2), bits), scales


def pack_stream(fields: Tensor, bits: int) -> Tensor:
    """Fields ``[N, K]`` to words int32 ``[N, K * bits / 32]``."""
    columns = in_groups(fields.to(torch.int64), BLOCK)
    words = torch.zeros(*columns.shape[:-1], bits + 1, dtype=torch.int64, device=fields.device)
    for column in range(BLOCK):
        word, shift = divmod(column * bits, WORD_BITS)
        moved = columns[..., column] << shift
        words[..., word] |= moved & 0xFFFFFFFF
        words[..., word + 1] |= moved >> WORD_BITS
    words = words[..., :bits].flatten(-2)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def unpack_stream(words: Tensor, bits: int) -> Tensor:
    """Words int32 to fields int32 ``[N, K]``."""
    starts = torch.arange(0, BLOCK * bits, bits, device=words.device)
    word, shift = starts // WORD_BITS, (starts % WORD_BITS).to(torch.int32)
    here = torch.clamp(WORD_BITS - shift, max=bits)  # bits of the field in its first word
    low = (1 << here) - 1
    blocks = in_groups(words, bits)
    first = (blocks[..., word] >> shift) & low
    rest = (blocks[..., (word + 1).clamp(max=bits - 1)] << here) & (((1 << bits) - 1) & ~low)
    return (first | rest).flatten(-2)
