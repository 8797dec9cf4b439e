"""Router and experts on a GPU: values against float64, and every row's bits against the row alone."""

from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dgpp_core.formats.codec import convert
from dgpp_core.formats.dense import DenseMatrix
from dgpp_core.formats.matrix import Matrix
from dgpp_core.formats.nvfp4 import Nvfp4Matrix
from dgpp_core.ops.router import Router, Routing

pytest.importorskip("triton", reason="Triton is there on Linux only")

from dgpp_core.ops.kernels import experts_prefill
from dgpp_core.ops.kernels.experts import CudaExperts
from dgpp_core.ops.kernels.experts_combine import combine, combine_norm
from dgpp_core.ops.kernels.experts_order import order_picks
from dgpp_core.ops.kernels.router import CudaRouter

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is available here"),
]
DEVICE = torch.device("cuda")
EXPERTS, TOP_K = 12, 4
SHAPES = {"small": (512, 128), "odd": (1024, 384), "glm": (5120, 1536)}
DECODE_ROWS = tuple(range(1, 65))


@pytest.fixture(autouse=True)
def poisoned() -> Iterator[None]:
    """Fresh tensors hold NaN: this mode fills them, so what a kernel does not write is seen."""
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


STORED = ("bf16", "nvfp4", "fp8_block", "fp8_e8m0_32", "mxfp4", "int4_g64", "int8_g64")
"""Forms of experts, each a storage but for the first."""


def generator(seed: int) -> torch.Generator:
    return torch.Generator(DEVICE).manual_seed(seed)


