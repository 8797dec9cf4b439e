"""Norms, embedding and token choice on a GPU against float64 and sorting."""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is there on Linux only")

from dgpp_core.ops.kernels.embedding import draft_input, embed_norm
from dgpp_core.ops.kernels.norms import residual_norm, rms_norm
from dgpp_core.ops.kernels.pick import CANDIDATES, candidates, greedy
from dgpp_core.ops.kernels.sample import sample
from dgpp_core.sampling.device import sampled_row, table
from dgpp_core.sampling.params import SamplingParams

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; none is available here"),
]
GPU, NARROW, EPS = torch.device("cuda"), torch.bfloat16, 1e-5
WIDTHS = [32, 576, 5120]


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def rounded(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    """``found`` bfloat16 is ``wanted`` rounded once: within just over half a unit in the last place."""
    return bool(((found.double() - wanted).abs() <= wanted.abs() * 2.0**-8 * 1.001 + 1e-12).all())


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("parts", [1, 3, 8])
def test_parts_are_added_and_normed(width: int, parts: int) -> None:
    residual, partial = torch.randn(65, width, device=GPU), torch.randn(parts, 65, width, device=GPU)
    weight, stream = torch.randn(width, device=GPU).to(NARROW), residual.clone()
    out = residual_norm(stream, partial, weight, EPS, NARROW)
    wanted = residual.clone()
    for part in partial:
        wanted += part
    assert torch.equal(stream, wanted)
    assert rounded(out, normed(wanted, weight))
    for rows in (1, 2, 33):
        again = residual[:rows].clone()
        assert torch.equal(residual_norm(again, partial[:, :rows].contiguous(), weight, EPS, NARROW), out[:rows])
    assert torch.equal(rms_norm(wanted, weight, EPS, NARROW), out)
    assert rounded(rms_norm(out, weight, EPS, NARROW), normed(out, weight))


def test_rows_that_lie_apart_and_rows_of_heads_are_normed() -> None:
    wide, weight = torch.randn(33, 80, device=GPU), torch.randn(64, device=GPU)
    wanted = rms_norm(wide[:, :64].contiguous(), weight, EPS, torch.float32)
    assert torch.equal(rms_norm(wide[:, :64], weight, EPS, torch.float32), wanted)
    heads = torch.randn(33, 4, 64, device=GPU)
    assert torch.equal(
        rms_norm(heads, weight, EPS, torch.float32)[:, 1], rms_norm(heads[:, 1], weight, EPS, torch.float32)
    )
    assert rms_norm(wide[:0, :64], weight, EPS, torch.float32).shape == (0, 64)


@pytest.mark.parametrize("width", WIDTHS)
def test_a_forward_begins_with_embedded_rows(width: int) -> None:
    table, tokens = torch.randn(1000, width, device=GPU).to(NARROW), torch.randint(0, 1000, (70,), device=GPU)
    first, second = torch.randn(2, width, device=GPU).to(NARROW)
    residual, out = embed_norm(table, tokens, first, EPS, NARROW)
    assert torch.equal(residual, table[tokens].float())
    assert rounded(out, normed(table[tokens], first))
    hidden = torch.randn(70, width, device=GPU).to(NARROW)
    pair = draft_input(table, tokens, hidden, first, second, EPS, NARROW)
    assert torch.equal(pair[:, :width], out)
    assert rounded(pair[:, width:], normed(hidden, second))


def logits_with_faults(rows: int, vocab: int) -> torch.Tensor:
    """Random logits with many ties; the last three rows hold a NaN, an inf, and nothing finite."""
    logits = torch.randn(rows, vocab, device=GPU).mul(64).round().div(16)
    logits[0] = -1.0
    logits[0, [vocab - 1, vocab // 2, 3]] = 2.0
    logits[1, 5:] = float("-inf")
    logits[-3, vocab // 3] = float("nan")
    logits[-2, vocab // 3] = float("inf")
    logits[-1] = float("-inf")
    return logits


@pytest.mark.parametrize("vocab", [512, 49152, 151552])
def test_greedy(vocab: int) -> None:
    logits = logits_with_faults(20, vocab)
    tokens, fine = greedy(logits)
    first = (logits[:17] == logits[:17].max(1, keepdim=True).values).int().argmax(1)
    assert torch.equal(tokens[:17], first)
    assert fine.tolist() == [True] * 17 + [False] * 3
    for row in range(20):
        alone = greedy(logits[row : row + 1])
        assert (alone[0][0], alone[1][0]) == (tokens[row], fine[row])


@pytest.mark.parametrize("vocab", [128, 500, 49152, 151000])
def test_of_a_row_without_numbers_a_token_is_picked_all_the_same(vocab: int) -> None:
    logits = torch.full((2, vocab), float("nan"), device=GPU)
    tokens, fine = greedy(logits)
    assert tokens.tolist() == [0, 0]
    assert not fine.any()
    assert candidates(logits).tokens.tolist() == [list(range(CANDIDATES))] * 2
    picked, positions = tokens.clone(), torch.arange(2, device=GPU)
    slots = torch.zeros_like(picked[:1])
    ways = table(1, GPU)
    for way in (SamplingParams(seed=3), SamplingParams(seed=3, top_k=200), SamplingParams(seed=3, top_p=0.4)):
        ways[0] = torch.tensor(sampled_row(way, vocab), device=GPU)
        sample(logits, picked, slots, positions, ways)
        assert ((picked >= 0) & (picked < vocab)).all()


@pytest.mark.parametrize("vocab", [128, 512, 49152, 151552])
def test_candidates(vocab: int) -> None:
    logits = logits_with_faults(20, vocab)
    found = candidates(logits)
    order = logits[:17].cpu().sort(dim=1, descending=True, stable=True)
    assert torch.equal(found.tokens[:17].cpu(), order.indices[:, :CANDIDATES])
    assert torch.equal(found.values[:17].cpu(), order.values[:, :CANDIDATES])
    assert torch.allclose(found.normaliser[:17], torch.logsumexp(logits[:17].double(), 1), rtol=0, atol=2e-6)
    assert found.fine.tolist() == [True] * 17 + [False] * 3
    alone = candidates(logits[9:10])
    assert torch.equal(alone.normaliser, found.normaliser[9:10])
    assert torch.equal(alone.tokens, found.tokens[9:10])
