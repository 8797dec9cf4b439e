"""Stored matrices in MMA fragment order (`dgpp_core.ops.kernels.fragments`), made once when a model is loaded.

Rows are moved to the device and packed a few million weights at a time, so that a matrix needs little more memory than
its packed form.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator

import torch
from msgspec import Struct
from torch import Tensor

from dgpp_core.api.errors import CheckpointError
from dgpp_core.formats.fp8 import Fp8BlockMatrix
from dgpp_core.formats.nvfp4 import Nvfp4Matrix

CHUNK = 1 << 24
"""Most weights packed at once."""


class PackedBf16(Struct, frozen=True, eq=False):
    """Attributes:
    words: int32 ``[N/16, K/64, 2, 2, 32, 4]``: row tile, chunk, row half, half of 16 k, lane, eight bf16.
    """

    words: Tensor


class PackedFp8(Struct, frozen=True, eq=False):
    """Attributes:
    words: int32 ``[N/16, K/64, 2, 32, 4]``: row tile, chunk, row half, lane, 16 e4m3 bytes.
    scales: float32 ``[N/16, K/128]``.
    """

    words: Tensor
    scales: Tensor


class PackedNvfp4(Struct, frozen=True, eq=False):
    """Attributes:
    codes: int32 ``[N/16, K/64, 32, 4]``: row tile, chunk, lane, word (h, row half) of eight scattered codes.
    scales: int32 ``[N/16, K/128, 32]``: byte 2 c + row half is the scale code of chunk c.
    multipliers: float32 ``[N/16]``, the global scale of each row tile times 2^8.
    """

    codes: Tensor
    scales: Tensor
    multipliers: Tensor


def row_chunks(rows: int, columns: int, most: int = CHUNK) -> Iterator[slice]:
    """Whole row tiles, as many as hold ``most`` weights, until all rows are covered."""
    step = max(16, most // columns // 16 * 16)
    for start in range(0, rows, step):
        yield slice(start, min(start + step, rows))


def _room(stored: Tensor, shape: tuple[int, ...], device: torch.device, consume: bool) -> Tensor:
    """int32 ``shape`` on ``device``, new, or the memory of ``stored`` itself: a row tile has the same place in both."""
    if consume and stored.device.type == device.type and stored.is_contiguous():
        return stored.flatten().view(torch.uint8).view(torch.int32).view(shape)
    return torch.empty(shape, dtype=torch.int32, device=device)


def pack_bf16(weight: Tensor, device: torch.device, consume: bool = False) -> PackedBf16:
    """bfloat16 ``[N, K]``, N a multiple of 16 and K of 128, in fragment order on ``device``.

    Args:
        consume: the weight may be overwritten, so that packing takes no second copy of it.
    """
    rows, columns = weight.shape
    words = _room(weight, (rows // 16, columns // 64, 2, 2, 32, 4), device, consume)
    target = words.view(torch.bfloat16).view(rows // 16, columns // 64, 2, 2, 8, 4, 8)
    for part in row_chunks(rows, columns):
        tiles = weight[part].to(device, copy=consume).view(-1, 2, 8, columns // 64, 4, 2, 8)  # tile r g c q jj k
        target[part.start // 16 : part.stop // 16].copy_(tiles.permute(0, 3, 1, 5, 2, 4, 6))
    return PackedBf16(words)


def pack_fp8(matrix: Fp8BlockMatrix, device: torch.device, name: str, consume: bool = False) -> PackedFp8:
    """An FP8 matrix whose blocks are multiples of 16 rows and 128 columns, in fragment order on ``device``.

    ``consume`` as in `pack_bf16`.

    Raises:
        CheckpointError: a weight is NaN.
    """
    rows, columns = matrix.shape
    words = _room(matrix.codes, (rows // 16, columns // 64, 2, 32, 4), device, consume)
    target = words.view(torch.uint8).view(rows // 16, columns // 64, 2, 8, 4, 16)
    for part in row_chunks(rows, columns):
        codes = matrix.codes[part].view(torch.uint8).to(device, copy=consume)
        _refuse(bool(((codes & 0x7F) == 0x7F).any()), "an FP8 matrix has weights that are not numbers", name)
        tiles = codes.view(-1, 2, 8, columns // 64, 4, 16)  # tile r g c q k
        target[part.start // 16 : part.stop // 16].copy_(tiles.permute(0, 3, 1, 2, 4, 5))
    tile = torch.arange(0, rows, 16, device=matrix.scales.device) // matrix.block[0]
    slot = torch.arange(0, columns, 128, device=matrix.scales.device) // matrix.block[1]
    return PackedFp8(words, matrix.scales[tile][:, slot].to(device).contiguous())


def pack_nvfp4(matrix: Nvfp4Matrix, device: torch.device, name: str, consume: bool = False) -> PackedNvfp4:
    """An NVFP4 matrix whose global scales cover whole row tiles, in fragment order on ``device``.

    A scale becomes an 8-bit code without subnormals; under a scale of zero all codes become zero. ``consume`` as in
    `pack_bf16`.

    Raises:
        CheckpointError: a scale is negative or NaN.
    """
    rows, columns = matrix.shape
    codes = _room(matrix.codes, (rows // 16, columns // 64, 32, 4), device, consume)
    scales = _room(matrix.scales, (rows // 16, columns // 128, 32), device, consume)
    table = scattered_codes().to(device)
    recode = scale_codes().to(device)
    for part in row_chunks(rows, columns):
        tiles = slice(part.start // 16, part.stop // 16)
        raw = matrix.scales[part].view(torch.uint8).to(device)
        _refuse(bool((raw >= 0x7F).any()), "an NVFP4 matrix has block scales that are negative or not numbers", name)
        pairs = matrix.codes[part].to(device).view(-1, columns // 16, 8)
        pairs = pairs.masked_fill((raw == 0).unsqueeze(-1), 0)
        steps = pairs.view(-1, 2, 8, columns // 64, 4, 4, 2).permute(5, 0, 3, 2, 4, 6, 1)  # j tile c g q h r
        words = _look_up(table[0], steps[0])
        for step in range(1, 4):
            words |= _look_up(table[step], steps[step])
        codes[tiles] = words.view(codes[tiles].shape)
        blocks = _look_up(recode, raw).view(-1, 2, 8, columns // 128, 2, 4).permute(0, 3, 2, 5, 4, 1)
        scales[tiles] = blocks.flatten().view(torch.int32).view(scales[tiles].shape)
    multipliers = matrix.globals.to(device=device, dtype=torch.float32) * 256.0
    return PackedNvfp4(codes, scales, multipliers.repeat_interleave(rows // 16 // len(multipliers)))


def _look_up(table: Tensor, index: Tensor) -> Tensor:
    """``table[index]`` for a uint8 index."""
    return table.index_select(0, index.to(torch.int32).flatten()).view(index.shape)


@functools.cache
def scattered_codes() -> Tensor:
    """int32 ``[4, 256]``: a byte of two codes (the low nibble is the even k) in its bits of a word, by step.

    Half i of a word (o = 16 i) holds the codes of k ``2 h + i``. A rotation and the mask 0x81C081C0 give a step as
    two bf16 in units of 2^-126, sign in bit 15 and magnitude in bits 8 to 6: step 0 lies in place, steps 1 and 2 are
    rotated by 3 and 6; of step 3 every bit is where one multiplication by 0x1084 puts it in place.
    """
    table = [[0] * 256 for _ in range(4)]
    for byte in range(256):
        for half, code in enumerate((byte & 15, byte >> 4)):
            magnitude, sign, o = code & 7, code >> 3, 16 * half
            table[0][byte] |= magnitude << (6 + o) | sign << (15 + o)
            table[1][byte] |= magnitude << (9 + o) | sign << (18 + o) % 32
            table[2][byte] |= magnitude << (12 + o) | sign << (21 + o) % 32
            table[3][byte] |= (magnitude & 1) << (4 + o) | (magnitude >> 1) << o | sign << (3 + o)
    return torch.tensor(table, dtype=torch.int64).to(torch.int32)


@functools.cache
def scale_codes() -> Tensor:
    """uint8 ``[256]``: an e4m3 byte ``2^e (1 + m/8)``, subnormals included, as ``8 (e + 10) + m``; zero is 0."""
    values = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).to(torch.float32)
    fraction, exponent = torch.frexp(values)
    codes = 8 * (exponent + 9) + ((2 * fraction - 1) * 8).round().to(torch.int32)
    return torch.cat([torch.where(values > 0, codes, 0).to(torch.uint8), torch.zeros(129, dtype=torch.uint8)])


def _refuse(wrong: bool, what: str, name: str) -> None:
    if wrong:
        raise CheckpointError(what, where=name, hint="fetch or copy the checkpoint again")
