"""Rows of the cache in small formats: golden codes, exact values, and the error that each is known for."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from dgpp_core.formats import cache_rows as rows
from dgpp_core.formats.scalars import decode_e4m3

FORMATS: dict[str, tuple[Callable[[Tensor], tuple[Tensor, ...]], Callable[..., Tensor]]] = {
    "fp8_row": (rows.encode_fp8_rows, rows.decode_fp8_rows),
    "fp4_row": (rows.encode_fp4_rows, rows.decode_fp4_rows),
    "window_row": (rows.encode_fp8_window_rows, rows.decode_fp8_window_rows),
    "compressed_row": (rows.encode_fp4_compressed_rows, rows.decode_fp4_compressed_rows),
    "mxfp4_row": (rows.encode_mxfp4_rows, rows.decode_mxfp4_rows),
}

FIELDS = {
    "fp8_row": ("codes", "scale"), "fp4_row": ("codes", "block", "row"), "window_row": ("codes", "exponents"),
    "compressed_row": ("codes", "block"), "mxfp4_row": ("codes", "exponents"),
}  # fmt: skip


@pytest.mark.parametrize("name", FORMATS)
def test_golden_codes(name: str, golden: dict[str, Tensor]) -> None:
    fields = FORMATS[name][0](golden["rows"].view(torch.bfloat16))
    for field, found in zip(FIELDS[name], fields, strict=True):
        expected = golden[f"{name}.{field}"]
        assert torch.equal(found.view(expected.dtype), expected), field


@pytest.mark.parametrize(
    ("name", "error"),
    [("fp8_row", 0.03), ("fp4_row", 0.1), ("window_row", 0.03), ("compressed_row", 0.1), ("mxfp4_row", 0.12)],
)
def test_relative_error_on_normal_rows(name: str, error: float) -> None:
    x = torch.randn(64, 512, generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    encode, decode = FORMATS[name]
    wide = x.to(torch.float32)
    assert float((decode(*encode(x)) - wide).norm() / wide.norm()) < error


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_does_not_depend_on_its_neighbours(name: str) -> None:
    x = torch.randn(2, 5, 128, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    encode, decode = FORMATS[name]
    together = decode(*encode(x))
    assert together.shape == x.shape
    for i in range(2):
        for j in range(5):
            assert torch.equal(decode(*encode(x[i, j])), together[i, j])


@pytest.mark.parametrize("name", FORMATS)
def test_a_row_of_zeros_is_zero(name: str) -> None:
    encode, decode = FORMATS[name]
    fields = encode(torch.zeros(2, 64, dtype=torch.bfloat16))
    assert not decode(*fields).any()
    assert not fields[0].view(torch.uint8).any()


def test_latent_scales_by_their_definition() -> None:
    x = torch.randn(3, 64, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    amax = x.to(torch.float32).abs().amax(-1)
    _, scale = rows.encode_fp8_rows(x)
    assert torch.equal(scale, amax / torch.full_like(amax, 448))
    codes, block, row = rows.encode_fp4_rows(x)
    assert torch.equal(row, amax / torch.full_like(amax, 6 * 448))
    assert decode_e4m3(block).amax(-1).tolist() == [448.0] * 3
    assert codes.shape == (3, 32)


def test_codes_divide_by_the_rounded_scale() -> None:
    """3.0 over the block scale of amax 6.5: 6.5 / 6 rounds to 1.125, so 3.0 is 2.67 steps and becomes 3."""
    x = torch.zeros(1, 16)
    x[0, 0], x[0, 1] = 6.5, 3.0
    codes, block = rows.encode_fp4_compressed_rows(x)
    assert decode_e4m3(block).tolist() == [[1.125]]
    assert rows.decode_fp4_compressed_rows(codes, block)[0, :2].tolist() == [6.75, 3.375]
