"""Router, tables of picks, generic experts and their sum in the interpreter (float32), against the CPU operations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from dgpp_core.formats.codec import decode, encode
from dgpp_core.formats.dense import DenseMatrix
from dgpp_core.ops.experts import Experts, combine
from dgpp_core.ops.kernels.experts_combine import combine_norm_rows, combine_rows
from dgpp_core.ops.kernels.experts_generic import plain_experts
from dgpp_core.ops.kernels.experts_grouped import fragment_order
from dgpp_core.ops.kernels.experts_order import count_picks, place_picks
from dgpp_core.ops.kernels.router_choice import choose_experts, plain_logits
from dgpp_core.ops.kernels.stored import StoredWeight, stored_weight
from dgpp_core.ops.router import Router, Routing

GENERATOR = torch.Generator().manual_seed(5)


def choice(partial: Tensor, bias: Tensor, top_k: int, **options: Any) -> Routing:
    parts, rows, experts = partial.shape
    ids = torch.full((rows, top_k), -7, dtype=torch.int32)
    weights = torch.full((rows, top_k), float("nan"))
    meta = {"GROUPS": 1, "KEPT": 1, "GP": 1, "NORMALISE": True, "SCORE": 0} | options
    choose_experts[(rows,)](
        partial, bias, weights, ids, rows, 2.5, E=experts, EP=32, PARTS=parts, TOPK=top_k, KP=8, PDL=0, **meta
    )
    return Routing(ids, weights)


def reference(logits: Tensor, bias: Tensor, top_k: int, **options: Any) -> Routing:
    """The CPU's router, its weight an identity so that its logits are these."""
    router = Router(torch.eye(logits.shape[1]), bias, top_k, scale=2.5, **options)
    return router(logits)


def same(found: Routing, expected: Routing) -> bool:
    return torch.equal(found.ids, expected.ids) and torch.allclose(found.weights, expected.weights, rtol=1e-6, atol=0)


@pytest.mark.parametrize("experts", [24, 32])
def test_choice_sums_the_parts_in_order(experts: int) -> None:
    partial = torch.randn(3, 5, experts, generator=GENERATOR)
    bias = torch.randn(experts, generator=GENERATOR)
    logits = partial[0] + partial[1] + partial[2]
    assert same(choice(partial, bias, 6), reference(logits, bias, 6))


def test_ties_go_to_the_lower_id() -> None:
    logits = torch.zeros(2, 24)
    logits[1, [3, 5, 11, 20, 23]] = 1.0
    bias = torch.zeros(24)
    bias[9] = 0.5
    found = choice(logits.unsqueeze(0), bias, 4)
    assert found.ids.tolist() == [[0, 1, 2, 9], [3, 5, 9, 11]]
    assert same(found, reference(logits, bias, 4))


@pytest.mark.parametrize(("groups", "kept"), [(4, 2), (8, 3), (24, 6)])
def test_choice_keeps_to_the_best_groups(groups: int, kept: int) -> None:
    logits = torch.randint(-4, 4, (6, 24), generator=GENERATOR).float()
    bias = torch.randint(-4, 4, (24,), generator=GENERATOR).float() / 8
    found = choice(logits.unsqueeze(0), bias, 6, GROUPS=groups, KEPT=kept, GP=32)
    assert same(found, reference(logits, bias, 6, groups=groups, top_groups=kept))


def test_softmax_scores_unnormalised() -> None:
    logits = torch.randn(4, 24, generator=GENERATOR)
    found = choice(logits.unsqueeze(0), torch.zeros(24), 3, SCORE=1, NORMALISE=False)
    assert same(found, reference(logits, torch.zeros(24), 3, score="softmax", normalise=False))


def test_roots_of_softplus_as_scores() -> None:
    logits = torch.linspace(-14, 30, 96).view(4, 24)[:, torch.randperm(24, generator=GENERATOR)].contiguous()
    found = choice(logits.unsqueeze(0), torch.zeros(24), 5, SCORE=2)
    assert same(found, reference(logits, torch.zeros(24), 5, score="sqrt_softplus"))


