"""Formulas at the edges where a quotient and a product with the reciprocal round apart, against numpy's float32."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from dgpp_core.formats import cache_rows, codec, fp8, nvfp4, packed_int
from dgpp_core.formats.scalars import decode_e4m3

Encoder = Callable[[Tensor], tuple[Tensor, Tensor]]
Array = np.ndarray[tuple[int, ...], np.dtype[np.float32]]

E4M3 = decode_e4m3(torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn)).numpy()
SIX, TOP = np.float32(6), np.float32(6 * 448)


def _around(values: Array, steps: int = 3) -> Array:
    """Each value and the ``steps`` float32 values on either side of it."""
    bits = np.ascontiguousarray(values, np.float32).view(np.int32)
    return (bits[:, None] + np.arange(-steps, steps + 1, dtype=np.int32)).ravel().view(np.float32)


def _nearest_e4m3(x: Array) -> Array:
    """By comparison with the midpoints of neighbouring codes; a tie takes the even one."""
    middles = (E4M3[1:].astype(np.float64) + E4M3[:-1]) / 2
    low = np.searchsorted(middles, x.astype(np.float64), side="left")
    tie = (low < 126) & (x == middles[np.minimum(low, 125)]) & (low % 2 == 1)
    return E4M3[low + tie]


@pytest.mark.parametrize("amax", [0.1, 0.37, 1.7, 3.3])
@pytest.mark.parametrize("divided", [False, True])
def test_block_scales_of_nvfp4(amax: float, divided: bool) -> None:
    top = np.float32(amax)
    middles = ((E4M3[8:] + E4M3[7:-1]) / 2).astype(np.float32)
    largest = _around(middles * SIX * (top / TOP))
    largest = np.append(largest[largest < top], top)
    weight = torch.zeros(len(largest), 16)
    weight[:, 5] = torch.from_numpy(largest)
    _, scales, whole = (nvfp4.encode_divided if divided else nvfp4.encode)(weight)
    factor = TOP / top if divided else top / TOP
    assert float(whole) == float(factor)
    expected = _nearest_e4m3(largest / SIX * factor if divided else largest / SIX / factor)
    assert decode_e4m3(scales)[:, 0].tolist() == expected.tolist()
    reciprocal = np.float32(1) / factor
    other = _nearest_e4m3(largest / SIX / reciprocal if divided else largest / SIX * reciprocal)
    assert other.tolist() != expected.tolist(), "these inputs do not tell the two formulas apart"


def test_power_of_two_scales_at_their_edges() -> None:
    largest = _around(np.exp2(np.arange(-30, 31)).astype(np.float32) * np.float32(448))
    _, scales = fp8.encode_block(torch.from_numpy(np.repeat(largest, 32)).view(-1, 32), (1, 32), power_of_two=True)
    quotient = np.maximum(largest, np.float32(1e-4)) * np.float32(1 / 448)
    mantissa, exponent = np.frexp(quotient)
    assert scales[:, 0].tolist() == np.ldexp(np.float32(1), exponent - (mantissa == 0.5)).tolist()


@pytest.mark.parametrize(
    ("encode", "top", "floor"),
    [(cache_rows.encode_fp8_window_rows, 448.0, 1e-4), (cache_rows.encode_mxfp4_rows, 6.0, 6 * 2.0**-126)],
)
def test_exponents_of_cache_rows_at_their_edges(encode: Encoder, top: float, floor: float) -> None:
    largest = _around(np.exp2(np.arange(-60, 61)).astype(np.float32) * np.float32(top))
    _, exponents = encode(torch.from_numpy(np.repeat(largest, 32)).view(-1, 32))
    mantissa, exponent = np.frexp(np.maximum(largest, np.float32(floor)) * np.float32(1 / top))
    assert exponents[:, 0].tolist() == (127 + exponent - (mantissa == 0.5)).tolist()


@pytest.mark.parametrize("bits", [4, 8])
def test_integer_codes_at_their_edges(bits: int) -> None:
    half = 1 << (bits - 1)
    halves = np.arange(1, half - 1, dtype=np.float32) + np.float32(0.5)
    told_apart = False
    for top in (0.1, 0.37, 1.7, 3.3, 0.9):
        scale = np.float32(torch.tensor(top / (half - 0.5)).to(torch.bfloat16).item())
        edges = _around(halves * scale)
        edges = np.pad(edges[edges < top], (0, -int((edges < top).sum()) % 63)).reshape(-1, 63)
        weight = np.concatenate([np.full((len(edges), 1), top, np.float32), edges], axis=1)
        words, scales = packed_int.encode(torch.from_numpy(weight), bits, 64, torch.bfloat16)
        assert set(scales.flatten().tolist()) == {float(scale)}
        expected = np.clip(np.rint(weight * (np.float32(1) / scale)), -half, half - 1)
        assert (packed_int.unpack_fields(words, bits).numpy() - half == expected).all()
        told_apart |= bool((np.clip(np.rint(weight / scale), -half, half - 1) != expected).any())
    assert told_apart, "these inputs do not tell the two formulas apart"


def test_row_scales_may_be_stored_as_a_column() -> None:
    weight = torch.randn(6, 32, generator=torch.Generator().manual_seed(1))
    tensors = codec.encode("fp8_channel", weight)
    column = tensors | {"weight_scale": tensors["weight_scale"].unsqueeze(1).to(torch.bfloat16)}
    values = codec.decode("fp8_channel", column, (6, 32)).dequantise()
    scales = tensors["weight_scale"].to(torch.bfloat16).to(torch.float32)
    assert torch.equal(values, decode_e4m3(tensors["weight"]) * scales.view(6, 1))
