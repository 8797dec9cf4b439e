"""Choice of blocks of keys by pooled index keys that are learned mixtures, one weight a token and dimension."""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.layers.block_index import block_keys, choose_blocks, write_blocks
from dgpp_core.layers.history import with_history
from dgpp_core.layers.paged import PagedIndex, Selection
from dgpp_core.ops.norm import layer_norm


class PooledIndexer:
    """Scores a block as ``sum over h of gate_h relu(q_h . c) / sqrt(heads * width)`` and keeps the best.

    A block's key c is the sum over its tokens i of ``softmax over i (weight_i + place_i) * key_i``, each dimension by
    itself, with keys under a layer norm. What a row sees is as in `dgpp_core.layers.block_index`.

    Args:
        heads, width: of the index queries; a key is one head.
        top_blocks: complete blocks that a row keeps.
        key_norm, key_bias: ``[width]``, of the keys' layer norm.
        eps: of that norm.
        places: ``[tokens a block, width]``, added to the weights of a block's tokens.
    """

    def __init__(
        self, heads: int, width: int, top_blocks: int, *, key_norm: Tensor, key_bias: Tensor, eps: float, places: Tensor
    ) -> None:
        self.heads, self.width, self.top_blocks, self.ratio = heads, width, top_blocks, len(places)
        self.key_norm, self.key_bias, self.eps, self.places = key_norm, key_bias, eps, places.float()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        weights: Tensor,
        gates: Tensor,
        index: PagedIndex,
        pool: Tensor,
        ring: Tensor,
        dtype: torch.dtype,
    ) -> Selection:
        """Write the step's keys and choose for its rows.

        Args:
            q: float32 ``[R, heads * width]``.
            k, weights: float32 ``[R, width]``: keys before their norm, and what decides their share of a pooled key.
            gates: float32 ``[R, heads]``.
            pool: one layer's pooled keys, as in `dgpp_core.layers.block_index.block_keys`, which may raise.
            ring: one layer's rows of key and weight, ``[slots, 1, ring, 2 * width]``, of a window of at least a
                block's tokens less one.
            dtype: that queries are rounded to.
        """
        keys = block_keys(pool, self.ratio, self.width)
        write_blocks(self._pooled(k, weights, index, ring), index, keys, self.ratio)
        queries = q.view(len(q), self.heads, self.width).to(dtype).float()
        gates = gates * (self.heads * self.width) ** -0.5
        return choose_blocks(queries, gates, keys, index, self.ratio, self.top_blocks)

    def _pooled(self, k: Tensor, weights: Tensor, index: PagedIndex, ring: Tensor) -> Tensor:
        """float32 ``[R, width]``: the key of a block that ends at each row."""
        normed = layer_norm(k, self.key_norm, self.key_bias, self.eps)
        rows, pooled = torch.cat((normed, weights), dim=1).unsqueeze(1), []
        for run in with_history(index.batch, rows, ring, self.ratio - 1):
            n, wide = run.shape[1] - self.ratio + 1, run.squeeze(2).float()
            tokens = [torch.split(wide[:, i : i + n], self.width, dim=2) for i in range(self.ratio)]
            given = torch.stack([weight + self.places[i] for i, (_, weight) in enumerate(tokens)])
            shares = torch.exp(given - given.amax(0))
            total, mixed = shares[0], shares[0] * tokens[0][0]
            for i in range(1, self.ratio):
                total, mixed = total + shares[i], mixed + shares[i] * tokens[i][0]
            pooled.append((mixed / total).flatten(0, 1))
        return torch.cat(pooled)
