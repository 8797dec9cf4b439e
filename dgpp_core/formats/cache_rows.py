"""Rows of the key/value cache in small formats, quantised from the bfloat16 row an operator produced.

All arithmetic is float32; each function says its formula, because ``x / s`` and ``x * (1 / s)`` round differently and
rows written by one and read as if by the other disagree. Leading dimensions are free; W is the row's width.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.formats.scalars import (
    E2M1_MAX,
    E4M3_MAX,
    constant,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    in_groups,
    pack_nibbles,
    pow2ceil,
    unpack_nibbles,
)


def encode_fp8_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 ``[..., W]`` and a float32 scale ``[...]`` a row: a latent, a K or V head, an index key.

    ``scale = amax / 448``; ``code = e4m3(x * (448 / amax))``; a row of zeros has codes and scale 0.
    """
    x = x.to(torch.float32)
    amax = x.abs().amax(-1, keepdim=True)
    limit = constant(E4M3_MAX, x)
    factor = torch.where(amax > 0, limit / amax, torch.zeros_like(amax))
    return encode_e4m3(x * factor), (amax / limit).squeeze(-1)


def decode_fp8_rows(codes: Tensor, scale: Tensor) -> Tensor:
    """float32 ``[..., W]``: ``code * scale``."""
    return decode_e4m3(codes) * scale.unsqueeze(-1)


SCALE_BYTES = 4
"""Of a row in `pack_fp8_rows`, after its codes."""


def pack_fp8_rows(x: Tensor) -> Tensor:
    """`encode_fp8_rows` as uint8 ``[..., W + 4]``: codes, then the bytes of the scale; one row in a pool."""
    codes, scale = encode_fp8_rows(x)
    return torch.cat((codes.view(torch.uint8), scale.unsqueeze(-1).contiguous().view(torch.uint8)), dim=-1)


def unpack_fp8_rows(rows: Tensor) -> Tensor:
    """float32 ``[..., W]`` of `pack_fp8_rows`; bytes of zero are zeros."""
    codes, scale = rows[..., :-SCALE_BYTES].contiguous(), rows[..., -SCALE_BYTES:].contiguous()
    return decode_fp8_rows(codes.view(torch.float8_e4m3fn), scale.view(torch.float32).squeeze(-1))


def encode_fp4_rows(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """A latent in e2m1: codes ``[..., W / 2]``, e4m3 block scales ``[..., W / 16]``, a float32 row scale ``[...]``.

    ``row = amax / (6 * 448)``; ``block = e4m3(bmax * (448 / amax))``; ``S = block * row``;
    ``code = e2m1(x * (1 / S))``, 0 where S is 0.
    """
    x = x.to(torch.float32)
    amax = x.abs().amax(-1, keepdim=True)
    row = amax / constant(E2M1_MAX * E4M3_MAX, x)
    groups = in_groups(x, 16)
    factor = torch.where(amax > 0, constant(E4M3_MAX, x) / amax, torch.zeros_like(amax))
    block = encode_e4m3(groups.abs().amax(-1) * factor)
    step = decode_e4m3(block) * row
    inverse = torch.where(step > 0, torch.ones_like(step) / step, torch.zeros_like(step))
    codes = encode_e2m1(groups * inverse.unsqueeze(-1)).flatten(-2)
    return pack_nibbles(codes), block, row.squeeze(-1)


def decode_fp4_rows(codes: Tensor, block: Tensor, row: Tensor) -> Tensor:
    """float32 ``[..., W]``: ``e2m1(code) * (block * row)``."""
    step = decode_e4m3(block) * row.unsqueeze(-1)
    return decode_e2m1(unpack_nibbles(codes)) * step.repeat_interleave(16, dim=-1)


def encode_fp8_window_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """A sliding-window row (DeepSeek V4): e4m3 ``[..., W]`` and an e8m0 exponent per 32, uint8 ``[..., W / 32]``.

    ``s = pow2ceil(max(amax, 1e-4) * (1 / 448))``; ``code = e4m3(clamp(x / s, -448, 448))``.
    """
    groups = in_groups(x.to(torch.float32), 32)
    amax = torch.maximum(groups.abs().amax(-1), constant(1e-4, x))
    step = pow2ceil(amax * constant(1 / E4M3_MAX, x))
    return encode_e4m3(groups / step.unsqueeze(-1)).flatten(-2), encode_e8m0(step)


def decode_fp8_window_rows(codes: Tensor, exponents: Tensor) -> Tensor:
    """float32 ``[..., W]``: ``code * 2^(exponent - 127)``, exact."""
    return decode_e4m3(codes) * decode_e8m0(exponents).repeat_interleave(32, dim=-1)


def encode_fp4_compressed_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """A compressed row (DeepSeek V4.1): e2m1 codes ``[..., W / 2]`` and an e4m3 scale per 16, no row scale.

    ``s = e4m3(max(amax, 6 * 2^-9) / 6)``; ``code = e2m1(x / s)``, divided by the rounded s.
    """
    groups = in_groups(x.to(torch.float32), 16)
    amax = torch.maximum(groups.abs().amax(-1), constant(E2M1_MAX * 2.0**-9, x))
    block = encode_e4m3(amax / constant(E2M1_MAX, x))
    return pack_nibbles(encode_e2m1(groups / decode_e4m3(block).unsqueeze(-1)).flatten(-2)), block


def decode_fp4_compressed_rows(codes: Tensor, block: Tensor) -> Tensor:
    """float32 ``[..., W]``: ``e2m1(code) * block``, exact."""
    return decode_e2m1(unpack_nibbles(codes)) * decode_e4m3(block).repeat_interleave(16, dim=-1)


def encode_mxfp4_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """An index key (DeepSeek V4.1): e2m1 codes ``[..., W / 2]`` and an e8m0 exponent per 32, uint8.

    ``s = pow2ceil(max(amax, 6 * 2^-126) * (1 / 6))``; ``code = e2m1(x / s)``.
    """
    groups = in_groups(x.to(torch.float32), 32)
    amax = torch.maximum(groups.abs().amax(-1), constant(E2M1_MAX * 2.0**-126, x))
    step = pow2ceil(amax * constant(1 / E2M1_MAX, x))
    return pack_nibbles(encode_e2m1(groups / step.unsqueeze(-1)).flatten(-2)), encode_e8m0(step)


def decode_mxfp4_rows(codes: Tensor, exponents: Tensor) -> Tensor:
    """float32 ``[..., W]``: ``e2m1(code) * 2^(exponent - 127)``, exact."""
    return decode_e2m1(unpack_nibbles(codes)) * decode_e8m0(exponents).repeat_interleave(32, dim=-1)
