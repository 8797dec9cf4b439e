"""Products of every weight form against float64, and each row's bits against the row alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from dgpp_core.formats.codec import decode, encode
from dgpp_core.formats.dense import DenseMatrix
from dgpp_core.formats.matrix import Matrix
from dgpp_core.formats.nvfp4 import Nvfp4Matrix
from dgpp_core.formats.storage import STORAGES

pytest.importorskip("triton", reason="Triton is there on Linux only")

from dgpp_core.ops.kernels.dense import CudaGateUp, CudaLinear

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is available here"),
]
FORMS = ("bf16", "bf12", "fp8", "nvfp4", "plain")
SHAPES = [(5120, 12288), (14336, 5120), (5120, 10240), (256, 128), (1024, 384)]
LIMITS = {"bf16": 2e-5, "bf12": 2e-5, "fp8": 2e-5, "nvfp4": 2e-5, "plain": 4e-6}
DEVICE = torch.device("cuda")


def matrix_of(form: str, rows: int, columns: int, seed: int = 0) -> Matrix:
    """A random matrix that is kept as ``form``; BF16 ones have weights outside bf12's window."""
    generator = torch.Generator(DEVICE).manual_seed(seed)
    weight = torch.randn(rows, columns, device=DEVICE, generator=generator) * 0.02
    if form in ("bf16", "bf12"):
        weight = torch.where(weight.abs() < 2e-5, 2e-5, weight)
        weight[::40, 1::1237] = 0.0
        weight[3, :4] = 1e-9
        return DenseMatrix(weight.bfloat16())
    if form == "plain":
        return DenseMatrix(weight)
    if form == "fp8":
        return stored("fp8_block", weight)
    halves = [stored("nvfp4", part * scale) for part, scale in zip(weight.chunk(2), (1.0, 30.0), strict=True)]
    return Nvfp4Matrix.stack([half for half in halves if isinstance(half, Nvfp4Matrix)])


def stored(storage: str, weight: Tensor) -> Matrix:
    return decode(storage, encode(storage, weight), (weight.shape[0], weight.shape[1]))


def activations(rows: int, columns: int) -> Tensor:
    return torch.randn(rows, columns, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(9)).bfloat16()


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fresh tensors hold NaN: this mode fills them, so what a kernel does not write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def error(found: Tensor, expected: Tensor) -> float:
    assert not found.isnan().any()
    return float((found.double() - expected).norm() / expected.norm())


def linear(matrix: Matrix, form: str) -> CudaLinear:
    made = CudaLinear(matrix, DEVICE, bf16_form="bf12" if form == "bf12" else "bf16")
    assert made.form == form
    return made


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_decode_products(form: str, shape: tuple[int, int]) -> None:
    matrix = matrix_of(form, *shape)
    product, x = linear(matrix, form), activations(64, shape[1])
    expected = x.double() @ matrix.dequantise().double().T
    whole = product.wide(x)
    assert error(whole, expected) < LIMITS[form]
    parts = product.partials(x)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    assert torch.equal(total, whole)
    assert torch.equal(product(x), whole.bfloat16())
    counts = range(1, 65) if shape == (256, 128) else (1, 2, 3, 5, 7, 8, 9, 11, 15, 16, 17, 31, 33, 64)
    for count in counts:
        assert torch.equal(product.wide(x[:count]), whole[:count]), count
    for row in (0, 7, 8, 23, 63):
        assert torch.equal(product.wide(x[row : row + 1])[0], whole[row]), row


@pytest.mark.parametrize("form", ["bf16", "bf12"])
def test_the_output_head(form: str) -> None:
    """Addresses past 2^31 bytes."""
    matrix = matrix_of(form, 151552, 5120)
    product, x = linear(matrix, form), activations(17, 5120)
    whole = product.wide(x)
    last = whole[:, -4096:]
    assert error(last, x.double() @ matrix.rows(151552 - 4096, 4096).dequantise().double().T) < LIMITS[form]
    assert not whole.isnan().any()
    for count in (1, 8, 9):
        assert torch.equal(product.wide(x[:count]), whole[:count]), count