def test_a_poisoned_row_still_names_experts() -> None:
    logits = torch.full((1, 2, 24), float("nan"))
    logits[0, 1, 17] = 1.0
    ids = choice(logits, torch.zeros(24), 4).ids
    assert ids.tolist() == [[0, 1, 2, 3], [0, 1, 2, 17]]


def test_plain_logits() -> None:
    x, weight = torch.randn(3, 100, generator=GENERATOR), torch.randn(20, 100, generator=GENERATOR)
    out = torch.full((1, 3, 20), float("nan"))
    plain_logits[(3, 2)](weight, x, out, E=20, K=100, BE=16, BK=64, PDL=0)
    assert torch.allclose(out[0].double(), x.double() @ weight.double().T, atol=1e-5)


def tables(ids: Tensor, experts: int, shared: bool, tile: int) -> tuple[Tensor, Tensor]:
    rows, picks = ids.shape[0], ids.numel()
    most = picks // tile + min(experts, picks) + -(-rows // tile) * shared
    counts = torch.full((experts,), -7, dtype=torch.int32)
    order = torch.full((picks + rows * shared,), -7, dtype=torch.int32)
    made = torch.full((most, 3), -7, dtype=torch.int32)
    count_picks[(experts,)](ids, counts, picks, BLOCK=32)
    sizes = {"E": experts, "EP": 16, "SHARED": shared, "BN": tile, "BLOCK": 32}
    place_picks[(experts + shared,)](ids, counts, order, made, rows, picks, most, **sizes)
    return order, made


def random_ids(rows: int, experts: int, top_k: int) -> Tensor:
    scores = torch.rand(rows, experts, generator=GENERATOR)
    return scores.topk(top_k).indices.sort(-1).values.int()


@pytest.mark.parametrize("shared", [True, False])
@pytest.mark.parametrize("rows", [1, 7, 40])
def test_picks_are_listed_by_expert_and_row(rows: int, shared: bool) -> None:
    ids = random_ids(rows, 9, 3)
    ids[:, 2] = 8  # one crowded expert
    ids[:, :2] = random_ids(rows, 8, 2)
    order, made = tables(ids, 9, shared, 16)
    flat = ids.flatten().tolist()
    listed = sorted(range(len(flat)), key=lambda p: (flat[p], p)) + [len(flat) + m for m in range(rows * shared)]
    assert order.tolist() == listed
    entries = [*flat, *([9] * rows * shared)]
    served = []
    for entry, first, count in made.tolist():
        if entry < 0:
            continue
        picks = listed[first : first + count]
        assert 0 < count <= 16
        assert {entries[p] for p in picks} == {entry}
        served += picks
    assert served == listed


@pytest.mark.parametrize(("shared", "limit"), [(True, None), (False, None), (False, 0.4)])
def test_generic_experts(shared: bool, limit: float | None) -> None:
    experts, hidden, inner, rows, top_k = 5, 40, 24, 6, 2
    entries = experts + shared
    gate_up = torch.randn(entries * 2 * inner, hidden, generator=GENERATOR) / 6
    down = torch.randn(entries * hidden, inner, generator=GENERATOR) / 5
    factor = torch.rand(entries * 2 * inner, generator=GENERATOR) + 0.5
    x, ids = torch.randn(rows, hidden, generator=GENERATOR), random_ids(rows, experts, top_k)
    order, made = tables(ids, experts, shared, 16)
    total, picks = rows * top_k + rows * shared, rows * top_k
    h, y = torch.full((total, inner), float("nan")), torch.full((total, hidden), float("nan"))
    sizes = {"TOPK": top_k, "LIMIT": limit or 0.0, "BN": 16, "BO": 32, "BK": 32}
    up = StoredWeight("dense", (0, 0), gate_up, None, factor)
    last = StoredWeight("dense", (0, 0), down)
    for weight, source, out, shape in ((up, x, h, (2 * inner, hidden)), (last, h, y, (hidden, inner))):
        meta = weight.meta() | sizes | {"N": shape[0], "K": shape[1], "GATED": weight is up}
        plain_experts[(2, len(made))](*weight.operands(), source, out, order, made, picks, **meta)
    wide = DenseMatrix(gate_up * factor[:, None])
    layer = Experts(wide, DenseMatrix(down), experts=experts, shared=shared, limit=limit)
    expected = layer(x, Routing(ids, torch.ones(0)))
    assert torch.allclose(y, expected, atol=2e-5)


