"""Products of any shape, folds and gates against float64, and rows against themselves alone."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux only")

from dgpp_core.ops.kernels.plain import PRODUCT_META, fold, gate, plain_product

BLOCK = 64


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    out = torch.full((len(x), len(weight)), float("nan"))
    grid = (-(-len(x) // PRODUCT_META["ROWS"]), -(-len(weight) // PRODUCT_META["COLUMNS"]))
    plain_product[grid](weight, x, out, len(x), *weight.shape, **PRODUCT_META)
    return out


@pytest.mark.parametrize("shape", [(7, 5), (33, 70), (40, 128)])
def test_plain_product(shape: tuple[int, int]) -> None:
    weight, x = torch.randn(shape), torch.randn(19, shape[1])
    whole = product(x, weight)
    assert torch.allclose(whole.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    for count in (1, 2, 16, 17):
        assert torch.equal(product(x[:count], weight), whole[:count]), count


def test_fold_adds_in_order_and_writes_nothing_else() -> None:
    parts = torch.tensor([1e8, 1.0, -1e8]).view(3, 1) * torch.ones(3, 100)
    out = torch.full((128,), float("nan"))
    fold[2,](parts, out, 100, SPLITS=3, BLOCK=BLOCK, PDL=False)
    assert torch.equal(out[:100], (parts[0] + parts[1]) + parts[2])
    assert out[100:].isnan().all()


def test_gate() -> None:
    wide = torch.randn(3, 2 * 70)
    out = torch.full((3, 70), float("nan"))
    gate[3, 2](wide, out, 70, BLOCK=BLOCK, PDL=False)
    assert torch.allclose(out, torch.nn.functional.silu(wide[:, :70]) * wide[:, 70:], rtol=1e-6, atol=1e-6)