@pytest.mark.parametrize("shape", [(24576, 5120), (256, 128), (192, 384)])
@pytest.mark.parametrize("form", FORMS)
def test_gated_products(form: str, shape: tuple[int, int]) -> None:
    matrix, x = matrix_of(form, *shape), activations(33, shape[1])
    product = CudaGateUp(matrix, DEVICE, bf16_form="bf12" if form == "bf12" else "bf16")
    wide = x.double() @ matrix.dequantise().double().T
    expected = torch.nn.functional.silu(wide[:, : shape[0] // 2]) * wide[:, shape[0] // 2 :]
    whole = product(x)
    assert whole.dtype == torch.bfloat16
    assert error(whole, expected) < 3e-3
    for count in (1, 2, 8, 9, 16, 17):
        assert torch.equal(product(x[:count]), whole[:count]), count
    many = product(x.repeat(9, 1), decode=False)
    assert error(many[:33], expected) < 3e-3
    for count in (1, 33, 100):
        assert torch.equal(product(x.repeat(4, 1)[:count], decode=False), many[:count]), count


@pytest.mark.parametrize("shape", [(14336, 5120), (5120, 12288), (256, 128)])
def test_bf12_has_the_bits_of_bf16(shape: tuple[int, int]) -> None:
    matrix, x = matrix_of("bf16", *shape), activations(17, shape[1])
    whole, twelve = linear(matrix, "bf16"), linear(matrix, "bf12")
    for decode_rows in (True, False):
        assert torch.equal(whole.wide(x, decode_rows), twelve.wide(x, decode_rows))
    assert torch.equal(whole.partials(x[:3]), twelve.partials(x[:3]))
    gated = [CudaGateUp(matrix, DEVICE, bf16_form=form)(x) for form in ("bf16", "bf12")]
    assert torch.equal(*gated)


@pytest.mark.parametrize("form", FORMS)
def test_a_stored_image_gives_the_same_product(form: str) -> None:
    product, x = linear(matrix_of(form, 1024, 384), form), activations(5, 384)
    again = CudaLinear.from_prepared({name: tensor.clone() for name, tensor in product.prepared().items()})
    assert torch.equal(again.wide(x), product.wide(x))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("form", FORMS)
def test_prefill_products(form: str, shape: tuple[int, int]) -> None:
    matrix, rows = matrix_of(form, *shape), 300 if form == "plain" else 2048
    product, x = linear(matrix, form), activations(rows, shape[1])
    whole = product.wide(x, decode=False)
    expected = x.double() @ matrix.dequantise().double().T
    assert error(whole, expected) < LIMITS[form]
    assert torch.equal(product(x, decode=False), whole.bfloat16())
    for start, count in ((0, 1), (0, 7), (0, 128), (5, 1), (100, 129), (130, 150)):
        found = product.wide(x[start : start + count], decode=False)
        assert torch.equal(found, whole[start : start + count]), (start, count)


@pytest.mark.parametrize("storage", [name for name in STORAGES if name != "dense"])
def test_what_no_fragments_fit_is_read_as_it_is_stored(storage: str) -> None:
    weight = torch.randn(1000, 384, device=DEVICE, generator=torch.Generator(DEVICE).manual_seed(0)) * 0.02
    matrix, x = stored(storage, weight), activations(70, 384)
    product = linear(matrix, "plain")
    if not storage.startswith("code"):
        held = sum(tensor.nbytes for tensor in matrix.tensors().values())
        assert sum(tensor.nbytes for tensor in product.prepared().values()) <= held
    whole = product.wide(x)
    assert error(whole, x.double() @ matrix.dequantise().double().T) < LIMITS["plain"]
    for count in (1, 2, 16, 17, 69):
        assert torch.equal(product.wide(x[:count]), whole[:count]), count
        assert torch.equal(product.wide(x[:count], decode=False), whole[:count]), count


@pytest.mark.parametrize("shape", [(576, 576), (49152, 576), (7, 5)])
def test_bf16_weights_of_odd_shapes(shape: tuple[int, int]) -> None:
    matrix, x = DenseMatrix(matrix_of("plain", *shape).dequantise().bfloat16()), activations(70, shape[1])
    product = linear(matrix, "plain")
    whole = product.wide(x)
    assert error(whole, x.double() @ matrix.dequantise().double().T) < LIMITS["plain"]
    for decode_rows in (True, False):
        assert all(torch.equal(product.wide(x[:count], decode_rows), whole[:count]) for count in (1, 3, 16, 17, 64))


def test_no_rows() -> None:
    product = linear(matrix_of("nvfp4", 256, 128), "nvfp4")
    assert product(activations(0, 128)).shape == (0, 256)
    assert product.partials(activations(0, 128), decode=False).shape[1:] == (0, 256)


def test_a_decode_product_is_captured_and_replayed() -> None:
    product, x = linear(matrix_of("bf16", 5120, 12288), "bf16"), activations(3, 12288)
    expected = product(x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = product(x)
    x.copy_(activations(3, 12288))
    found.zero_()
    graph.replay()
    assert torch.equal(found, expected)
