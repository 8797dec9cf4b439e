"""Small floating-point formats against their definitions, over every code and every rounding boundary."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from torch import Tensor

from dgpp_core.formats.scalars import (
    E2M1_LEVELS,
    decode_e2m1,
    decode_e4m3,
    decode_e8m0,
    encode_e2m1,
    encode_e4m3,
    encode_e8m0,
    pack_nibbles,
    pow2ceil,
    unpack_nibbles,
)


def _e4m3_value(code: int) -> float:
    """By definition: sign, 4 bits of exponent with bias 7, 3 of mantissa, no infinity."""
    exponent, mantissa = (code >> 3) & 15, code & 7
    if exponent == 15 and mantissa == 7:
        return math.nan
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if code & 128 else size


def _boundaries(levels: list[float]) -> Tensor:
    """float32 values around every level and every midpoint between neighbours, of both signs."""
    middles = [(low + high) / 2 for low, high in itertools.pairwise(levels)]
    at = np.array([*levels, *middles], np.float32)
    near = np.concatenate([at, np.nextafter(at, np.float32(np.inf)), np.nextafter(at, np.float32(-np.inf))])
    return torch.from_numpy(np.concatenate([near, -near]))


def _nearest(value: float, levels: list[float]) -> int:
    """Index of the nearest level to a magnitude; of two equally near ones, the even."""
    return min(range(len(levels)), key=lambda i: (abs(levels[i] - value), i % 2))


def test_every_e4m3_code_decodes_by_definition_and_encodes_back() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    expected = torch.tensor([_e4m3_value(code) for code in range(256)])
    values = decode_e4m3(codes.view(torch.float8_e4m3fn))
    torch.testing.assert_close(values, expected, rtol=0, atol=0, equal_nan=True)
    assert torch.equal(encode_e4m3(values).view(torch.uint8), codes)


def test_e4m3_rounds_to_nearest_with_ties_to_the_even_code() -> None:
    levels = [_e4m3_value(code) for code in range(127)]
    x = _boundaries(levels)
    expected = [_nearest(abs(v), levels) | (128 if math.copysign(1, v) < 0 else 0) for v in x.tolist()]
    assert encode_e4m3(x).view(torch.uint8).tolist() == expected


def test_e4m3_saturates_and_keeps_nan() -> None:
    x = torch.tensor([448.1, 464.0, 465.0, 1e30, math.inf, -math.inf, math.nan])
    assert encode_e4m3(x).view(torch.uint8).tolist() == [126, 126, 126, 126, 126, 254, 127]


def test_e2m1_rounds_to_nearest_with_ties_to_the_even_code() -> None:
    levels = list(E2M1_LEVELS[:8])
    assert levels == [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    x = _boundaries(levels)
    expected = [_nearest(abs(v), levels) | (8 if math.copysign(1, v) < 0 else 0) for v in x.tolist()]
    assert encode_e2m1(x).tolist() == expected
    assert encode_e2m1(torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])).tolist() == [0, 2, 2, 4, 4, 6, 6]


def test_e2m1_saturates_also_a_nan() -> None:
    assert encode_e2m1(torch.tensor([100.0, -math.inf, math.nan])).tolist() == [7, 15, 7]


def test_every_e2m1_code_goes_there_and_back() -> None:
    codes = torch.arange(16, dtype=torch.uint8)
    assert decode_e2m1(codes).tolist() == list(E2M1_LEVELS)
    assert torch.equal(encode_e2m1(decode_e2m1(codes)), codes)


def test_products_of_fp4_and_its_scales_are_exact_in_bfloat16() -> None:
    scales = decode_e4m3(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn))
    product = decode_e2m1(torch.arange(16, dtype=torch.uint8)).unsqueeze(1) * scales
    assert torch.equal(product.to(torch.bfloat16).to(torch.float32), product)


def test_every_e8m0_exponent() -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    values = decode_e8m0(codes)
    assert values[:255].tolist() == [math.ldexp(1, code - 127) for code in range(255)]
    assert math.isnan(values[255])
    assert torch.equal(encode_e8m0(values[1:255]), codes[1:255])


def test_pow2ceil_is_the_smallest_power_not_below() -> None:
    powers = np.exp2(np.arange(-126, 127, dtype=np.float64)).astype(np.float32)
    up, down = np.nextafter(powers, np.float32(np.inf)), np.nextafter(powers[1:], np.float32(0))
    x = torch.from_numpy(np.concatenate([powers, up, down]))
    expected = [math.ldexp(1, math.frexp(v)[1] - (math.frexp(v)[0] == 0.5)) for v in x.tolist()]
    assert pow2ceil(x).tolist() == expected


def test_the_low_nibble_is_the_even_column() -> None:
    codes = torch.tensor([[1, 2, 15, 0]], dtype=torch.uint8)
    assert pack_nibbles(codes).tolist() == [[0x21, 0x0F]]
    assert torch.equal(unpack_nibbles(pack_nibbles(codes)), codes)
