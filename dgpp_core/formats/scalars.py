"""The small floating-point formats, exactly: decoded by table, encoded to nearest with ties to even.

e4m3 and the e8m0 exponent follow the OCP 8-bit and microscaling formats (MX v1.0); e2m1 is their 4-bit element.
Divisions are of a tensor by a tensor: a division by a Python number may become a product with its reciprocal.
"""

from __future__ import annotations

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
E2M1_LEVELS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)


def constant(value: float, like: Tensor) -> Tensor:
    """A float32 scalar tensor beside ``like``: the operand that keeps a division a division."""
    return torch.full((), value, dtype=torch.float32, device=like.device)


def encode_e4m3(x: Tensor) -> Tensor:
    """float32 to float8_e4m3fn: nearest, ties to even, saturating at 448; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


def decode_e4m3(codes: Tensor) -> Tensor:
    """float8_e4m3fn to float32."""
    return codes.to(torch.float32)


def encode_e2m1(x: Tensor) -> Tensor:
    """float32 to codes uint8 0..15 (sign times 8, plus the level): nearest, ties to the even code.

    Saturates at 6, which is also what a NaN becomes.
    """
    size = x.abs()
    code = torch.zeros_like(size, dtype=torch.uint8)
    for bound, tie_goes_up in ((0.25, False), (0.75, True), (1.25, False), (1.75, True), (2.5, False), (3.5, True)):
        code += (size >= bound) if tie_goes_up else (size > bound)
    code += size > 5.0
    code = torch.where(size.isnan(), torch.full_like(code, 7), code)
    return code | (torch.signbit(x).to(torch.uint8) << 3)


def decode_e2m1(codes: Tensor) -> Tensor:
    """Codes 0..15 to float32. By arithmetic: a table would have to be copied to the device, which no graph may do."""
    mantissa, exponent = (codes & 1).to(torch.float32), (codes >> 1) & 3
    normal = torch.ldexp(1 + 0.5 * mantissa, exponent.to(torch.float32) - 1)
    size = torch.where(exponent > 0, normal, 0.5 * mantissa)
    return torch.where((codes & 8) > 0, -size, size)


def in_groups(x: Tensor, size: int) -> Tensor:
    """``[..., W]`` as ``[..., W / size, size]``."""
    return x.reshape(*x.shape[:-1], -1, size)


def pack_nibbles(codes: Tensor) -> Tensor:
    """uint8 ``[..., K]`` of values below 16 to ``[..., K / 2]``: the low nibble is the even column."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """uint8 ``[..., K / 2]`` to ``[..., K]`` of values below 16."""
    return torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)


def decode_e8m0(exponents: Tensor) -> Tensor:
    """uint8 e to float32 ``2^(e - 127)``; 255 is NaN, 0 the subnormal ``2^-127``."""
    bits = exponents.to(torch.int32) << 23
    bits = torch.where(exponents == 0, torch.full_like(bits, 1 << 22), bits)
    bits = torch.where(exponents == 255, torch.full_like(bits, 0x7FC00000), bits)
    return bits.view(torch.float32)


def encode_e8m0(scale: Tensor) -> Tensor:
    """The exponent byte of float32 powers of two, uint8."""
    return ((scale.contiguous().view(torch.int32) >> 23) & 255).to(torch.uint8)


def pow2ceil(x: Tensor) -> Tensor:
    """Smallest power of two not below a positive float32: its exponent field, plus one if any mantissa bit is set."""
    bits = x.contiguous().view(torch.int32)
    exponent = ((bits >> 23) & 255) + ((bits & 0x7FFFFF) != 0).to(torch.int32)
    return (exponent << 23).view(torch.float32)
