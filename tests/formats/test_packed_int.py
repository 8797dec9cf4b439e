"""Packed integers: the place of each field, and the encoder against its own definition in scalar arithmetic."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from dgpp_core.formats import packed_int


def test_the_first_column_is_in_the_least_significant_bits() -> None:
    fields = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15]])
    assert packed_int.pack_fields(fields, 4).tolist() == [[0xF7654321 - (1 << 32)]]
    assert packed_int.pack_fields(fields[:, :4], 8).tolist() == [[0x04030201]]


@pytest.mark.parametrize("bits", [4, 8])
@given(data=st.data())
def test_fields_go_there_and_back(bits: int, data: st.DataObject) -> None:
    row = data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=16, max_size=16))
    words = packed_int.pack_fields(torch.tensor([row]), bits)
    expected = sum(value << (bits * i) for i, value in enumerate(row))
    assert int.from_bytes(words.numpy().tobytes(), "little") == expected
    assert packed_int.unpack_fields(words, bits).tolist() == [row]


@pytest.mark.parametrize(("bits", "group", "dtype"), [(4, 64, torch.bfloat16), (8, 128, torch.float16)])
def test_the_encoder_by_its_definition(bits: int, group: int, dtype: torch.dtype) -> None:
    weight = torch.randn(3, 256, generator=torch.Generator().manual_seed(2))
    weight[1, :group] = 0
    words, scales = packed_int.encode(weight, bits, group, dtype)
    fields = packed_int.unpack_fields(words, bits)
    half, one = 1 << (bits - 1), np.float32(1)
    for n in range(3):
        for k in range(256):
            scale = np.float32(scales[n, k // group].item())
            code = np.clip(np.rint(np.float32(weight[n, k].item()) * (one / scale)), -half, half - 1)
            assert int(fields[n, k]) == int(code) + half, (n, k)
    largest = weight.view(3, -1, group).abs().amax(-1).numpy() / np.float32(half - 0.5)
    expected = torch.from_numpy(np.where(largest > 0, largest, one)).to(dtype)
    assert torch.equal(scales, expected)


def test_sixteen_bit_scales_give_exact_values() -> None:
    words = packed_int.pack_fields(torch.arange(256).view(1, 256), 8)
    scales = torch.tensor([[1.0078125, 3.0, 0.0062561035, 1e-4]]).to(torch.bfloat16)
    matrix = packed_int.PackedIntMatrix(words, scales, 8, 64)
    exact = (torch.arange(256).double() - 128) * scales.double().repeat_interleave(64, 1)
    assert torch.equal(matrix.dequantise().double(), exact)
