"""FP8 scales per block: the encoders against loops, and blocks that a cut or a stack makes smaller."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from dgpp_core.api.errors import CheckpointError
from dgpp_core.formats import fp8
from dgpp_core.formats.fp8 import Fp8BlockMatrix, Fp8ChannelMatrix


def _weight(rows: int, columns: int, seed: int = 0) -> Tensor:
    source = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=source) * torch.exp2(torch.randn(rows, 1, generator=source))


def _matrix(rows: int, columns: int, block: int = 128, seed: int = 0) -> Fp8BlockMatrix:
    return Fp8BlockMatrix(*fp8.encode_block(_weight(rows, columns, seed), (block, block)), (block, block))


@pytest.mark.parametrize("power_of_two", [False, True])
def test_block_scales_are_those_of_a_loop(power_of_two: bool) -> None:
    weight = _weight(70, 100)
    weight[32:64, :32] = 0
    _, scales = fp8.encode_block(weight, (32, 32), power_of_two)
    assert scales.shape == (3, 4)
    values = weight.numpy()
    for i in range(3):
        for j in range(4):
            amax = np.abs(values[32 * i : 32 * i + 32, 32 * j : 32 * j + 32]).max()
            if power_of_two:
                expected = 2.0 ** math.ceil(math.log2(max(amax, 1e-4) / 448))
            else:
                expected = amax / np.float32(448) if amax else 1.0
            assert float(scales[i, j]) == expected, (i, j)


def test_codes_are_the_quotient_to_nearest() -> None:
    weight = _weight(70, 100)
    matrix = Fp8BlockMatrix(*fp8.encode_block(weight, (32, 32)), (32, 32))
    step = 2.0 ** (torch.floor(torch.log2(matrix.codes.to(torch.float32).abs().clamp_min(2.0**-6))) - 3)
    error = (matrix.dequantise() - weight).abs() / matrix.scales.repeat_interleave(32, 0)[:70].repeat_interleave(32, 1)[
        :, :100
    ]
    assert bool((error <= step / 2 * (1 + 1e-5)).all())
    assert float(matrix.codes.to(torch.float32).abs().max()) == 448.0


def test_channel_scales_are_those_of_a_loop() -> None:
    weight = _weight(9, 40)
    weight[4] = 0
    matrix = Fp8ChannelMatrix(*fp8.encode_channel(weight))
    expected = [row.abs().max() / torch.tensor(448.0) if row.any() else torch.tensor(1.0) for row in weight]
    assert matrix.scales.tolist() == torch.stack(expected).tolist()
    assert float((matrix.dequantise() - weight).norm() / weight.norm()) < 0.04


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_whose_slices_split_blocks_get_equal_blocks_and_the_parents_scales(world: int) -> None:
    matrix = _matrix(576, 256)
    whole, count = matrix.dequantise(), 576 // world
    parts = [matrix.rows(rank * count, count) for rank in range(world)]
    assert {part.block for part in parts} == {(math.gcd(128, count), 128)}
    assert torch.equal(torch.cat([part.dequantise() for part in parts]), whole)
    assert {part.scales.shape for part in parts} == {torch.Size([count // math.gcd(128, count), 2])}


def test_whole_blocks_stay_whole() -> None:
    part = _matrix(512, 512).rows(128, 256).columns(256, 128)
    assert part.block == (128, 128)
    assert part.scales.shape == (2, 1)


def test_a_cut_that_leaves_no_blocks_is_refused() -> None:
    with pytest.raises(CheckpointError, match="too small"):
        _matrix(256, 256).columns(100, 4)


def test_a_stack_after_a_ragged_block_gets_smaller_blocks() -> None:
    parts = [_matrix(192, 256, seed=1), _matrix(256, 256, seed=2), _matrix(100, 256, seed=3)]
    stack = Fp8BlockMatrix.stack(parts)
    assert stack.block == (64, 128)
    assert stack.scales.shape == (9, 2)
    assert torch.equal(stack.dequantise(), torch.cat([part.dequantise() for part in parts]))


def test_a_stack_of_whole_blocks_keeps_them() -> None:
    stack = Fp8BlockMatrix.stack([_matrix(256, 128, seed=1), _matrix(130, 128, seed=2)])
    assert stack.block == (128, 128)
    assert stack.scales.shape == (4, 1)


def test_matrices_of_two_widths_cannot_be_stacked() -> None:
    with pytest.raises(CheckpointError, match="different widths"):
        Fp8BlockMatrix.stack([_matrix(128, 128), _matrix(128, 256)])
