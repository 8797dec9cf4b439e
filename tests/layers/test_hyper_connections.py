"""Hyper-connections equal their equations and transformers' module, and give a row the same bits in any company."""

import math

import pytest
import torch
from torch import Tensor

from dgpp_core.layers.hyper_connections import Coefficients, HyperConnection, collapse, expand
from dgpp_core.ops.linear import Linear

STREAMS, HIDDEN, ROWS, EPS, NORM_EPS, ROUNDS = 4, 48, 21, 1e-6, 1e-5, 20
SOURCE = torch.Generator().manual_seed(8)
VALUES = STREAMS * (2 + STREAMS)
FN = torch.randn(VALUES, STREAMS * HIDDEN, generator=SOURCE) * (STREAMS * HIDDEN) ** -0.5
BASE, SCALE = 0.5 * torch.randn(VALUES, generator=SOURCE), 0.7 + 0.2 * torch.randn(3, generator=SOURCE)
X = 3 * torch.randn(ROWS, STREAMS, HIDDEN, generator=SOURCE)
GIVEN = torch.randn(ROWS, HIDDEN, generator=SOURCE)


def site(rounds: int = ROUNDS) -> HyperConnection:
    return HyperConnection(Linear(FN), BASE, SCALE, streams=STREAMS, eps=EPS, norm_eps=NORM_EPS, rounds=rounds)


def plain(x: Tensor, rounds: int) -> tuple[list[float], list[float], list[list[float]]]:
    """One row's coefficients, number by number in Python's floats."""
    f = [float(v) for v in x.flatten()]
    size = math.sqrt(sum(v * v for v in f) / len(f) + NORM_EPS)
    m = [sum(w * v for w, v in zip(row, f, strict=True)) / size for row in FN.double().tolist()]
    part = [0] * STREAMS + [1] * STREAMS + [2] * STREAMS**2
    m = [v * float(SCALE[p]) + float(b) for v, p, b in zip(m, part, BASE, strict=True)]
    pre = [1 / (1 + math.exp(-v)) + EPS for v in m[:STREAMS]]
    post = [2 / (1 + math.exp(-v)) for v in m[STREAMS : 2 * STREAMS]]
    c = []
    for j in range(STREAMS):
        row = [math.exp(v) for v in m[STREAMS * (2 + j) : STREAMS * (3 + j)]]
        c.append([v / sum(row) + EPS for v in row])
    for turn in range(2 * rounds - 1):
        for k in range(STREAMS):
            if turn % 2:
                total = sum(c[k]) + EPS
                c[k] = [v / total for v in c[k]]
            else:
                total = sum(row[k] for row in c) + EPS
                for row in c:
                    row[k] /= total
    return pre, post, c


@pytest.mark.parametrize("rounds", [1, 2, ROUNDS])
def test_equal_their_equations(rounds: int) -> None:
    found = site(rounds)(X)
    read, new = collapse(X, found.pre), expand(X, GIVEN, found)
    for row in range(ROWS):
        pre, post, mix = plain(X[row], rounds)
        for part, wanted in zip(found, (pre, post, mix), strict=True):
            assert torch.allclose(part[row].double(), torch.tensor(wanted).double(), rtol=1e-5, atol=1e-7)
        x = X[row].double()
        assert torch.allclose(read[row].double(), torch.tensor(pre).double() @ x, atol=1e-5)
        for i in range(STREAMS):
            mixed = torch.tensor([mix[j][i] for j in range(STREAMS)]).double() @ x
            assert torch.allclose(new[row, i].double(), post[i] * GIVEN[row].double() + mixed, atol=1e-5)


def test_equal_the_module_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.glm5_next.modeling_glm5_next")
    from transformers.models.glm5_next.configuration_glm5_next import Glm5NextTextConfig

    config = Glm5NextTextConfig(
        hidden_size=HIDDEN, hc_mult=STREAMS, hc_eps=EPS, hc_sinkhorn_iters=ROUNDS, rms_norm_eps=NORM_EPS
    )
    module = modeling.Glm5NextTextHyperConnection(config)
    with torch.no_grad():
        for name, value in (("fn", FN), ("base", BASE), ("scale", SCALE)):
            getattr(module, name).copy_(value)
        post, mix, read = module(X[None])
    found = site()(X)
    for ours, theirs in ((found.post, post[0]), (found.mix, mix[0]), (collapse(X, found.pre), read[0])):
        assert torch.allclose(ours, theirs, rtol=1e-5, atol=1e-6)


def test_streams_are_mixed_and_neither_grow_nor_shrink() -> None:
    """Rows and columns of the mix sum to 1, so that equal streams stay what they are."""
    found = site()(X)
    assert torch.allclose(found.mix.sum(1), torch.ones(ROWS, STREAMS), atol=1e-4)
    assert torch.allclose(found.mix.sum(2), torch.ones(ROWS, STREAMS), atol=1e-2)
    equal = X[:, :1].expand(-1, STREAMS, -1)
    assert torch.allclose(expand(equal, torch.zeros(ROWS, HIDDEN), found), equal, atol=1e-4)
    assert not torch.allclose(found.mix, found.mix.transpose(1, 2), atol=1e-2), "or the axes could be exchanged"


def test_a_row_has_the_same_bits_in_any_company() -> None:
    whole = site()(X)
    new = expand(X, GIVEN, whole)
    for rows in (slice(0, 1), slice(4, 7), slice(20, 21), slice(3, 19)):
        some = site()(X[rows])
        assert all(torch.equal(part, other[rows]) for part, other in zip(some, whole, strict=True))
        assert torch.equal(expand(X[rows], GIVEN[rows], some), new[rows])
        assert torch.equal(collapse(X[rows], some.pre), collapse(X, whole.pre)[rows])


def test_streams_in_few_bits_are_widened_once() -> None:
    small = X.bfloat16()
    found = site()(small)
    assert isinstance(found, Coefficients)
    assert torch.equal(found.mix, site()(small.float()).mix)
    assert expand(small, GIVEN.bfloat16(), found).dtype == collapse(small, found.pre).dtype == torch.float32
