"""Norms, embedding and token choice in the interpreter, in float32."""

import torch

from dgpp_core.ops.kernels.embedding import draft_input_rows, embed_norm_rows
from dgpp_core.ops.kernels.forbid import forbid_tokens
from dgpp_core.ops.kernels.norms import norm_rows, residual_norm_rows
from dgpp_core.ops.kernels.pick import (
    CANDIDATES,
    chunk_candidates,
    chunk_peaks,
    finish_candidates,
    join_candidates,
    row_peak,
)

H, EPS = 40, 1e-5
G = torch.Generator().manual_seed(3)


def normed(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    wide = x.double()
    return wide / (wide.square().mean(-1, keepdim=True) + EPS).sqrt() * weight.double()


def near(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return torch.allclose(found.double(), wanted.double(), rtol=2e-6, atol=1e-6)


def test_parts_are_added_and_normed() -> None:
    residual, parts = torch.randn(3, H, generator=G), torch.randn(4, 3, H, generator=G)
    weight, out = torch.randn(H, generator=G), torch.full((3, H), float("nan"))
    wanted = residual.double() + parts.double().sum(0)
    residual_norm_rows[(3,)](residual, parts, weight, out, 3, EPS, H=H, CHUNK=16, PARTS=4, PDL=False)
    assert near(residual, wanted)
    assert near(out, normed(wanted, weight))
    again = torch.empty_like(out)
    norm_rows[(3,)](residual, weight, again, EPS, H=H, CHUNK=16, PDL=False)
    assert torch.equal(again, out)


def test_a_forward_begins_with_embedded_rows() -> None:
    table, hidden = torch.randn(9, H, generator=G), torch.randn(3, H, generator=G)
    tokens, first, second = torch.tensor([8, 0, 3]), torch.randn(H, generator=G), torch.randn(H, generator=G)
    residual, out, pair = torch.empty(3, H), torch.empty(3, H), torch.empty(3, 2 * H)
    embed_norm_rows[(3,)](table, tokens, first, residual, out, EPS, H=H, CHUNK=16, PDL=False)
    assert torch.equal(residual, table[tokens])
    assert near(out, normed(table[tokens], first))
    draft_input_rows[(3,)](table, tokens, hidden, first, second, pair, EPS, H=H, CHUNK=16, PDL=False)
    assert near(pair, torch.cat([normed(table[tokens], first), normed(hidden, second)], 1))


def rows_to_pick() -> torch.Tensor:
    """Ties across chunks, signed zeros, forbidden tokens, a NaN, an inf, nothing finite."""
    logits = torch.randn(7, 300, generator=G).round(decimals=1)
    logits[1] = -1.0
    logits[1, [40, 130, 270]] = 5.0
    logits[2] = -torch.rand(300, generator=G)
    logits[2, [70, 200]] = torch.tensor([-0.0, 0.0])
    logits[3, :250] = float("-inf")
    logits[4, 123] = float("nan")
    logits[5, 123] = float("inf")
    logits[6] = float("-inf")
    return logits


def test_the_largest_logit_and_the_lower_id() -> None:
    logits = rows_to_pick()
    ranks, sound = torch.empty(7, 5, dtype=torch.int64), torch.empty(7, 5, dtype=torch.int32)
    tokens, fine = torch.empty(7, dtype=torch.int64), torch.empty(7, dtype=torch.bool)
    chunk_peaks[(5, 7)](logits, ranks, sound, V=300, CHUNK=64, CHUNKS=5, PDL=False)
    row_peak[(7,)](ranks, sound, tokens, fine, CHUNKS=5, SPAN=8, PDL=False)
    wanted = [int((row == row.max()).nonzero()[0]) for row in logits[:4]]
    assert tokens[:4].tolist() == wanted
    assert wanted[1:3] == [40, 70]
    assert fine.tolist() == [True] * 4 + [False] * 3


def test_of_a_row_without_numbers_a_token_is_picked_all_the_same() -> None:
    """What comes after the pick looks it up, before the host has seen that the row is not fine."""
    logits = torch.full((1, 300), float("nan"))
    ranks, sound = torch.empty(1, 5, dtype=torch.int64), torch.empty(1, 5, dtype=torch.int32)
    tokens, fine = torch.empty(1, dtype=torch.int64), torch.empty(1, dtype=torch.bool)
    chunk_peaks[(5, 1)](logits, ranks, sound, V=300, CHUNK=64, CHUNKS=5, PDL=False)
    row_peak[(1,)](ranks, sound, tokens, fine, CHUNKS=5, SPAN=8, PDL=False)
    assert tokens.tolist() == [0]
    assert fine.tolist() == [False]
    best, joined = torch.empty(1, 3, 32, dtype=torch.int64), torch.empty(1, 1, 32, dtype=torch.int64)
    peaks, sums, sound = torch.empty(1, 6), torch.empty(1, 6), torch.empty(1, 3, dtype=torch.int32)
    chunk_candidates[(3, 1)](logits, best, peaks, sums, sound, V=300, CHUNK=128, CHUNKS=3, GROUP=64, KEPT=32, PDL=False)
    join_candidates[(1, 1)](best, joined, COUNT=1, MERGED=4, KEPT=32, LISTS=3, PDL=False)
    values, found, normaliser = torch.empty(1, 32), torch.empty(1, 32, dtype=torch.int64), torch.empty(1).double()
    finish_candidates[(1,)](
        joined, peaks, sums, sound, values, found, normaliser, fine,
        CHUNKS=3, CHUNK_SPAN=4, GROUPS=6, GROUP_SPAN=8, KEPT=32, PDL=False,
    )  # fmt: skip
    assert found.tolist() == [list(range(32))]


def test_candidates_and_normaliser() -> None:
    logits, kept = rows_to_pick(), 32
    chunks, groups = 3, 6
    ranks = torch.empty(7, chunks, kept, dtype=torch.int64)
    peaks, sums = torch.empty(2, 7, groups)
    sound, joined = torch.empty(7, chunks, dtype=torch.int32), torch.empty(7, 1, kept, dtype=torch.int64)
    values, tokens = torch.empty(7, kept), torch.empty(7, kept, dtype=torch.int64)
    normaliser, fine = torch.empty(7, dtype=torch.float64), torch.empty(7, dtype=torch.bool)
    chunk_candidates[(chunks, 7)](
        logits, ranks, peaks, sums, sound, V=300, CHUNK=128, CHUNKS=chunks, GROUP=64, KEPT=kept, PDL=False
    )
    join_candidates[(1, 7)](ranks, joined, COUNT=1, MERGED=4, KEPT=kept, LISTS=chunks, PDL=False)
    finish_candidates[(7,)](
        joined, peaks, sums, sound, values, tokens, normaliser, fine,
        CHUNKS=chunks, CHUNK_SPAN=4, GROUPS=groups, GROUP_SPAN=8, KEPT=kept, PDL=False,
    )  # fmt: skip
    for row in range(4):
        order = sorted(range(300), key=lambda i: (-float(logits[row, i]), i))[:kept]
        assert tokens[row].tolist() == order
        assert torch.equal(values[row], logits[row, order])
    assert near(normaliser[:4], torch.logsumexp(logits[:4].double(), 1))
    assert fine.tolist() == [True] * 4 + [False] * 3
    assert CANDIDATES == 128


def test_tokens_whose_bit_is_clear_are_forbidden_and_the_others_kept() -> None:
    logits = torch.randn(3, 77, generator=G)
    masks = torch.tensor([[-1, 0, -1], [0x55555555, -2147483648, 1 << 12], [0, 0, 0]], dtype=torch.int32)
    allowed = [[bool(int(row[i // 32]) >> i % 32 & 1) for i in range(77)] for row in masks]
    wanted = torch.where(torch.tensor(allowed), logits, -torch.inf)
    forbid_tokens[(3, 3)](logits, masks, V=77, WORDS=3, CHUNK=32, PDL=False)
    assert torch.equal(logits, wanted)
