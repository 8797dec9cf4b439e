"""Codebooks: the place of each field, the nearest level, and the rotation against the Hadamard matrix itself."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from dgpp_core.formats import codebook
from dgpp_core.formats.codebook import CodebookMatrix
from dgpp_core.formats.levels import LEVELS

BITS = [3, 4, 6]
SIGNS = torch.tensor([[(-1.0) ** (i & j).bit_count() for j in range(32)] for i in range(32)], dtype=torch.float64)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(4))


def turned(x: Tensor) -> Tensor:
    """Blocks of 32 times the Hadamard matrix, without its factor; float64."""
    return (x.double().view(*x.shape[:-1], -1, 32) @ SIGNS).flatten(-2)


@pytest.mark.parametrize("bits", BITS)
def test_golden_values(bits: int, golden: dict[str, Tensor]) -> None:
    words, scales = codebook.encode_rotated(golden["weight"], bits)
    assert torch.equal(words, golden[f"code{bits}.words"])
    assert torch.equal(scales.view(torch.int16), golden[f"code{bits}.scales"])
    assert torch.equal(CodebookMatrix(words, scales, bits).rotated(), golden[f"code{bits}.value"])


@pytest.mark.parametrize("bits", BITS)
@given(data=st.data())
def test_fields_are_one_stream_of_bits(bits: int, data: st.DataObject) -> None:
    row = data.draw(st.lists(st.integers(0, (1 << bits) - 1), min_size=64, max_size=64))
    words = codebook.pack_stream(torch.tensor([row]), bits)
    assert words.shape == (1, 2 * bits)
    assert int.from_bytes(words.numpy().tobytes(), "little") == sum(f << (bits * i) for i, f in enumerate(row))
    assert codebook.unpack_stream(words, bits).tolist() == [row]


@pytest.mark.parametrize("bits", BITS)
def test_each_value_goes_to_the_nearest_level_and_halfway_to_the_lower(bits: int) -> None:
    weight = normal(3, 256)
    weight[0, :128] = 0
    levels = np.array(LEVELS[bits], np.float64)
    if bits != 6:
        scale = 2.0 ** np.floor(np.log2(1 / levels[-1]))
        weight[1, : len(levels) - 1] = torch.from_numpy((levels[:-1] + levels[1:]) / 2 * scale)
        weight[1, 127] = codebook.LARGEST[bits] * scale  # so that the scale is this power of two
        weight[1, len(levels) : 127] = 0
    words, scales = codebook.encode_rotated(weight, bits)
    fields = codebook.unpack_stream(words, bits)
    for (n, k), field in np.ndenumerate(fields.numpy()):
        value = np.float32(weight[n, k].item()) / np.float32(scales[n, k // 128].item() or 1)
        assert field == int(np.argmin(np.abs(levels - np.float64(value)))), (n, k)
    assert scales[0, 0] == 0


def test_the_rotation_is_the_hadamard_matrix_and_its_own_inverse() -> None:
    x = normal(5, 256)
    assert torch.allclose(codebook.rotate(x).double(), turned(x) * 32**-0.5, atol=1e-6)
    assert torch.allclose(codebook.rotate(codebook.rotate(x)), x, atol=1e-6)


@pytest.mark.parametrize("bits", BITS)
def test_the_matrix_is_what_is_stored_turned_back_and_rounded_once(bits: int) -> None:
    words, scales = codebook.encode(normal(9, 384), bits)
    matrix = CodebookMatrix(words, scales, bits)
    exact = turned(matrix.rotated()) * float(np.float32(32**-0.5))
    assert torch.equal(matrix.dequantise(), exact.float())
    x = normal(4, 384)
    there, back = codebook.rotate(x) @ matrix.rotated().T, x @ matrix.dequantise().T
    assert torch.allclose(there, back, atol=1e-4)


def test_an_outlying_column_costs_less_when_it_is_turned() -> None:
    weight = normal(64, 256)
    weight[:, 7] *= 30
    words, scales = codebook.encode(weight, 3)
    straight = CodebookMatrix(*codebook.encode_rotated(weight, 3), 3).rotated()
    assert (CodebookMatrix(words, scales, 3).dequantise() - weight).norm() < 0.6 * (straight - weight).norm()
