"""Choice of the keys that a row attends to, by a small scorer beside the attention (DeepSeek-V3.2, 2025, section 2.1).

The choice is a total order: the larger score first, the lower position where scores tie. With scores whose bits do not
depend on the other rows, a row chooses alike in a prefill chunk of any size, in a decode step and on every rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from dgpp_core.layers.paged import PagedIndex, Selection
from dgpp_core.ops.linear import ROW_TILE
from dgpp_core.ops.norm import layer_norm
from dgpp_core.ops.rope import RotaryTable, rotate_pairs
from dgpp_core.ops.router import best
from dgpp_core.ops.tile_attention import KEY_TILE


class SparseIndexer:
    """Scores each key as ``sum over h of gate_h relu(q_h . k) / sqrt(heads * width)`` and keeps the best.

    Args:
        heads, width: of the index queries; a key is one head.
        top_k: keys that a row keeps; a row with no more of them keeps all.
        key_norm, key_bias: ``[width]``, of the keys' layer norm.
        eps: of that norm.
        rope: turns the first ``rope.width`` dimensions of queries and keys, neighbouring pairs; None turns nothing.
    """

    def __init__(
        self,
        heads: int,
        width: int,
        top_k: int,
        *,
        key_norm: Tensor,
        key_bias: Tensor,
        eps: float,
        rope: RotaryTable | None = None,
    ) -> None:
        self.heads, self.width, self.top_k = heads, width, top_k
        self.key_norm, self.key_bias, self.eps, self.rope = key_norm, key_bias, eps, rope

    def __call__(
        self, q: Tensor, k: Tensor, gates: Tensor, index: PagedIndex, pool: Tensor, dtype: torch.dtype
    ) -> Selection:
        """Write the step's keys and choose for its rows.

        Args:
            q: float32 ``[R, heads * width]``.
            k: float32 ``[R, width]``, un-normed.
            gates: float32 ``[R, heads]``.
            pool: one layer's keys, ``[blocks, 1, block_tokens, width]``; the step's rows are written.
            dtype: that queries are rounded to.
        """
        queries = q.view(len(q), self.heads, self.width)
        keys = layer_norm(k, self.key_norm, self.key_bias, self.eps).unsqueeze(1)
        if self.rope is not None:
            cos, sin = self.rope.at(index.batch.positions)
            queries, keys = rotate_pairs(queries, cos, sin), rotate_pairs(keys, cos, sin)
        index.write(pool, keys)
        queries, gates = queries.to(dtype).float(), gates * (self.heads * self.width) ** -0.5
        return tuple(
            self._choice(queries[rows], gates[rows], pool, blocks, visible) for rows, blocks, visible in index.groups
        )

    def _choice(self, q: Tensor, gates: Tensor, pool: Tensor, blocks: Tensor, visible: Tensor) -> Tensor:
        """The chosen of the ``visible`` ``[B, tiles, n, T]``."""
        batch, tiles, n, span = visible.shape
        if tiles * span <= self.top_k:
            return visible
        scores = index_scores(q.view(batch, n, self.heads, -1), gates.view(batch, n, -1), pool[blocks][:, :, 0])
        return top_keys(scores, visible, self.top_k)


def index_scores(q: Tensor, gates: Tensor, keys: Tensor) -> Tensor:
    """float32 ``[B, tiles, n, T]``: ``sum over h of gates[h] relu(q[h] . k)``, heads added in ascending order.

    Args:
        q: float32 ``[B, n, heads, D]``.
        gates: float32 ``[B, n, heads]``.
        keys: ``[B, tiles, T, D]``.
    """
    (batch, n, heads, width), (tiles, span) = q.shape, keys.shape[1:3]
    keys = F.pad(keys.float(), (0, 0, 0, max(0, KEY_TILE - span)))
    rows = F.pad(q.reshape(batch, 1, n * heads, width), (0, 0, 0, -(n * heads) % ROW_TILE))
    spread = rows.expand(-1, tiles, -1, -1).reshape(batch * tiles, -1, width)
    dots = torch.bmm(spread, keys.flatten(0, 1).transpose(1, 2))
    parts = torch.relu(dots[:, : n * heads, :span].view(batch, tiles, n, heads, span))
    weights = gates.view(batch, 1, n, heads, 1)
    total = weights[:, :, :, 0] * parts[:, :, :, 0]
    for head in range(1, heads):
        total = total + weights[:, :, :, head] * parts[:, :, :, head]
    return total


def top_keys(scores: Tensor, visible: Tensor, count: int) -> Tensor:
    """The ``count`` best of each row's ``visible`` keys, all of them where there are fewer; both ``[B, tiles, n, T]``.

    The larger score goes first, then the lower position.
    """
    batch, tiles, n, span = visible.shape
    flat = scores.masked_fill(~visible, -torch.inf).transpose(1, 2).reshape(batch * n, tiles * span)
    chosen = torch.zeros_like(flat, dtype=torch.bool).scatter_(1, best(flat, count), True)
    return chosen.view(batch, n, tiles, span).transpose(1, 2) & visible