def nvfp4(rows: int, columns: int, segments: int, seed: int) -> Nvfp4Matrix:
    """Random codes, among the scales zeros and subnormals, a global scale for each of ``segments``."""
    made = generator(seed)
    codes = torch.randint(0, 256, (rows, columns // 2), device=DEVICE, dtype=torch.uint8, generator=made)
    scales = torch.rand(rows, columns // 16, device=DEVICE, generator=made) * 2
    scales[::7, ::5], scales[::11, ::3] = 0.0, 2.0**-9
    factors = (torch.rand(segments, device=DEVICE, generator=made) + 0.5) * 0.6 / columns**0.5
    return Nvfp4Matrix(codes, scales.to(torch.float8_e4m3fn), factors)


def weights(shape: tuple[int, int], experts: int, form: str = "nvfp4") -> tuple[Matrix, Matrix]:
    hidden, inner = shape
    entries = experts + 1
    up, down = nvfp4(entries * 2 * inner, hidden, entries * 2, 1), nvfp4(entries * hidden, inner, entries, 2)
    if form == "bf16":
        return DenseMatrix(up.dequantise().bfloat16()), DenseMatrix(down.dequantise().bfloat16())
    return (up, down) if form == "nvfp4" else (convert(up, form), convert(down, form))


def activations(rows: int, width: int) -> Tensor:
    return torch.randn(rows, width, device=DEVICE, generator=generator(9)).bfloat16()


def routing_of(rows: int, experts: int = EXPERTS, top_k: int = TOP_K, kind: str = "random") -> Routing:
    if kind == "crowded":
        ids = torch.arange(top_k, device=DEVICE).expand(rows, top_k)
    elif kind == "spread":
        ids = (torch.arange(rows * top_k, device=DEVICE) % experts).view(rows, top_k).sort(-1).values
    else:
        ids = torch.rand(rows, experts, device=DEVICE, generator=generator(4)).topk(top_k).indices.sort(-1).values
    return Routing(ids.int().contiguous(), torch.rand(rows, top_k, device=DEVICE, generator=generator(6)))


def expected(
    up: Matrix, down: Matrix, x: Tensor, ids: Tensor, experts: int, h_dtype: torch.dtype, limit: float = math.inf,
    w_dtype: torch.dtype = torch.float64,
) -> Tensor:  # fmt: skip
    """float64 contributions; h and the weights are rounded as the kernels round them."""
    rows, top_k = ids.shape
    each, hidden = up.shape[0] // (experts + 1), x.shape[1]
    out = torch.empty(rows * top_k + rows, hidden, dtype=torch.float64, device=DEVICE)
    entries = torch.cat([ids.flatten(), ids.new_full((rows,), experts)])
    sources = torch.cat([torch.arange(rows * top_k, device=DEVICE) // top_k, torch.arange(rows, device=DEVICE)])
    for entry in torch.unique(entries).tolist():
        places = (entries == entry).nonzero().squeeze(1)
        gate, value = (
            x[sources[places]].double() @ up.rows(entry * each, each).dequantise().to(w_dtype).double().T
        ).chunk(2, -1)
        h = (F.silu(gate.clamp(max=limit)) * value.clamp(-limit, limit)).to(h_dtype).double()
        out[places] = h @ down.rows(entry * hidden, hidden).dequantise().to(w_dtype).double().T
    return out


def error(found: Tensor, wanted: Tensor) -> float:
    assert not found.isnan().any()
    return float((found.double() - wanted).norm() / wanted.norm())


def of_row(contributions: Tensor, rows: int, row: int, top_k: int = TOP_K) -> Tensor:
    """A row's contributions, the shared expert's last."""
    shared = rows * top_k + row
    return torch.cat([contributions[row * top_k : (row + 1) * top_k], contributions[shared : shared + 1]])


def first_rows(routing: Routing, rows: int) -> Routing:
    return Routing(routing.ids[:rows].contiguous(), routing.weights[:rows].contiguous())


@pytest.mark.parametrize("kind", ["random", "crowded", "spread"])
@pytest.mark.parametrize("shape", ["small", "odd"])
def test_decode_experts_and_each_row_alone(shape: str, kind: str) -> None:
    up, down = weights(SHAPES[shape], EXPERTS)
    experts = CudaExperts(up, down, experts=EXPERTS)
    assert experts.packed
    x, routing = activations(64, up.shape[1]), routing_of(64, kind=kind)
    whole = experts(x, routing)
    wanted = expected(up, down, x, routing.ids, EXPERTS, torch.bfloat16)
    assert error(whole, wanted) < 3e-3  # h on the edge of a bf16 rounding falls to either side
    alone = experts(x[:1], first_rows(routing, 1))
    for rows in DECODE_ROWS:
        found = experts(x[:rows], first_rows(routing, rows))
        assert not found.isnan().any()
        assert torch.equal(of_row(found, rows, 0), alone), rows
        last = rows - 1
        assert torch.equal(of_row(found, rows, last), of_row(whole, 64, last)), rows


def test_decode_experts_of_more_rows_than_a_launch() -> None:
    up, down = weights(SHAPES["small"], EXPERTS)
    experts = CudaExperts(up, down, experts=EXPERTS)
    x, routing = activations(150, 512), routing_of(150)
    whole = experts(x, routing)
    for row in (0, 63, 64, 130, 149):
        one = Routing(routing.ids[row : row + 1].contiguous(), routing.weights[row : row + 1])
        assert torch.equal(of_row(whole, 150, row), experts(x[row : row + 1], one))


@pytest.mark.parametrize("form", ["nvfp4", "bf16"])
def test_a_limit_binds_gate_and_up(form: str) -> None:
    up, down = weights(SHAPES["small"], EXPERTS, form)
    experts = CudaExperts(up, down, experts=EXPERTS, limit=0.5)
    assert experts.packed == (form == "nvfp4")
    x, routing = activations(40, 512), routing_of(40)
    wanted = expected(up, down, x, routing.ids, EXPERTS, torch.bfloat16, 0.5)
    unbound = expected(up, down, x, routing.ids, EXPERTS, torch.bfloat16)
    assert error(wanted, unbound) > 1e-2
    for decode in (True, False):
        assert error(experts(x, routing, decode), wanted) < 3e-3


@pytest.mark.parametrize("experts_count", [3, 40])
def test_decode_experts_without_a_shared_one(experts_count: int) -> None:
    up, down = weights(SHAPES["small"], experts_count - 1)
    experts = CudaExperts(up, down, experts=experts_count, shared=False)
    x, routing = activations(9, 512), routing_of(9, experts_count, 2)
    found = experts(x, routing)
    assert found.shape == (18, 512)
    wanted = expected(up, down, x, routing.ids, experts_count - 1, torch.bfloat16)[:18]
    assert error(found, wanted) < 3e-3
    assert error(experts(x, routing, decode=False), wanted) < 3e-3


def test_experts_of_glm_in_both_forms() -> None:
    up, down = weights(SHAPES["glm"], 6)
    experts = CudaExperts(up, down, experts=6)
    x, routing = activations(48, 5120), routing_of(48, 6, 3)
    wanted = expected(up, down, x, routing.ids, 6, torch.bfloat16)
    assert error(experts(x, routing), wanted) < 3e-3
    assert error(experts(x, routing, decode=False), wanted) < 3e-3


@pytest.mark.parametrize("kind", ["random", "crowded", "spread"])
@pytest.mark.parametrize("shape", ["small", "odd"])
def test_prefill_experts_and_each_row_alone(shape: str, kind: str) -> None:
    up, down = weights(SHAPES[shape], EXPERTS)
    experts = CudaExperts(up, down, experts=EXPERTS)
    x, routing = activations(2048, up.shape[1]), routing_of(2048, kind=kind)
    whole = experts(x, routing, decode=False)
    rows = 300
    wanted = expected(up, down, x[:rows], routing.ids[:rows], EXPERTS, torch.bfloat16)
    found = torch.cat([whole[: rows * TOP_K], whole[2048 * TOP_K : 2048 * TOP_K + rows]])
    assert error(found, wanted) < 3e-3
    for count in (1, 7, 100, 333):
        part = experts(x[:count], first_rows(routing, count), decode=False)
        for row in {0, count // 2, count - 1}:
            assert torch.equal(of_row(part, count, row), of_row(whole, 2048, row)), (count, row)
    for row in (0, 1, 517, 2047):
        one = Routing(routing.ids[row : row + 1].contiguous(), routing.weights[row : row + 1])
        assert torch.equal(of_row(whole, 2048, row), experts(x[row : row + 1], one, decode=False)), row
    again = experts(x, routing, decode=False)
    assert torch.equal(again, whole)


@pytest.mark.parametrize("wgmma", [True, False])
def test_grouped_products_have_the_same_bits_for_every_tile(wgmma: bool) -> None:
    if wgmma and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("this GPU has no wgmma")
    up, down = weights(SHAPES["odd"], EXPERTS)
    experts = CudaExperts(up, down, experts=EXPERTS)
    x, routing = activations(700, 1024), routing_of(700)
    source, picks = experts_prefill.in_fragment_order(x), routing.ids.numel()
    made = []
    for tile in experts_prefill.TILES if wgmma else experts_prefill.TILES[:2]:
        tables = order_picks(routing.ids, EXPERTS, True, tile)
        h = torch.empty(picks + 700, 384, dtype=torch.bfloat16, device=DEVICE)
        y = torch.empty(picks + 700, 1024, device=DEVICE)
        gate_up, output = experts._weights("gate_up"), experts._weights("down")
        experts_prefill.run(gate_up, (768, 1024), source, h, tables, picks, TOP_K, True, tile, wgmma)
        experts_prefill.run(output, (1024, 384), h, y, tables, picks, TOP_K, False, tile, wgmma)
        assert not y.isnan().any()
        made.append(y)
    assert all(torch.equal(y, made[0]) for y in made)


@pytest.mark.parametrize("decode", [True, False])
@pytest.mark.parametrize("form", STORED)
def test_generic_experts_and_each_row_alone(form: str, decode: bool) -> None:
    up, down = weights((128, 64), EXPERTS, form)
    experts = CudaExperts(up, down, experts=EXPERTS)
    assert not experts.packed
    x, routing = activations(200, 128), routing_of(200)
    whole = experts(x, routing, decode)
    # The values of NVFP4's codes and scales are exact in bfloat16; its global scales are applied to finished products.
    rounded = torch.float64 if form == "nvfp4" else torch.bfloat16
    wanted = expected(up, down, x, routing.ids, EXPERTS, torch.bfloat16, w_dtype=rounded)
    assert error(whole, wanted) < 3e-3
    for count in (1, 5, 33):
        part = experts(x[:count], first_rows(routing, count), decode)
        for row in {0, count - 1}:
            assert torch.equal(of_row(part, count, row), of_row(whole, 200, row)), (count, row)


@pytest.mark.parametrize("form", STORED)
def test_prepared_tensors_make_the_same_experts(form: str) -> None:
    up, down = weights((512, 128), EXPERTS, form)
    experts = CudaExperts(up, down, experts=EXPERTS)
    if form not in ("bf16", "nvfp4"):
        stored = sum(tensor.nbytes for matrix in (up, down) for tensor in matrix.tensors().values())
        assert sum(tensor.nbytes for tensor in experts.prepared().values()) == stored, "nothing is widened"
    again = CudaExperts.from_prepared(experts.prepared(), experts=EXPERTS)
    x, routing = activations(5, 512), routing_of(5)
    for decode in (True, False):
        assert torch.equal(experts(x, routing, decode), again(x, routing, decode))


def routers(dtype: torch.dtype, experts: int, width: int) -> tuple[CudaRouter, Tensor, Tensor]:
    weight = (torch.randn(experts, width, device=DEVICE, generator=generator(3)) / width**0.5).to(dtype)
    bias = torch.rand(experts, device=DEVICE, generator=generator(8)) * 0.2
    return CudaRouter(weight, bias, 8, scale=2.5), weight, bias


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(("experts", "width"), [(160, 5120), (24, 128), (40, 4096)])
def test_router_and_each_row_alone(experts: int, width: int, dtype: torch.dtype) -> None:
    router, weight, bias = routers(dtype, experts, width)
    x = activations(300, width)
    logits = router.logits(x).sum(0)
    wanted = x.double() @ weight.double().T
    assert error(logits, wanted) < 2e-6
    scores = torch.sigmoid(wanted)
    found = router(x, decode=False)
    assert bool((found.ids.diff(dim=-1) > 0).all())
    chosen = (scores + bias).gather(-1, found.ids.long())
    best = (scores + bias).topk(8).values.sort(-1).values
    assert (chosen.sort(-1).values - best).abs().max() < 1e-6
    exact = scores.gather(-1, found.ids.long())
    assert torch.allclose(found.weights.double(), exact / exact.sum(-1, keepdim=True) * 2.5, rtol=1e-5)
    for rows in (*DECODE_ROWS, 299):
        part = router(x[:rows])
        assert torch.equal(part.ids, found.ids[:rows]), rows
        assert torch.equal(part.weights, found.weights[:rows]), rows


@pytest.mark.parametrize(("groups", "kept"), [(1, 1), (8, 3)])
def test_choice_is_that_of_the_reference_where_scores_tie(groups: int, kept: int) -> None:
    logits = torch.randint(-3, 3, (128, 160), device=DEVICE, generator=generator(2)).float()
    bias = torch.randint(0, 4, (160,), device=DEVICE, generator=generator(1)).float()
    weight = torch.empty(160, 64, dtype=torch.bfloat16, device=DEVICE)
    router = CudaRouter(weight, bias, 8, groups=groups, top_groups=kept)
    ids = torch.empty(128, 8, dtype=torch.int32, device=DEVICE)
    weights = torch.empty(128, 8, device=DEVICE)
    router.choose(logits.unsqueeze(0), ids, weights)
    reference = Router(torch.eye(160), bias.cpu(), 8, groups=groups, top_groups=kept)(logits.cpu())
    assert torch.equal(ids.cpu(), reference.ids)
    assert torch.allclose(weights.cpu(), reference.weights, rtol=1e-6)


@pytest.mark.parametrize("shared", [True, False])
def test_sum_and_norm_of_contributions(shared: bool) -> None:
    rows, top_k, width, eps = 33, 8, 5120, 1e-5
    routing = routing_of(rows, 160, top_k)
    y = torch.randn(rows * top_k + rows * shared, width, device=DEVICE, generator=generator(5))
    total = (routing.weights.double().unsqueeze(-1) * y[: rows * top_k].double().view(rows, top_k, width)).sum(1)
    total = total + y[rows * top_k :].double() if shared else total
    found = combine(y, routing)
    assert error(found, total) < 1e-6
    residual = torch.randn(rows, width, device=DEVICE, generator=generator(7))
    weight = torch.rand(width, device=DEVICE, generator=generator(8)).bfloat16()
    stream = residual.clone()
    x = combine_norm(stream, y, routing, weight, eps, torch.bfloat16)
    assert torch.equal(stream, residual + found) or error(stream, residual.double() + total) < 1e-6
    wide = residual.double() + total
    normed = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight.double()
    assert error(x, normed) < 3e-3
    for row in (0, 32):
        one = Routing(routing.ids[row : row + 1], routing.weights[row : row + 1].contiguous())
        part = torch.cat([y[row * top_k : (row + 1) * top_k], y[rows * top_k :][row : row + 1]])
        assert torch.equal(combine(part, one)[0], found[row])
        alone = residual[row : row + 1].clone()
        assert torch.equal(combine_norm(alone, part, one, weight, eps, torch.bfloat16)[0], x[row])


def test_a_captured_graph_gives_the_bits_of_plain_launches() -> None:
    up, down = weights(SHAPES["small"], EXPERTS)
    experts = CudaExperts(up, down, experts=EXPERTS)
    router = CudaRouter(activations(EXPERTS, 512), torch.zeros(EXPERTS, device=DEVICE), TOP_K)
    weight = torch.ones(512, device=DEVICE, dtype=torch.bfloat16)
    x, residual = activations(6, 512), torch.zeros(6, 512, device=DEVICE)

    def layer() -> Tensor:
        routing = router(x)
        return combine_norm(residual, experts(x, routing), routing, weight, 1e-5, torch.bfloat16)

    expected_x = layer().clone()
    torch.use_deterministic_algorithms(False)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layer()
    for _ in range(3):
        residual.zero_()
        graph.replay()
        assert torch.equal(captured, expected_x)
