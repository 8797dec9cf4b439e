"""Norm, activation and rotary embedding against their equations in float64."""

import math

import torch

from dgpp_core.ops.activation import sigmoid, swiglu
from dgpp_core.ops.norm import rms_norm
from dgpp_core.ops.rope import RotaryTable, rotate


def test_rms_norm() -> None:
    x, weight = torch.randn(5, 32), torch.randn(32)
    want = x.double() / (x.double().pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.allclose(rms_norm(x, weight, 1e-5).double(), want, rtol=1e-5, atol=1e-6)


def test_swiglu_and_sigmoid() -> None:
    x = torch.randn(5, 64) * 20
    gate, up = x.double().chunk(2, -1)
    assert torch.allclose(swiglu(x).double(), torch.nn.functional.silu(gate) * up, rtol=1e-5, atol=1e-6)
    assert torch.allclose(sigmoid(x), torch.sigmoid(x))
    assert swiglu(torch.full((1, 2), -1e4)).isfinite().all()


def test_rotation_turns_each_pair_by_position_times_frequency() -> None:
    table = RotaryTable(8, 100, 10_000.0, torch.device("cpu"))
    x, positions = torch.randn(4, 3, 8), torch.tensor([0, 1, 7, 99])
    out = rotate(x, *table.at(positions))
    for row, position in enumerate(positions.tolist()):
        for pair in range(4):
            angle = position * 10_000.0 ** (-2 * pair / 8)
            turned = torch.complex(x[row, :, pair], x[row, :, pair + 4]) * complex(math.cos(angle), math.sin(angle))
            assert torch.allclose(out[row, :, pair], turned.real, atol=1e-5)
            assert torch.allclose(out[row, :, pair + 4], turned.imag, atol=1e-5)


def test_draft_rows_may_stand_past_the_ceiling() -> None:
    table = RotaryTable(8, 10, 10_000.0, torch.device("cpu"))
    assert table.at(torch.tensor([10 + 12]))[0].shape == (1, 1, 4)


def test_a_narrow_dtype_stays_narrow() -> None:
    table = RotaryTable(8, 10, 10_000.0, torch.device("cpu"))
    x = torch.randn(2, 3, 8).bfloat16()
    assert rotate(x, *table.at(torch.tensor([1, 4]))).dtype == torch.bfloat16
    assert rms_norm(x, torch.ones(8).bfloat16(), 1e-5).dtype == torch.bfloat16
    assert swiglu(x).dtype == torch.bfloat16
