"""Softmax attention over tiles of keys, with a row's bits independent of everything but its own keys.

Every product has the same shape (rows padded to `ROW_TILE`, one tile of keys), tiles lie at fixed positions and are
added in ascending order, and a masked key contributes an exact zero. So a row gives the same bits in a prefill chunk
of any size, in a decode step, beside longer requests or alone.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dgpp_core.ops.linear import ROW_TILE

KEY_TILE = 2
"""Fewest keys of a tile; a smaller one is filled up with masked keys. A product with one column is one of a matrix and
a vector, which MKL adds in an order that depends on the number of rows."""


def tile_attention(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor, scale: float, sinks: Tensor | None = None
) -> Tensor:
    """Grouped-query attention.

    Args:
        q: ``[B, n, query heads, D]``: n rows of each of B requests.
        k: ``[B, tiles, kv heads, T, D]``; every value finite, also where it is masked.
        v: ``[B, tiles, kv heads, T, Dv]``.
        visible: bool ``[B, tiles, n, T]``: which keys a row attends to. Without sinks each row sees at least one; with
            them a row that sees none gives zeros.
        scale: applied to the scores.
        sinks: float32 ``[query heads]``: a further logit of each head, neither scaled nor a value's (Xiao et al.,
            2023; learned as in gpt-oss).

    Returns:
        ``[B, n, query heads, Dv]``.
    """
    if k.shape[3] < KEY_TILE:
        more = KEY_TILE - k.shape[3]
        k, v, visible = F.pad(k, (0, 0, 0, more)), F.pad(v, (0, 0, 0, more)), F.pad(visible, (0, more))
    batch, n, heads, width = q.shape
    tiles, kv_heads, span = k.shape[1], k.shape[2], k.shape[3]
    share = heads // kv_heads
    rows = n * share
    padded = -(-rows // ROW_TILE) * ROW_TILE
    # [B, 1, kv heads, padded rows, D], row order (n, share)
    grouped = (q * scale).view(batch, n, kv_heads, share, width).permute(0, 2, 1, 3, 4)
    grouped = F.pad(grouped.reshape(batch, 1, kv_heads, rows, width), (0, 0, 0, padded - rows))
    spread = grouped.expand(-1, tiles, -1, -1, -1).reshape(-1, padded, width)
    scores = torch.bmm(spread.float(), k.reshape(-1, span, width).float().transpose(1, 2))
    scores = scores.view(batch, tiles, kv_heads, padded, span)
    mask = visible.unsqueeze(3).expand(-1, -1, -1, share, -1).reshape(batch, tiles, 1, rows, span)
    mask = F.pad(mask, (0, 0, 0, padded - rows), value=True)
    scores = scores.masked_fill(~mask, float("-inf"))
    highest = scores.amax(dim=(1, 4), keepdim=True)
    if sinks is not None:
        sink = F.pad(
            sinks.float().view(kv_heads, 1, share).expand(-1, n, -1).reshape(kv_heads, rows), (0, padded - rows)
        )
        highest = torch.maximum(highest, sink.view(1, 1, kv_heads, padded, 1))
    weights = torch.exp(scores - highest)
    values = torch.bmm(weights.view(-1, padded, span), v.reshape(-1, span, v.shape[-1]).float())
    values = values.view(batch, tiles, kv_heads, padded, -1)
    totals = weights.sum(-1, keepdim=True)
    value, total = values[:, 0], totals[:, 0]
    for tile in range(1, tiles):
        value, total = value + values[:, tile], total + totals[:, tile]
    if sinks is not None:
        total = total + torch.exp(sink.view(1, kv_heads, padded, 1) - highest[:, 0])
    out = (value / total)[:, :, :rows].view(batch, kv_heads, n, share, -1)
    return out.permute(0, 2, 1, 3, 4).reshape(batch, n, heads, -1).to(q.dtype)