@pytest.mark.parametrize("storage", ["fp8_block", "fp8_e8m0_32", "mxfp4", "nvfp4", "int4_g64", "int8_g128"])
def test_generic_experts_of_stored_matrices(storage: str) -> None:
    """Of stacks as the loader makes them, some blocks of which belong to two halves of an expert."""
    experts, hidden, inner, rows, top_k = 3, 128, 128, 5, 2
    shapes = {"gate_up": (2 * inner, hidden), "down": (hidden, inner)}
    made = {}
    for part, shape in shapes.items():
        each = [torch.randn(shape, generator=GENERATOR) / 8 * 3**e for e in range(experts)]
        matrices = [decode(storage, encode(storage, weight), shape) for weight in each]
        made[part] = type(matrices[0]).stack(matrices)  # type: ignore[attr-defined]
    x, ids = torch.randn(rows, hidden, generator=GENERATOR), random_ids(rows, experts, top_k)
    order, tiles = tables(ids, experts, False, 16)
    h, y = torch.full((rows * top_k, inner), float("nan")), torch.full((rows * top_k, hidden), float("nan"))
    for part, source, out in (("gate_up", x, h), ("down", h, y)):
        weight, (n, k) = stored_weight(made[part], torch.device("cpu")), shapes[part]
        sizes = {"TOPK": top_k, "LIMIT": 0.0, "BN": 16, "BO": 64, "BK": 64, "N": n, "K": k, "GATED": part == "gate_up"}
        plain_experts[(2, len(tiles))](
            *weight.operands(), source, out, order, tiles, rows * top_k, **weight.meta(), **sizes
        )  # fmt: skip
    layer = Experts(made["gate_up"], made["down"], experts=experts, shared=False)
    expected = layer(x, Routing(ids, torch.ones(0)))
    assert torch.allclose(y, expected, rtol=1e-4, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("shared", [True, False])
def test_contributions_are_added_in_order_and_normed(shared: bool) -> None:
    rows, top_k, width, eps = 3, 4, 24, 1e-5
    routing = Routing(random_ids(rows, 9, top_k), torch.rand(rows, top_k, generator=GENERATOR))
    contributions = torch.randn(rows * top_k + rows * shared, width, generator=GENERATOR)
    residual, weight = torch.randn(rows, width, generator=GENERATOR), torch.randn(width, generator=GENERATOR)
    expected = combine(contributions, routing)
    out = torch.full((rows, width), float("nan"))
    sizes = {"H": width, "CHUNK": 8, "TOPK": top_k, "SHARED": shared, "PDL": 0}
    combine_rows[(rows,)](contributions, routing.weights, out, rows, **sizes)
    assert torch.allclose(out, expected, atol=1e-6)
    found, stream = torch.full((rows, width), float("nan")), residual.clone()
    combine_norm_rows[(rows,)](contributions, routing.weights, stream, weight, found, rows, eps, **sizes)
    assert torch.allclose(stream, residual + expected, atol=1e-6)
    wide = (residual + expected).double()
    normed = wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * weight
    assert torch.allclose(found.double(), normed, atol=2e-6)


def test_fragment_order() -> None:
    pairs = torch.arange(3 * 96, dtype=torch.int32).view(3, 96)
    out = torch.full_like(pairs, -7)
    fragment_order[(3, 2)](pairs, out, K=192, BLOCK=64)
    q, j, h = torch.meshgrid(torch.arange(4), torch.arange(4), torch.arange(2), indexing="ij")
    place = (8 * j + 4 * h + q).flatten()
    expected = torch.empty_like(pairs).view(3, 3, 32)
    expected[:, :, place] = pairs.view(3, 3, 32)
    assert torch.equal(out, expected.view(3, 96))
