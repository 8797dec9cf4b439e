"""Choice of blocks of neighbouring keys that a row attends to, scored by one pooled index key a block.

Blocks are runs of ``ratio`` tokens from position 0 on. A row sees all tokens of its best complete blocks and those of
the block that is still open at it. Whether a block is complete depends on the row's position alone, so that a pooled
key of rejected drafts is never read before it is overwritten.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dgpp_core.api.errors import ConfigError
from dgpp_core.layers.history import with_history
from dgpp_core.layers.paged import PagedIndex, Selection
from dgpp_core.layers.sparse_index import index_scores, top_keys
from dgpp_core.ops.fold import fold
from dgpp_core.ops.rope import RotaryTable, rotate


def unit_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """RMS norm over the last axis in float32, times ``weight``, summed in one order."""
    wide = x.float()
    mean = fold(wide.square(), -1).unsqueeze(-1) / x.shape[-1]
    return wide * torch.rsqrt(mean + eps) * weight.float()


def block_keys(pool: Tensor, ratio: int, width: int) -> Tensor:
    """A layer's pooled keys ``[blocks, index blocks of a block, width]``, a view of its pool.

    Args:
        pool: ``[blocks, 1, block_tokens, width / ratio]``: a token's row is its share of the pooled key of its block.

    Raises:
        ConfigError: paged blocks that are no whole number of index blocks.
    """
    if pool.shape[2] % ratio:
        raise ConfigError(
            "a paged block would cut a block of index keys",
            where="block_tokens",
            found=str(pool.shape[2]),
            expected=f"a multiple of {ratio}",
        )
    return pool.view(len(pool), pool.shape[2] // ratio, width)


def write_blocks(made: Tensor, index: PagedIndex, keys: Tensor, ratio: int) -> None:
    """Keep ``made`` ``[R, width]``, pooled up to each row; those of rows that end no block go to block 0: no request's.

    Args:
        keys: of `block_keys`.
    """
    ends = (index.batch.positions + 1) % ratio == 0
    places = torch.div(index.offset, ratio, rounding_mode="floor")
    keys[torch.where(ends, index.block, 0), places] = made.to(keys.dtype)


def choose_blocks(q: Tensor, gates: Tensor, keys: Tensor, index: PagedIndex, ratio: int, top_blocks: int) -> Selection:
    """The tokens of each row's best complete blocks, and those of its open one.

    Larger scores go first, equal ones by the lower block.

    Args:
        q: float32 ``[R, heads, width]``.
        gates: float32 ``[R, heads]``, of the heads' scores.
        keys: of `block_keys`.
    """

    def choice(rows: slice, blocks: Tensor, visible: Tensor) -> Tensor:
        batch, tiles, n, span = visible.shape
        if tiles * span <= top_blocks * ratio:
            return visible
        complete, queries = visible[..., ratio - 1 :: ratio], q[rows].view(batch, n, *q.shape[1:])
        scores = index_scores(queries, gates[rows].view(batch, n, -1), keys[blocks])
        chosen = top_keys(scores, complete, top_blocks) | ~complete
        return chosen.repeat_interleave(ratio, -1) & visible

    return tuple(choice(*group) for group in index.groups)


class BlockIndexer:
    """Scores a block as ``sum over h of relu(q_h . c) / sqrt(width)`` with ``c`` its pooled key, and keeps the best.

    A pooled key is the mean of the block's raw keys, rounded, normed, and turned to the block's first position.

    Args:
        heads, width: of the index queries; a key is one head.
        ratio: tokens a block.
        top_blocks: complete blocks that a row keeps.
        q_norm, k_norm: ``[width]``, weights of RMS norms.
        rope: turns the first ``rope.width`` dimensions, half-split.
    """

    def __init__(
        self,
        heads: int,
        width: int,
        ratio: int,
        top_blocks: int,
        *,
        q_norm: Tensor,
        k_norm: Tensor,
        eps: float,
        rope: RotaryTable,
    ) -> None:
        self.heads, self.width, self.ratio, self.top_blocks = heads, width, ratio, top_blocks
        self.q_norm, self.k_norm, self.eps, self.rope = q_norm, k_norm, eps, rope

    def __call__(
        self, q: Tensor, k: Tensor, index: PagedIndex, pool: Tensor, ring: Tensor, dtype: torch.dtype
    ) -> Selection:
        """Write the step's keys and choose for its rows.

        Args:
            q: ``[R, heads * width]``.
            k: ``[R, width]``, raw.
            pool: one layer's pooled keys, as in `block_keys`, which may raise.
            ring: one layer's raw keys, ``[slots, 1, ring, width]``, of a window of at least ``ratio - 1``.
            dtype: that queries are rounded to.
        """
        keys = block_keys(pool, self.ratio, self.width)
        self._write(k, index, keys, ring)
        angles = self.rope.of(index.batch, index.batch.positions)
        queries = rotate(unit_norm(q.view(len(q), self.heads, self.width), self.q_norm, self.eps), *angles)
        gates = torch.full_like(queries[..., 0], self.width**-0.5)
        return choose_blocks(queries.to(dtype).float(), gates, keys, index, self.ratio, self.top_blocks)

    def _write(self, k: Tensor, index: PagedIndex, keys: Tensor, ring: Tensor) -> None:
        """Pool the keys up to each row; those of rows that end no block go to block 0, which no request has."""
        batch, pooled = index.batch, []
        for run in with_history(batch, k.unsqueeze(1), ring, self.ratio - 1):
            n, wide = run.shape[1] - self.ratio + 1, run.squeeze(2).float()
            total = wide[:, :n]
            for back in range(1, self.ratio):
                total = total + wide[:, back : back + n]
            pooled.append((total / self.ratio).flatten(0, 1))
        mean = torch.cat(pooled).to(ring.dtype)
        first = (batch.positions - self.ratio + 1).clamp(min=0)
        made = rotate(unit_norm(mean, self.k_norm, self.eps).unsqueeze(1), *self.rope.of(batch, first)).squeeze(1)
        write_blocks(made, index, keys, self.ratio)
