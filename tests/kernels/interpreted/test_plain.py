"""Products of any shape, folds and gates against float64, and rows against themselves alone."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux only")

from dgpp_core.formats.codec import decode, encode
from dgpp_core.formats.dense import DenseMatrix
from dgpp_core.formats.matrix import Matrix
from dgpp_core.formats.nvfp4 import Nvfp4Matrix
from dgpp_core.formats.storage import STORAGES
from dgpp_core.ops.kernels.plain import PRODUCT_META, fold, gate, plain_product
from dgpp_core.ops.kernels.stored import stored_weight

BLOCK = 64


def product(x: torch.Tensor, matrix: Matrix | torch.Tensor) -> torch.Tensor:
    weight = stored_weight(DenseMatrix(matrix) if isinstance(matrix, torch.Tensor) else matrix, torch.device("cpu"))
    out = torch.full((len(x), weight.shape[0]), float("nan"))
    grid = (-(-len(x) // PRODUCT_META["ROWS"]), -(-weight.shape[0] // PRODUCT_META["COLUMNS"]))
    plain_product[grid](*weight.operands(), x, out, len(x), *weight.shape, **weight.meta(), **PRODUCT_META)
    return out


@pytest.mark.parametrize("shape", [(7, 5), (33, 70), (40, 128)])
def test_plain_product(shape: tuple[int, int]) -> None:
    weight, x = torch.randn(shape), torch.randn(19, shape[1])
    whole = product(x, weight)
    assert torch.allclose(whole.double(), x.double() @ weight.double().T, rtol=1e-5, atol=1e-5)
    for count in (1, 2, 16, 17):
        assert torch.equal(product(x[:count], weight), whole[:count]), count


@pytest.mark.parametrize("storage", STORAGES)
def test_every_stored_form_gives_the_bits_of_its_values(storage: str) -> None:
    """Codes that mean all that they can, a stack whose scale blocks its parts divide, and a part of its columns."""
    generator = torch.Generator().manual_seed(3)
    parts = []
    for rows in (48, 16):
        weight = torch.randn(rows, 256, generator=generator) * torch.logspace(-3, 2, 256)
        parts.append(decode(storage, encode(storage, weight), (rows, 256)))
    whole: Matrix = type(parts[0]).stack(parts)  # type: ignore[attr-defined]
    x = torch.randn(3, 256, generator=generator)
    for matrix, rows in ((whole, x), (whole.columns(128, 128), x[:, :128].contiguous())):
        found, values = product(rows, matrix), matrix.dequantise()
        if isinstance(matrix, Nvfp4Matrix):  # the scale of a whole matrix goes to the finished product
            assert torch.allclose(found, product(rows, values), rtol=1e-5, atol=1e-6 * found.abs().max().item())
        else:
            assert torch.equal(found, product(rows, values))


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
