"""NVFP4: its two lineages, and global scales through cuts and stacks."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from torch import Tensor

from dgpp_core.api.errors import CheckpointError
from dgpp_core.formats import nvfp4
from dgpp_core.formats.scalars import E2M1_LEVELS, decode_e4m3


def _matrix(rows: int, columns: int = 64, seed: int = 0) -> nvfp4.Nvfp4Matrix:
    source = torch.Generator().manual_seed(seed)
    weight = torch.randn(rows, columns, generator=source) * math.exp(seed)
    return nvfp4.from_multiplier(*nvfp4.encode(weight))


def _divided(divisor: float) -> nvfp4.Nvfp4Matrix:
    codes, scales, _ = nvfp4.encode(torch.randn(8, 64, generator=torch.Generator().manual_seed(1)))
    return nvfp4.from_divisor(codes, scales, torch.tensor([divisor]))


def _rounded(value: Fraction) -> float:
    """The float32 nearest to a fraction."""
    return float(torch.tensor(float(value), dtype=torch.float64).to(torch.float32))


def _products(matrix: nvfp4.Nvfp4Matrix) -> list[Fraction]:
    """Code times block scale of every weight, exactly."""
    scales = decode_e4m3(matrix.scales).tolist()
    codes = [[(byte & 15, byte >> 4) for byte in row] for row in matrix.codes.tolist()]
    return [
        Fraction(E2M1_LEVELS[code]) * Fraction(scales[n][(2 * b + i) // 16])
        for n, row in enumerate(codes)
        for b, pair in enumerate(row)
        for i, code in enumerate(pair)
    ]


def test_the_multiplying_lineage_rounds_once() -> None:
    matrix = _matrix(8)
    scale = Fraction(float(matrix.globals))
    assert matrix.dequantise().flatten().tolist() == [_rounded(p * scale) for p in _products(matrix)]


def test_the_dividing_lineage_rounds_once_and_not_through_a_reciprocal() -> None:
    matrix = _divided(41.0)
    assert matrix.divisors is not None
    expected = [_rounded(p / 41) for p in _products(matrix)]
    assert matrix.dequantise().flatten().tolist() == expected
    by_reciprocal = nvfp4.Nvfp4Matrix(matrix.codes, matrix.scales, matrix.globals).dequantise()
    assert by_reciprocal.flatten().tolist() != expected
    torch.testing.assert_close(by_reciprocal, matrix.dequantise(), rtol=2.0**-22, atol=0)


def test_a_divisor_with_an_exact_reciprocal_becomes_a_multiplier() -> None:
    matrix = _divided(4096.0)
    assert matrix.divisors is None
    assert matrix.globals.tolist() == [2.0**-12]
    assert matrix.dequantise().flatten().tolist() == [_rounded(p / 4096) for p in _products(matrix)]


@pytest.mark.parametrize("value", [0.0, math.inf, math.nan])
def test_a_global_scale_that_cannot_divide_is_refused(value: float) -> None:
    with pytest.raises(CheckpointError, match="global scale"):
        _divided(value)


def test_gate_and_up_keep_a_scale_each() -> None:
    gate, up = _matrix(32, seed=1), _matrix(32, seed=2)
    fused = nvfp4.Nvfp4Matrix.stack([gate, up])
    assert fused.globals.tolist() == [float(gate.globals), float(up.globals)]
    assert fused.segment == 32
    assert fused.rows(0, 32).globals.tolist() == gate.globals.tolist()
    assert fused.rows(40, 8).globals.tolist() == up.globals.tolist()
    assert fused.rows(16, 32).globals.tolist() == fused.globals.tolist()


def test_parts_of_unequal_height_share_segments_of_their_common_height() -> None:
    parts = [_matrix(96, seed=1), _matrix(32, seed=2), _matrix(32, seed=3)]
    stack = nvfp4.Nvfp4Matrix.stack(parts)
    assert stack.segment == 32
    assert stack.globals.tolist() == [float(parts[0].globals)] * 3 + [float(part.globals) for part in parts[1:]]


def test_two_lineages_cannot_be_one_matrix() -> None:
    with pytest.raises(CheckpointError, match="two lineages"):
        nvfp4.Nvfp4Matrix.stack([_matrix(8), _divided(3.0)])


def test_a_power_of_two_among_the_divisors_changes_nothing() -> None:
    parts = [_divided(divisor) for divisor in (537.6, 512.0, 896.0)]
    assert [part.divisors is None for part in parts] == [False, True, False]
    for order in ((0, 1, 2), (1, 0, 2), (1, 1, 0)):
        chosen = [parts[at] for at in order]
        stacked = nvfp4.Nvfp4Matrix.stack(chosen)
        assert torch.equal(stacked.dequantise(), torch.cat([part.dequantise() for part in chosen]))


def test_every_code_is_the_nearest_under_its_scale() -> None:
    weight = torch.randn(16, 64, generator=torch.Generator().manual_seed(4))
    matrix = nvfp4.from_multiplier(*nvfp4.encode(weight))
    step = (decode_e4m3(matrix.scales) * matrix.globals).repeat_interleave(16, 1).unsqueeze(-1).double()
    error = (matrix.dequantise().double() - weight.double()).abs()
    best = (torch.tensor(E2M1_LEVELS) * step - weight.double().unsqueeze(-1)).abs().amin(-1)
    torch.testing.assert_close(error, best, rtol=1e-5, atol=1e-6)


def test_a_block_whose_scale_vanishes_is_zero() -> None:
    weight = torch.full((1, 32), 1e-9)
    weight[0, 0] = 1.0
    values = nvfp4.from_multiplier(*nvfp4.encode(weight)).dequantise()
    assert values[0, 0] == 1.0
    assert not values[0, 16:].any()


def test_the_largest_weight_is_reached() -> None:
    weight: Tensor = torch.randn(16, 64, generator=torch.Generator().manual_seed(4))
    matrix = nvfp4.from_multiplier(*nvfp4.encode(weight))
    assert float(matrix.scales.to(torch.float32).max()) == 448.0
    assert math.isclose(float(matrix.dequantise().abs().max()), float(weight.abs().max()), rel_tol=1e-6)
