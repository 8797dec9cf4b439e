"""Router, experts and the residual stream against their equations written out row by row in float64."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from dgpp_core.formats.dense import DenseMatrix
from dgpp_core.ops.experts import Experts, combine, combine_norm
from dgpp_core.ops.linear import Linear
from dgpp_core.ops.mlp import GateUp
from dgpp_core.ops.residual import embed_norm, residual_norm
from dgpp_core.ops.router import Router, Routing, Score

EXPERTS, TOP_K, HIDDEN, INNER = 12, 3, 48, 32


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(8)


def chosen_by_hand(
    logits: Tensor, bias: Tensor, groups: int, top_groups: int, score: Score
) -> tuple[list[int], Tensor]:
    """One row's expert ids, ascending, and the normed weights, from plain Python sorting."""
    scores = {
        "sigmoid": torch.sigmoid(logits), "softmax": torch.softmax(logits, 0),
        "sqrt_softplus": F.softplus(logits).sqrt(),
    }[score]  # fmt: skip
    biased = (scores + bias).tolist()
    size = len(biased) // groups
    strength = [sum(sorted(biased[g * size : (g + 1) * size])[-2:]) for g in range(groups)]
    kept = sorted(range(groups), key=lambda g: (-strength[g], g))[:top_groups]
    eligible = [e for e in range(len(biased)) if e // size in kept]
    ids = sorted(sorted(eligible, key=lambda e: (-biased[e], e))[:TOP_K])
    return ids, scores[ids] / scores[ids].sum()


@pytest.mark.parametrize("score", ["sigmoid", "softmax", "sqrt_softplus"])
@pytest.mark.parametrize(("groups", "top_groups"), [(1, 1), (4, 2)])
def test_the_biased_scores_choose_and_the_unbiased_weigh(groups: int, top_groups: int, score: Score) -> None:
    weight, bias, x = torch.randn(EXPERTS, HIDDEN) / 7, torch.randn(EXPERTS), torch.randn(40, HIDDEN)
    router = Router(weight, bias, TOP_K, groups=groups, top_groups=top_groups, scale=2.5, score=score)
    routing = router(x)
    assert routing.ids.dtype == torch.int32
    for row in range(len(x)):
        logits = weight.double() @ x[row].double()
        ids, weights = chosen_by_hand(logits, bias.double(), groups, top_groups, score)
        assert routing.ids[row].tolist() == ids
        assert torch.allclose(routing.weights[row].double(), 2.5 * weights, rtol=1e-5)


def test_ties_go_to_the_lower_expert() -> None:
    router = Router(torch.zeros(EXPERTS, HIDDEN), torch.zeros(EXPERTS), TOP_K)
    assert router(torch.randn(2, HIDDEN)).ids.tolist() == [[0, 1, 2]] * 2


def test_a_bias_is_not_rounded_to_a_narrow_dtype() -> None:
    bias = torch.zeros(EXPERTS)
    bias[5] = 1e-6
    router = Router(torch.zeros(EXPERTS, HIDDEN), bias, 1)
    assert router(torch.randn(1, HIDDEN)).ids.tolist() == [[5]]


def make_experts(shared: bool) -> tuple[Experts, Tensor, Tensor]:
    entries = EXPERTS + shared
    gate_up = torch.randn(entries, 2 * INNER, HIDDEN) / HIDDEN**0.5
    down = torch.randn(entries, HIDDEN, INNER) / INNER**0.5
    stored = Experts(
        DenseMatrix(gate_up.flatten(0, 1)), DenseMatrix(down.flatten(0, 1)), experts=EXPERTS, shared=shared
    )
    return stored, gate_up.double(), down.double()


def feed_forward(gate_up: Tensor, down: Tensor, x: Tensor) -> Tensor:
    gate, up = (gate_up @ x).chunk(2)
    return down @ (F.silu(gate) * up)


def test_a_limit_binds_gate_and_up_of_experts_and_of_a_dense_layer_alike() -> None:
    gate_up, down = 4 * torch.randn(2 * INNER, HIDDEN) / HIDDEN**0.5, torch.randn(HIDDEN, INNER)
    x = torch.randn(6, HIDDEN)
    gate, up = (x.double() @ gate_up.double().T).chunk(2, -1)
    assert (gate > 1.5).any()
    assert (up < -1.5).any()
    want = F.silu(gate.clamp(max=1.5)) * up.clamp(-1.5, 1.5)
    assert torch.allclose(GateUp(gate_up, limit=1.5)(x).double(), want, rtol=1e-4, atol=1e-4)
    one = Experts(DenseMatrix(gate_up), DenseMatrix(down), experts=1, shared=False, limit=1.5)
    routing = Routing(torch.zeros(6, 1, dtype=torch.int32), torch.ones(6, 1))
    assert torch.allclose(one(x, routing).double(), want @ down.double().T, rtol=1e-4, atol=1e-3)


def some_routing(rows: int) -> Routing:
    ids = torch.stack([torch.randperm(EXPERTS)[:TOP_K].sort().values for _ in range(rows)])
    return Routing(ids.int(), torch.rand(rows, TOP_K))


@pytest.mark.parametrize("shared", [True, False])
def test_every_row_goes_through_its_experts_and_the_shared_one(shared: bool) -> None:
    experts, gate_up, down = make_experts(shared)
    x, routing = torch.randn(9, HIDDEN), some_routing(9)
    given = experts(x, routing)
    assert given.shape == (9 * TOP_K + 9 * shared, HIDDEN)
    summed = combine(given, routing)
    for row in range(9):
        want = torch.zeros(HIDDEN, dtype=torch.float64)
        for j, e in enumerate(routing.ids[row].tolist()):
            one = feed_forward(gate_up[e], down[e], x[row].double())
            assert torch.allclose(given[row * TOP_K + j].double(), one, rtol=1e-4, atol=1e-5)
            want += routing.weights[row, j].double() * one
        if shared:
            want += feed_forward(gate_up[-1], down[-1], x[row].double())
        assert torch.allclose(summed[row].double(), want, rtol=1e-4, atol=1e-5)


def test_a_rows_bits_do_not_depend_on_the_others() -> None:
    experts, _, _ = make_experts(True)
    router = Router(torch.randn(EXPERTS, HIDDEN) / 7, torch.randn(EXPERTS), TOP_K, groups=4, top_groups=2)
    weight, x, stream = torch.rand(HIDDEN), torch.randn(70, HIDDEN), torch.randn(70, HIDDEN)

    def run(rows: slice) -> tuple[Tensor, Tensor]:
        residual, routing = stream[rows].clone(), router(x[rows])
        y = combine_norm(residual, experts(x[rows], routing), routing, weight, 1e-5, torch.float32)
        return residual, y

    whole = run(slice(0, 70))
    for start, count in [(0, 1), (69, 1), (5, 2), (13, 8), (20, 33), (1, 64)]:
        rows = slice(start, start + count)
        assert all(torch.equal(part, all_rows[rows]) for part, all_rows in zip(run(rows), whole, strict=True))


def test_the_stream_takes_parts_in_order_and_is_normed() -> None:
    residual, parts, weight = torch.randn(5, HIDDEN), torch.randn(3, 5, HIDDEN), torch.rand(HIDDEN)
    before = residual.clone()
    x = residual_norm(residual, parts, weight, 1e-5, torch.float32)
    assert torch.equal(residual, ((before + parts[0]) + parts[1]) + parts[2])
    wide = residual.double()
    want = wide / (wide.square().mean(-1, keepdim=True) + 1e-5).sqrt() * weight.double()
    assert torch.allclose(x.double(), want, rtol=1e-5, atol=1e-6)
    narrow = residual_norm(residual, parts[:0], weight, 1e-5, torch.bfloat16)
    assert torch.equal(narrow, x.bfloat16()), "one rounding, and nothing was added"


def test_the_stream_begins_with_the_embedding_in_float32() -> None:
    table, weight, tokens = torch.randn(20, HIDDEN).bfloat16(), torch.rand(HIDDEN), torch.tensor([3, 0, 19])
    residual, x = embed_norm(table, tokens, weight, 1e-5, torch.bfloat16)
    assert torch.equal(residual, table.float()[tokens])
    assert torch.equal(
        x, residual_norm(residual.clone(), residual.new_empty(0, 3, HIDDEN), weight, 1e-5, torch.bfloat16)
    )


def test_gate_and_up() -> None:
    weight, x = torch.randn(2 * INNER, HIDDEN), torch.randn(6, HIDDEN)
    gate, up = (x.double() @ weight.double().T).chunk(2, -1)
    assert torch.allclose(GateUp(weight)(x).double(), F.silu(gate) * up, rtol=1e-4, atol=1e-4)
    assert GateUp(weight)(x.bfloat16()).dtype == torch.bfloat16


def test_a_product_of_a_stored_matrix_and_its_three_forms() -> None:
    weight, x = torch.randn(INNER, HIDDEN).bfloat16(), torch.randn(6, HIDDEN).bfloat16()
    stored, plain = Linear(DenseMatrix(weight)), Linear(weight.float())
    assert torch.equal(stored.wide(x), plain.wide(x.float()))
    assert torch.equal(stored.partials(x).sum(0), stored.wide(x))
    assert torch.equal(stored(x), stored.wide(x).bfloat16())
    assert Linear(weight)(x[:0]).shape == (0, INNER)
