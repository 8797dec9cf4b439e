"""Tiled attention against softmax attention written out in float64, and its row bits against themselves."""

import pytest
import torch

from dgpp_core.ops.tile_attention import tile_attention

HEADS, KV_HEADS, WIDTH, TILE = 6, 2, 16, 8


def written_out(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, scale: float) -> torch.Tensor:
    """One row, one head: ``q [D]``, ``k, v [L, D]``, ``visible [L]``."""
    scores = (k.double() @ q.double()) * scale
    weights = torch.softmax(scores[visible], 0)
    return weights @ v.double()[visible]


def case(batch: int, n: int, tiles: int) -> tuple[torch.Tensor, ...]:
    q = torch.randn(batch, n, HEADS, WIDTH)
    k, v = torch.randn(2, batch, tiles, KV_HEADS, TILE, WIDTH)
    keys = torch.arange(tiles * TILE).view(1, tiles, 1, TILE)
    last = torch.randint(n - 1, tiles * TILE, (batch,)).view(-1, 1, 1, 1)
    visible = keys <= last - n + 1 + torch.arange(n).view(1, 1, n, 1)
    return q, k, v, visible


def test_equals_softmax_attention() -> None:
    for batch, n, tiles in [(1, 1, 1), (3, 2, 4), (2, 5, 3)]:
        q, k, v, visible = case(batch, n, tiles)
        out = tile_attention(q, k, v, visible, 0.25)
        for b in range(batch):
            for row in range(n):
                for head in range(HEADS):
                    kv = head // (HEADS // KV_HEADS)
                    rows = k[b, :, kv].reshape(-1, WIDTH), v[b, :, kv].reshape(-1, WIDTH)
                    want = written_out(q[b, row, head], *rows, visible[b, :, row].reshape(-1), 0.25)
                    assert torch.allclose(out[b, row, head].double(), want, rtol=1e-5, atol=1e-6)


def test_a_row_has_the_same_bits_alone_and_with_masked_tiles_behind_it() -> None:
    q, k, v, visible = case(4, 6, 5)
    whole = tile_attention(q, k, v, visible, 0.25)
    for b in range(4):
        for row in range(6):
            reach = int(visible[b, :, row].sum())
            tiles = -(-reach // TILE)
            alone = tile_attention(
                q[b : b + 1, row : row + 1], k[b : b + 1, :tiles], v[b : b + 1, :tiles],
                visible[b : b + 1, :tiles, row : row + 1], 0.25,
            )  # fmt: skip
            assert torch.equal(alone[0, 0], whole[b, row])


@pytest.mark.parametrize("span", [1, 2, 3, 4])
def test_a_row_has_the_same_bits_whatever_the_tile(span: int) -> None:
    """Shapes of a small GLM-4.7: with tiles of one key MKL once added a row by how many rows came with it."""
    source = torch.Generator().manual_seed(span)
    tiles, heads, kv_heads, width = 5, 16, 4, 32
    for batch, n in ((1, 3), (1, 16), (3, 4), (5, 6)):
        q = torch.randn(batch, n, heads, width, generator=source)
        k, v = torch.randn(2, batch, tiles, kv_heads, span, width, generator=source)
        reach = torch.randint(0, tiles * span, (batch, 1, n, 1), generator=source)
        visible = torch.arange(tiles * span).view(1, tiles, 1, span) <= reach
        whole = tile_attention(q, k, v, visible, 0.2)
        for b in range(batch):
            one = slice(b, b + 1)
            for row in range(n):
                alone = tile_attention(q[one, row : row + 1], k[one], v[one], visible[one, :, row : row + 1], 0.2)
                assert torch.equal(alone[0, 0], whole[b, row])
